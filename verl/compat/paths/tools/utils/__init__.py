"""Helpers of tools under upstream's path."""
