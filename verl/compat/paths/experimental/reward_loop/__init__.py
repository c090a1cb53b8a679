"""Reward managers under upstream's newer import path."""
