"""No modules import each other in a circle.

As in `test_layers`, imports inside functions and under TYPE_CHECKING count: they hide a circle and do not dissolve it.
"""

from __future__ import annotations

from scripts.house import House, circles
from tests.sanity.source_tree import ROOT


def test_modules_do_not_import_each_other_in_a_circle():
    listed = [" <-> ".join(circle) for circle in sorted(circles(House(ROOT).graph))]
    assert not listed, "move what both sides need below them, or hand it over as an argument:\n" + "\n".join(listed)


def test_the_search_sees_circles_and_nothing_else():
    chain = {"a": ["b", "c"], "b": ["c"], "c": []}
    assert circles(chain) == set()
    assert circles({**chain, "c": ["b"]}) == {("b", "c")}
    assert circles({**chain, "c": ["a"], "d": ["d2"], "d2": ["d", "a"]}) == {("a", "b", "c"), ("d", "d2")}
