"""The parity matrix: every layout over ranks equals the plain engine, one process group per number of ranks.

``python -m tests.dist.parity`` runs it and prints the table.
"""

from __future__ import annotations

import pytest

from tests.dist import parity
from tests.dist.parity_cells import SIZES, Beside, layouts
from tests.harness.ranks import cells_on_demand

pytestmark = pytest.mark.slow

EXACT = 1e-5
CELLS = [layout for layout in layouts() if layout.absence is None]


@pytest.fixture(scope="module")
def errors(tmp_path_factory):
    """World size -> layout -> relative errors on each rank."""
    cells = {size: [Beside(layout) for layout in CELLS if layout.ranks == size] for size in SIZES}
    with cells_on_demand(cells, tmp_path_factory.mktemp("matrix")) as answers:
        yield answers


@pytest.mark.parametrize("layout", CELLS, ids=str)
def test_outputs_loss_and_gradient_equal_the_plain_engine(errors, layout):
    found = errors[layout.ranks][str(layout)][0]
    assert set(found) == {"log_probs", "entropy", "loss", "gradient"}
    assert all(error <= EXACT for error in found.values()), found


def test_every_combination_exists_or_has_a_reason():
    everything = list(layouts())
    assert len(everything) == len(set(everything)) == 3 * 2 * 2 * 2 * 2 * 2
    assert len(CELLS) == 44 and len({layout.absence for layout in everything}) == 1 + 3


def test_the_page_shows_the_matrix():
    assert parity.PAGE.read_text(encoding="utf-8") == parity.page(), "run python -m tests.dist.parity --write"
