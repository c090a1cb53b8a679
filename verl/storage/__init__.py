"""Local, HDFS and hub paths: expanded, copied to this machine, staged in shared memory."""

from verl.storage.fetch import copy_to_local
from verl.storage.paths import copy, exists, expand, is_hub_name, is_remote, missing_path, resolve

__all__ = ["copy", "copy_to_local", "exists", "expand", "is_hub_name", "is_remote", "missing_path", "resolve"]
