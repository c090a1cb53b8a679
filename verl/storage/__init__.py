"""Local, remote and hub paths: expanded, copied here and there, staged in shared memory, pushed to a hub; tables."""

from verl.storage.fetch import copy_to_local
from verl.storage.paths import copy, exists, expand, is_hub_name, is_remote, missing_path, resolve
from verl.storage.push import check_push, default_hub, push_to_hub
from verl.storage.remote import RemoteFolder, remote_folder

__all__ = [
    "RemoteFolder",
    "check_push",
    "copy",
    "copy_to_local",
    "default_hub",
    "exists",
    "expand",
    "is_hub_name",
    "is_remote",
    "missing_path",
    "push_to_hub",
    "remote_folder",
    "resolve",
]
