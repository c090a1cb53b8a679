"""Losses under upstream's path."""

from verl.compat import absent_names

__getattr__ = absent_names(__name__)
