"""Samplers under upstream's path."""

from verl.compat import absent_names
from verl.registry import SAMPLERS

__getattr__ = absent_names(__name__)


def get_rollout_class(rollout_name: str, mode: str = "async") -> type:
    """The class of a sampler by its name; each serves requests of its own."""
    return SAMPLERS.get(rollout_name)
