"""Benchmarks, which no other test runs, import names that the library has."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def missing(source: str) -> list[str]:
    """What a module imports from the library that is not there."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "verl":
            module = importlib.import_module(node.module)
            wanted = [(name.name, f"{node.module}.{name.name}") for name in node.names]
            found += [full for name, full in wanted if not hasattr(module, name) and not is_module(module, full)]
    return found


def is_module(package: ModuleType, name: str) -> bool:
    return hasattr(package, "__path__") and importlib.util.find_spec(name) is not None


@pytest.mark.parametrize("file", sorted(BENCHMARKS.rglob("*.py")), ids=lambda file: file.stem)
def test_a_benchmark_imports_only_names_that_exist(file):
    assert missing(file.read_text(encoding="utf-8")) == []


def test_a_name_that_is_gone_is_seen():
    assert missing("def main():\n    from verl.errors import VerlError, NoSuchError") == ["verl.errors.NoSuchError"]
