"""Loading users' code from files, under the path and names that users' code imports."""

from typing import Any

from verl.registry import load_from_module, load_module

__all__ = ["load_extern_object", "load_extern_type", "load_module"]


def load_extern_object(module_path: str, object_name: str) -> Any:
    """The object of that name in a Python file or in ``pkg://package.module``."""
    return load_from_module(module_path, object_name)


def load_extern_type(file_path: str, type_name: str) -> type:
    """The class of that name in a Python file."""
    return load_from_module(file_path, type_name)
