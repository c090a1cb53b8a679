"""Upstream's import paths. All of them lie in `paths`, laid out as upstream's modules are; skip it at first.

A file there is imported under upstream's name alone: ``verl/compat/paths/utils/fs.py`` is the module `verl.utils.fs`.
Files re-export what the rooms have, or what `forms` puts upstream's signature around.
"""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

from verl.compat.absent import ABSENT

PATHS = Path(__file__).parent / "paths"
_IMPORT_FROM = dis.opmap["IMPORT_FROM"]


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
    """The ``__getattr__`` of a module: of a name without a meaning here, the `AttributeError` says what has.

    In ``from module import name`` it is an ImportError: Python would put its text in place of an AttributeError's.
    """

    def missing(name: str) -> Any:
        instead, caller = ABSENT.get(f"{module}.{name}"), sys._getframe(1)
        if instead is None:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        is_import = caller.f_code.co_code[caller.f_lasti] == _IMPORT_FROM
        raise (ImportError if is_import else AttributeError)(f"{module}.{name} does not exist here. {instead}")

    return missing


def install() -> None:
    """Look here before the folders, which may be empty ones of an older version; once per process."""
    if UpstreamPaths not in sys.meta_path:
        sys.meta_path.insert(sys.meta_path.index(PathFinder), UpstreamPaths)
