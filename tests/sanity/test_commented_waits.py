"""Every collective and every lock says who calls it, and in which order: that is what a deadlock is looked up by."""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Iterator
from pathlib import Path

from tests.sanity.source_tree import ROOT, parse, python_files

COLLECTIVES = {
    "all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce", "all_to_all", "all_to_all_single",
    "barrier", "batch_isend_irecv", "broadcast", "broadcast_object_list", "gather", "gather_object", "irecv", "isend",
    "monitored_barrier", "recv", "reduce", "reduce_scatter", "reduce_scatter_tensor", "scatter", "scatter_object_list",
    "send",
}  # fmt: skip
LOCKS = {"Lock", "RLock", "Condition", "Semaphore", "BoundedSemaphore", "Barrier", "flock", "lockf"}
TRANSPORTS, KEEPERS = {"dist", "torch.distributed"}, {"threading", "asyncio", "multiprocessing", "fcntl"}
WORDS = ("ollective", "rank", "lock", "caller", "thread")
"""One of them stands in a docstring that speaks of the wait."""


def waits(tree: ast.Module) -> Iterator[tuple[ast.Call, str]]:
    """Calls of collectives and makers of locks, each with the docstring of the function around it."""

    def visit(node: ast.AST, docstring: str) -> Iterator[tuple[ast.Call, str]]:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            docstring = ast.get_docstring(node) or ""
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            home = ast.unparse(node.func.value)
            if node.func.attr in (COLLECTIVES if home in TRANSPORTS else LOCKS if home in KEEPERS else ()):
                yield node, docstring
        for child in ast.iter_child_nodes(node):
            yield from visit(child, docstring)

    yield from visit(tree, "")


def uncommented(text: str, tree: ast.Module) -> list[int]:
    """Lines of waits without a comment on the line or the two above, or a docstring that speaks of them."""
    calls = list(waits(tree))
    if not calls:
        return []
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    comments = {token.start[0] for token in tokens if token.type == tokenize.COMMENT}
    return [
        call.lineno
        for call, docstring in calls
        if not comments & set(range(call.lineno - 2, (call.end_lineno or call.lineno) + 1))
        and not any(word in docstring for word in WORDS)
    ]


def test_every_collective_and_every_lock_says_who_calls_it():
    bare = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in python_files("verl")
        for line in uncommented(path.read_text(encoding="utf-8"), parse(path))
    ]
    assert bare == [], "say who calls it, in which order"


def test_a_bare_lock_and_a_bare_collective_are_seen():
    text = """
import threading, torch.distributed as dist

lock = threading.Lock()
told = threading.Lock()  # who starts first

def bare(x):
    "Sums."
    dist.all_reduce(x)

def explained(x):
    "Collective: all ranks, layer after layer."
    dist.all_reduce(x)
"""
    assert uncommented(text, ast.parse(text)) == [4, 9]
    assert any(list(waits(parse(Path(path)))) for path in python_files("verl")), "there are some"
