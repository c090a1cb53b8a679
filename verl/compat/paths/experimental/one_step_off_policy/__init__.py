"""Upstream's folder of one-step-off training."""
