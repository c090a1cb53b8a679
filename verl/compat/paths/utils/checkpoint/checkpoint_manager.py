"""Finding checkpoints, and saving before a machine is taken away, under upstream's path."""

from pathlib import Path

from verl.checkpoint.find import TRACKER, find_latest_ckpt_path
from verl.trainer.expiry import should_save_ckpt_esi

__all__ = ["find_latest_ckpt_path", "get_checkpoint_tracker_filename", "should_save_ckpt_esi"]


def get_checkpoint_tracker_filename(root_path: str) -> str:
    """The file that names the newest step."""
    return str(Path(root_path) / TRACKER)
