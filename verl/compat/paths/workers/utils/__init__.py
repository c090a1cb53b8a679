"""Helpers of workers under upstream's path."""
