"""Copies between paths under upstream's path; they live in `verl.storage`."""

from verl.storage import copy, copy_to_local, exists
from verl.utils.hdfs_io import makedirs

copy_local_path_from_hdfs = copy_to_local


def local_mkdir_safe(path: str) -> str:
    """Make a folder and those above it, which may exist; returns it."""
    makedirs(path)
    return path
