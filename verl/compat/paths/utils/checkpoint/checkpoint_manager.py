"""Finding checkpoints, and saving before a machine is taken away, under upstream's path."""

import time
from pathlib import Path

from verl import env
from verl.checkpoint.find import TRACKER, find_latest_ckpt_path
from verl.metrics import notice

EXPIRY = ("MLP_CURRENT_CAPACITY_BLOCK_EXPIRATION_TIMESTAMP", "SAGEMAKER_CURRENT_CAPACITY_BLOCK_EXPIRATION_TIMESTAMP")


def get_checkpoint_tracker_filename(root_path: str) -> str:
    """The file that names the newest step."""
    return str(Path(root_path) / TRACKER)


def should_save_ckpt_esi(max_steps_duration: float, save_ckpt_duration: float = 60, redundant_time: float = 0) -> bool:
    """Whether a machine that is lent until a known time ends before a further step and its save would.

    Args:
        max_steps_duration: seconds of the longest step so far; 0 before there is one.
    """
    until = next((float(value) for value in map(env.get, EXPIRY) if value), None)
    if until is None or max_steps_duration <= 0:
        return False
    left = until - time.time()
    if left < 0:
        notice("ESI", "the machine's time is over already")
    return left <= max_steps_duration + save_ckpt_duration + redundant_time
