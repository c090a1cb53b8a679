"""Position ids, masks and generation settings under the path that users' code imports them from."""

from verl.algorithms.sequences import compute_position_id_with_mask, create_random_mask
from verl.models.generation_settings import get_generation_config

__all__ = ["compute_position_id_with_mask", "create_random_mask", "get_generation_config"]
