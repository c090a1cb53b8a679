"""No modules import each other in a circle.

As in `test_layers`, imports inside functions and under TYPE_CHECKING count: they hide a circle and do not dissolve it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from tests.sanity.source_tree import imports, module_name, python_files

REMAINING = {
    ("verl.config.convert", "verl.config.mapping", "verl.config.node", "verl.config.schema"),
    (
        "verl.rewards.dispatch",
        "verl.rewards.function",
        "verl.rewards.invoke",
        "verl.rewards.runners.base",
        "verl.rewards.runners.process",
        "verl.rewards.scorers.geo3k",
        "verl.rewards.scorers.numina",
        "verl.rewards.scorers.symbolic",
    ),
}
"""The circles that are left to dissolve; this list only shrinks."""


def circles(graph: Mapping[str, Iterable[str]]) -> set[tuple[str, ...]]:
    """The strongly connected components of more than one module (Tarjan, 1972), each sorted."""
    number: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    components: set[tuple[str, ...]] = set()

    def visit(module: str) -> None:
        number[module] = lowest[module] = len(number)
        stack.append(module)
        for target in graph[module]:
            if target not in number:
                visit(target)
            if target in stack:
                lowest[module] = min(lowest[module], lowest[target])
        if lowest[module] == number[module]:
            start = stack.index(module)
            if len(stack) - start > 1:
                components.add(tuple(sorted(stack[start:])))
            del stack[start:]

    for module in graph:
        if module not in number:
            visit(module)
    return components


def import_graph() -> dict[str, list[str]]:
    """Module -> the modules of the package that it imports, wherever in the file."""
    files = {module_name(path): path for path in python_files("verl")}
    return {
        module: sorted({found.module for found in imports(path)} & files.keys() - {module})
        for module, path in files.items()
    }


def test_modules_do_not_import_each_other_in_a_circle():
    found = circles(import_graph())
    listed = [" <-> ".join(circle) for circle in sorted(found - REMAINING)]
    assert not listed, "move what both sides need below them, or hand it over as an argument:\n" + "\n".join(listed)
    assert found >= REMAINING, f"dissolved, so take them off the list: {sorted(REMAINING - found)}"


def test_the_search_sees_circles_and_nothing_else():
    chain = {"a": ["b", "c"], "b": ["c"], "c": []}
    assert circles(chain) == set()
    assert circles({**chain, "c": ["b"]}) == {("b", "c")}
    assert circles({**chain, "c": ["a"], "d": ["d2"], "d2": ["d", "a"]}) == {("a", "b", "c"), ("d", "d2")}
