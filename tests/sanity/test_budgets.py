"""Sizes a reader can hold: files, functions, nesting, branches. Known excesses stand in a list that may only shrink."""

from __future__ import annotations

import ast
import functools
import statistics
from dataclasses import dataclass
from pathlib import Path

from tests.sanity.source_tree import ROOT, parse, python_files, read_toml, show

LIMITS = {"file": 600, "function": 80, "nesting": 4, "branches": 12}
MEDIAN_FILE = 150
EXCEPTIONS = ROOT / "tests" / "sanity" / "budget_exceptions.toml"

BLOCKS = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.With, ast.AsyncWith, ast.Try, ast.Match)
BRANCHES = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.ExceptHandler, ast.match_case, ast.IfExp)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass
class Sizes:
    """Of one function, without the functions and classes defined inside it."""

    lines: int
    nesting: int = 0
    """Levels of nested blocks; an ``elif`` is on the level of its ``if``."""
    branches: int = 0


def functions(tree: ast.AST) -> dict[str, Sizes]:
    """The sizes of every function, by a name like ``Class.method``; one walk over the millions of nodes."""
    found: dict[str, Sizes] = {}
    left: list[tuple[ast.AST, str, Sizes | None, int]] = [(tree, "", None, 0)]
    while left:
        node, prefix, sizes, level = left.pop()
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (*FUNCTIONS, ast.ClassDef)):
                name, inner = f"{prefix}{child.name}", None
                if isinstance(child, FUNCTIONS):
                    inner = found[name] = Sizes(child.end_lineno - child.lineno + 1)
                left.append((child, f"{name}.", inner, 0))
                continue
            is_elif = isinstance(node, ast.If) and isinstance(child, ast.If) and node.orelse == [child]
            below = level + (isinstance(child, BLOCKS) and not is_elif)
            if sizes:
                sizes.nesting = max(sizes.nesting, below)
                sizes.branches += isinstance(child, BRANCHES)
            left.append((child, prefix, sizes, below))
    return found


def measures(path: Path) -> dict[str, int]:
    """Every measured size of one file: ``'verl/a.py: function A.f' -> lines``."""
    where = show(path)
    found = {f"{where}: file": len(path.read_text(encoding="utf-8").splitlines())}
    for name, sizes in functions(parse(path)).items():
        found[f"{where}: function {name}"] = sizes.lines
        found[f"{where}: nesting {name}"] = sizes.nesting
        found[f"{where}: branches {name}"] = sizes.branches
    return found


def limit_of(key: str) -> int:
    return LIMITS[key.split(": ")[1].split(" ")[0]]


@functools.cache
def excesses() -> dict[str, int]:
    found = {key: size for path in python_files() for key, size in measures(path).items()}
    return {key: size for key, size in found.items() if size > limit_of(key)}


def exceptions() -> dict[str, int]:
    return read_toml(EXCEPTIONS)["allowed"]


def test_sizes_stay_within_their_budget():
    allowed = exceptions()
    errors = [
        f"{key} is {size}, the budget is {allowed.get(key, limit_of(key))}"
        for key, size in sorted(excesses().items())
        if size > allowed.get(key, limit_of(key))
    ]
    assert not errors, "\n" + "\n".join(errors)


def test_the_exception_list_only_shrinks():
    found = excesses()
    errors = [
        f"{key} = {size}: " + (f"lower it to {found[key]}" if key in found else "remove it")
        for key, size in exceptions().items()
        if found.get(key, 0) < size
    ]
    assert not errors, "an entry became better:\n" + "\n".join(errors)


def test_the_median_file_of_the_library_is_short():
    sizes = [len(path.read_text().splitlines()) for path in python_files("verl") if path.stat().st_size]
    assert statistics.median(sizes) <= MEDIAN_FILE


def test_the_measures_are_what_they_say():
    tree = ast.parse(
        "def f(x):\n"
        "    for i in x:\n"  # level 1, branch 1
        "        if i:\n"  # level 2, branch 2
        "            pass\n"
        "        elif x:\n"  # same level, branch 3
        "            with x:\n"  # level 3
        "                y = 1 if x else 2\n"  # branch 4
        "    def g():\n"
        "        while True:\n"  # of g, not of f
        "            pass\n"
    )
    assert functions(tree) == {"f": Sizes(10, nesting=3, branches=4), "f.g": Sizes(3, nesting=1, branches=1)}
