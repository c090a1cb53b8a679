"""Position ids, masks and generation settings under the path that users' code imports them from."""

from verl.algorithms.sequences import compute_position_id_with_mask, create_random_mask

__all__ = ["compute_position_id_with_mask", "create_random_mask"]
