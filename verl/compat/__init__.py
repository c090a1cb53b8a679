"""Upstream's import paths. All of them lie in `paths`, laid out as upstream's modules are; skip it at first.

A file there is imported under upstream's name alone: ``verl/compat/paths/utils/fs.py`` is the module `verl.utils.fs`.
Files re-export what lives in the rooms, or put upstream's signature around it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

from verl.compat.absent import ABSENT

PATHS = Path(__file__).parent / "paths"


class UpstreamPaths:
    """Finds the module ``verl.a.b`` in ``paths/a/b.py`` or in the folder ``paths/a/b`` with an ``__init__.py``.

    Python's own machinery loads it, so names, pickles, tracebacks and ``python -m`` are those of any other module.
    """

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: Any = None) -> ModuleSpec | None:
        root, *parts = name.split(".")
        if root != "verl" or not parts:
            return None
        spec = PathFinder.find_spec(name, [str(PATHS.joinpath(*parts[:-1]))], target)
        if spec is not None and spec.origin is not None:
            return spec
        if name in ABSENT and PathFinder.find_spec(name, path, target) is None:
            raise ModuleNotFoundError(f"{name} does not exist here. {ABSENT[name]}", name=name)
        return None


def absent_names(module: str) -> Callable[[str], Any]:
    """The ``__getattr__`` of a module: a name without a meaning here is an ImportError that says what has.

    Any other name is an `AttributeError`, as everywhere.
    """

    def missing(name: str) -> Any:
        instead = ABSENT.get(f"{module}.{name}")
        if instead is None:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        raise ImportError(f"{module}.{name} does not exist here. {instead}", name=module)

    return missing


def install() -> None:
    """Look here before the folders, which may be empty ones of an older version; once per process."""
    if UpstreamPaths not in sys.meta_path:
        sys.meta_path.insert(sys.meta_path.index(PathFinder), UpstreamPaths)
