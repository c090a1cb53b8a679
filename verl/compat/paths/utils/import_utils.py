"""Loading users' code, and what is installed, under the path and names that users' code imports."""

import functools
import warnings
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from typing import Any

from verl.models.config import import_external
from verl.registry import load_from_module, load_module, load_object


def load_extern_object(module_path: str, object_name: str) -> Any:
    """The object of that name in a Python file or in ``pkg://package.module``."""
    return load_from_module(module_path, object_name)


def load_extern_type(file_path: str, type_name: str) -> type:
    """The class of that name in a Python file."""
    return load_from_module(file_path, type_name)


def load_class_from_fqn(fqn: str, description: str = "class") -> type:
    """The class at ``package.module.Class``."""
    return load_object(fqn)


def import_external_libs(external_libs: str | Iterable[str] | None = None) -> None:
    """Import modules by name, for what they register."""
    import_external(external_libs if isinstance(external_libs, str) else ",".join(external_libs or ()))


def _finds(package: str) -> Callable[[], bool]:
    return lambda: find_spec(package) is not None


is_nvtx_available, is_vllm_available, is_sglang_available = _finds("nvtx"), _finds("vllm"), _finds("sglang")
is_megatron_core_available = _finds("megatron")


def deprecated(replacement: str = "") -> Callable[[Any], Any]:
    """Decorator: a call warns that the function goes away, and names what replaces it."""

    def wrap(fn: Any) -> Any:
        @functools.wraps(fn)
        def warned(*args: Any, **kwargs: Any) -> Any:
            instead = f"; use {replacement}" if replacement else ""
            warnings.warn(f"{fn.__qualname__} is deprecated{instead}", FutureWarning, stacklevel=2)
            return fn(*args, **kwargs)

        return warned

    return wrap
