"""Expert parallelism on FSDP2: equal numbers, and the experts really are shared."""

from __future__ import annotations

import pytest

from tests.dist import expert_cells as cells
from tests.dist.engine_cells import ROWS
from tests.harness.engines import ragged_batch
from tests.harness.ranks import cells_on_demand
from verl.engines.rows import AlignedRows

pytestmark = pytest.mark.slow

EXACT = 1e-5
CELLS = {
    2: (
        cells.experts,
        cells.experts_replayed,
        cells.experts_that_nobody_asks,
        cells.experts_are_shared,
        cells.experts_resume,
        cells.experts_with_an_adapter,
        cells.experts_refused,
    ),
    4: (cells.experts, cells.experts_replayed, cells.experts_in_pairs, cells.experts_are_shared, cells.experts_resume),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """World size -> cell -> what each rank returned."""
    with cells_on_demand(CELLS, tmp_path_factory.mktemp("runs")) as answers:
        yield answers


def cases(*wanted):
    return pytest.mark.parametrize(
        "size, name",
        [(n, cell.__name__) for n, own in CELLS.items() for cell in own if cell in wanted],
    )


@cases(cells.experts, cells.experts_that_nobody_asks, cells.experts_in_pairs)
def test_outputs_loss_gradient_and_weights_equal_the_plain_engine(runs, size, name):
    errors = runs[size][name][0]["errors"]
    assert {"loss", "gradient", "weights"} < set(errors)
    assert all(error <= EXACT for error in errors.values()), errors
    assert sum(answer["rows"] for answer in runs[size][name]) == ROWS


@cases(cells.experts_replayed)
def test_recorded_experts_are_replayed_and_recorded_as_on_the_plain_engine(runs, size, name):
    errors = runs[size][name][0]["errors"]
    assert len(errors) == 6 and all(error <= EXACT for error in errors.values()), errors
    expected = runs[size][name][0]["expected"]
    assert [answer["differs"] for answer in runs[size][name]] == pytest.approx([expected] * size, abs=1e-6)


def test_an_adapter_on_experts_trains(runs):
    errors = runs[2]["experts_with_an_adapter"][0]["errors"]
    assert all(error <= EXACT for error in errors.values()), errors


@cases(cells.experts_are_shared)
def test_each_rank_holds_its_part_of_the_experts_and_every_token_meets_each_of_its_experts_once(runs, size, name):
    tokens = sum(AlignedRows.of(ragged_batch(rows=5)).lengths)
    for answer in runs[size][name]:
        assert answer["bytes"] * size == answer["whole"]
        assert answer["highest"] < 4 // size  # each rank counts its own experts from 0
        assert tokens <= answer["computed"] / (2 * answer["layers"]) <= tokens + size  # and those of idle ranks


@cases(cells.experts_resume)
def test_a_checkpoint_goes_on_with_shared_experts_bitwise_and_without_them_with_an_equal_loss(runs, size, name):
    for answer in runs[size][name]:
        losses = answer["losses"]
        assert losses[0] == losses[1] and losses[2] == pytest.approx(losses[0], rel=EXACT)
        assert answer["same"] and answer["near"] <= EXACT
    assert runs[size][name][0]["plain"] == pytest.approx(losses[0], rel=EXACT)


@cases(cells.experts_refused)
def test_what_cannot_be_shared_is_refused_before_training(runs, size, name):
    for told in runs[size][name]:
        assert "Qwen2ForCausalLM has no experts" in told["dense"]
        assert "3 experts cannot be shared evenly" in told["odd"] and "1, 3" in told["odd"]
        assert "2 processes cannot share" in told["ranks"]
        assert "hybrid sharding" in told["hybrid"] and "target_modules" in told["adapter"]
