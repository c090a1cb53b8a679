"""What the sanity tests know about the tree: its files, its parsed modules, and what each module imports."""

from __future__ import annotations

import ast
import functools
import os
import subprocess
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
CODE_FOLDERS = ("verl", "recipe", "examples", "scripts", "benchmarks", "tests")
IGNORED = {".git", ".venv", "__pycache__", "build", "dist", "outputs", "checkpoints", ".mypy_cache", ".ruff_cache"}


@dataclass(frozen=True)
class Import:
    """One imported module as seen from one line; ``attribute`` is what a ``from`` import takes out of it."""

    module: str
    attribute: str | None
    line: int


@functools.cache
def tracked_files() -> tuple[Path, ...]:
    """Every file of the project that git tracks or would track; every file where there is no git."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    try:
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    except (OSError, subprocess.CalledProcessError):
        listed = [str(p) for p in _walk()]
    return tuple(p for p in (ROOT / name for name in listed) if p.is_file())


def _walk() -> Iterator[Path]:
    for folder, names, files in os.walk(ROOT):
        names[:] = [n for n in names if n not in IGNORED and not n.endswith(".egg-info") and not n.startswith(".venv")]
        yield from (Path(folder, name).relative_to(ROOT) for name in files)


def python_files(*folders: str) -> list[Path]:
    """The python files under these top-level folders, sorted."""
    wanted = folders or CODE_FOLDERS
    return sorted(p for p in tracked_files() if p.suffix == ".py" and p.relative_to(ROOT).parts[0] in wanted)


@functools.cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def read_toml(path: Path) -> dict[str, Any]:
    return tomllib.loads(path.read_text(encoding="utf-8"))


def show(path: Path, line: int | None = None) -> str:
    """``verl/errors.py:12``, for messages."""
    return f"{path.relative_to(ROOT)}" + (f":{line}" if line else "")


def module_name(path: Path) -> str:
    """``verl/protocol/__init__.py`` -> ``verl.protocol``."""
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
def module_names() -> frozenset[str]:
    """All modules and packages below ``verl``, packages without an ``__init__`` and upstream's paths included."""
    names = {module_name(path) for path in python_files("verl")} | set(upstream_paths())
    return frozenset(names | {".".join(n.split(".")[:i]) for n in names for i in range(1, n.count(".") + 1)})


@functools.cache
def upstream_paths() -> dict[str, Path]:
    """Each module that is imported under upstream's name alone, and its file."""
    names = {module_name(path): path for path in python_files("verl")}
    head = "verl.compat.paths."
    return {"verl." + name.removeprefix(head): path for name, path in names.items() if name.startswith(head)}


def imports(path: Path) -> list[Import]:
    """Everything a file imports, at the top or inside functions; relative imports are resolved."""
    package = module_name(path).split(".")
    if path.name != "__init__.py":
        package = package[:-1]
    found: list[Import] = []
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Import):
            found += [Import(alias.name, None, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            found += [_resolved(module, alias.name, node.lineno) for alias in node.names]
    return found


def _resolved(module: str, name: str, line: int) -> Import:
    """``from verl import env`` imports the module verl.env, not an attribute of verl."""
    full = f"{module}.{name}"
    return Import(full, None, line) if full in module_names() else Import(module, name, line)
