"""Copies between paths under the name that users' code imports; they live in `verl.storage`."""

from verl.storage import copy, copy_to_local, exists

__all__ = ["copy", "copy_to_local", "exists"]
