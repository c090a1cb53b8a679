"""Whatever imports from the library, in code or in a text (a string, a page, a script), imports what exists.

Read by a pattern, without importing anything: a text is code of another process, and code may be for another machine.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sanity.source_tree import ROOT, module_names, parse, show, tracked_files

NAME = r"[A-Za-z_]\w*"
PATH = rf"verl(?:\.{NAME})*"
FROM = re.compile(rf"\bfrom\s+({PATH})\s+import\s+(?:\(([\w\s,]+)\)|({NAME}[\w ,]*))")
MODULE = re.compile(rf"(?<![^\s;\"'])(?:import|-m)\s+({PATH})")
TARGET = re.compile(rf"(?<![\w.])(verl(?:\.{NAME})+):({NAME})\b")
KINDS = {".py", ".md", ".rst", ".sh", ".ipynb", ".toml", ".yaml", ".yml", ".ini", ".cfg", ""}
INVENTED = {
    ("tests/sanity/test_benchmark_names.py", "verl.errors.NoSuchError"): "a name that does not exist",
    ("tests/trainer/ppo/test_stream.py", "verl.trainer.ppo.schedules.sync.SyncSchedule"): "of an earlier release",
    ("tests/sanity/test_house.py", "verl.sandbox.b"): "a small library of the test's own",
    ("tests/sanity/test_house.py", "verl.engines.e"): "a small library of the test's own",
    ("tests/sanity/test_house.py", "verl.engines.d.NAME"): "a small library of the test's own",
}
"""(file, name) -> why a file imports something that does not exist. This file itself is left out."""

Written = tuple[str, str | None]
"""A module, and what is taken out of it."""


def written(text: str) -> Iterator[Written]:
    """Every import of the library that stands in a text."""
    for source, several, names in FROM.findall(text):
        for entry in (several or names).split(","):
            words = entry.split()
            if words and (len(words) == 1 or words[1] == "as"):
                yield source, words[0]
    yield from ((module, None) for module in MODULE.findall(text))
    yield from TARGET.findall(text)


def home(module: str) -> str:
    """Upstream's import paths lie in a tree of their own, of which folders without an ``__init__`` are none."""
    away = module.replace("verl.", "verl.compat.paths.", 1)
    return away if away in module_names() and file_of(away).exists() else module


def file_of(module: str) -> Path:
    path = ROOT / module.replace(".", "/")
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


@functools.cache
def bound(module: str) -> frozenset[str]:
    """What a module binds at its top level, also inside ``if`` and ``try``."""
    names: set[str] = set()
    path = file_of(home(module))
    waiting: list[ast.AST] = list(parse(path).body) if path.exists() else []
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.ImportFrom) and node.names[0].name == "*":
            names |= bound(str(node.module))
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        else:
            waiting += ast.iter_child_nodes(node)
    if "__getattr__" in names:  # a table of what is loaded late
        constants = [node.value for node in ast.walk(parse(path)) if isinstance(node, ast.Constant)]
        names |= {text for text in constants if isinstance(text, str) and text.isidentifier()}
    return frozenset(names)


def exists(module: str, name: str | None) -> bool:
    if home(module) not in module_names():
        return False
    return name is None or home(f"{module}.{name}") in module_names() or name in bound(module)


def test_every_import_names_what_exists():
    wrong, used = [], set()
    for path in tracked_files():
        if path.suffix not in KINDS or path == Path(__file__) or path.stat().st_size > 1 << 20:
            continue
        text = path.read_text(encoding="utf-8", errors="replace").replace("\\n", "\n")
        for module, name in written(text):
            full = module if name is None else f"{module}.{name}"
            key = (path.relative_to(ROOT).as_posix(), full)
            if key in INVENTED:
                used.add(key)
            elif not exists(module, name):
                wrong.append(f"{show(path)}: {full}")
    assert not wrong, "imported, and not there:\n" + "\n".join(sorted(set(wrong)))
    assert used == INVENTED.keys(), "these exceptions stand for nothing any more"


@pytest.mark.parametrize(
    ("text", "imports"),
    [
        ("from verl.a.b import One, two as three", [("verl.a.b", "One"), ("verl.a.b", "two")]),
        ("from verl.a import (\n    One,\n    Two,\n)\n", [("verl.a", "One"), ("verl.a", "Two")]),
        ("python -c 'import verl.a; from verl import b; print(b.c)'", [("verl", "b"), ("verl.a", None)]),
        ("torchrun -m verl.trainer.x key=1", [("verl.trainer.x", None)]),
        ("reward='verl.a.b:function'", [("verl.a.b", "function")]),
        ("what we import from verl, in words; version:verl", []),
    ],
)
def test_imports_are_read_from_texts(text, imports):
    assert list(written(text)) == imports


def test_what_does_not_exist_is_known():
    assert exists("verl.errors", "ConfigError") and exists("verl", "DataProto") and exists("verl.config", None)
    assert not exists("verl.errors", "Nothing") and not exists("verl.nothing", None)
