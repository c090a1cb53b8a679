"""Packing, shared prompts, budgets, the fused head, and what peers share: seen off and on, as arithmetic says."""

from __future__ import annotations

import pytest

from tests.dist import switches
from tests.dist.sharing_cells import sharing
from tests.harness.ranks import run_cells

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Cell -> what each of two ranks returned."""
    return run_cells(2, [sharing], tmp_path_factory.mktemp("runs"))


def test_what_is_computed_and_sent_is_as_arithmetic_says(runs):
    found = runs["sharing"][0]  # the rows are rank 0's
    assert len(found) == 12
    for switch, case in found.items():
        assert case["seen"] == case["expected"] and case["seen"][0] != case["seen"][1], switch
        assert case.get("error", 0.0) < 1e-5, switch


def test_the_page_of_switches_shows_it(runs):
    shown = switches.PAGE.read_text(encoding="utf-8")
    assert switches.sharing_table(runs) in shown, "run python -m tests.dist.switches --write"
