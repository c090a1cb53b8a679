"""Ulysses sequence parallelism on FSDP2: equal numbers, and the tokens really are shared."""

from __future__ import annotations

import pytest

from tests.dist import ulysses_cells as cells
from tests.harness.ranks import cells_on_demand

pytestmark = pytest.mark.slow

EXACT = 1e-5
CELLS = {
    2: (
        cells.ulysses,
        cells.ulysses_with_windows,
        cells.ulysses_value_model,
        cells.ulysses_shares_tokens,
        cells.ulysses_nan_on_one_rank,
        cells.ulysses_refused,
        cells.ulysses_over_images,
        cells.ulysses_over_inner_features,
        cells.ulysses_over_blocks,
        cells.ulysses_over_tiles,
    ),
    4: (
        cells.ulysses,
        cells.ulysses_in_pairs,
        cells.ulysses_shares_tokens,
        cells.ulysses_same_rows,
        cells.ulysses_over_images,
    ),
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


@cases(
    cells.ulysses,
    cells.ulysses_in_pairs,
    cells.ulysses_with_windows,
    cells.ulysses_value_model,
    cells.ulysses_over_images,
    cells.ulysses_over_inner_features,
    cells.ulysses_over_blocks,
    cells.ulysses_over_tiles,
)
def test_outputs_loss_gradient_and_weights_equal_the_plain_engine(runs, size, name):
    errors = runs[size][name][0]["errors"]
    assert {"loss", "gradient", "weights"} < set(errors)
    assert all(error <= EXACT for error in errors.values()), errors


@cases(cells.ulysses, cells.ulysses_in_pairs, cells.ulysses_value_model)
def test_metrics_are_those_of_the_whole_mini_batch_on_every_rank(runs, size, name):
    found = runs[size][name]
    assert all(answer["metrics"] == found[0]["metrics"] for answer in found)
    for metrics, expected in zip(found[0]["metrics"], found[0]["expected_metrics"]):
        assert metrics == pytest.approx(expected, rel=1e-5, abs=1e-6)


@cases(cells.ulysses_shares_tokens)
def test_every_mlp_sees_its_part_of_the_tokens_and_only_heads_travel(runs, size, name):
    for answer in runs[size][name]:
        part = -(-answer["tokens"] // size)  # padded to equal parts
        assert answer["seen"] == [part] * answer["layers"]
        kv_heads = max(answer["kv_heads"], size)
        per_layer = part * (2 * answer["heads"] + 2 * kv_heads) * answer["dim"]
        assert answer["exchanged"] == answer["layers"] * per_layer


@cases(cells.ulysses_nan_on_one_rank)
def test_a_loss_that_is_not_finite_skips_the_step_on_all(runs, size, name):
    assert all(answer["skipped"] == 1 for answer in runs[size][name])


@cases(cells.ulysses_refused)
def test_what_cannot_be_shared_evenly_is_refused_before_training(runs, size, name):
    for told in runs[size][name]:
        assert "1 attention heads cannot be shared evenly by 2 processes" in told["heads"]
        assert "2 processes do not divide" in told["ranks"] and "1, 2" in told["ranks"]
        assert "has layers that carry a state from token to token" in told["state"]
        assert "use_remove_padding=true in the model's section" in told["padded"]


@cases(cells.ulysses_same_rows)
def test_peers_are_one_data_parallel_rank_and_may_be_handed_the_same_rows(runs, size, name):
    found = runs[size][name]
    assert [part["data_rank"] for part in found] == [[0, 2, True], [0, 2, False], [1, 2, True], [1, 2, False]]
    own = [row for part in found for row in part["own"]]
    alike = [row for part in found if part["data_rank"][2] for row in part["alike"]]
    assert alike == own and found[0]["alike"] == found[1]["alike"] and found[2]["alike"] == found[3]["alike"]
