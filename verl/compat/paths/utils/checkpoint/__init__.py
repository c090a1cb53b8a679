"""Checkpoints by hand under upstream's path."""
