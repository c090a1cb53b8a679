"""Tensor parallelism on FSDP2: equal numbers, and linear layers and vocabulary really are shared."""

from __future__ import annotations

import pytest

from tests.dist import tensor_cells as cells
from tests.dist.engine_cells import With
from tests.dist.group import run_cells

pytestmark = pytest.mark.dist

EXACT = 1e-5
EQUAL = (
    cells.tensor,
    cells.tensor_tied,
    cells.tensor_padded,
    cells.tensor_fused,
    cells.tensor_value_model,
    cells.tensor_adapter,
    cells.tensor_mixture,
)
CELLS = {
    2: (*EQUAL, cells.tensor_is_shared, cells.tensor_resumes, cells.tensor_nan_on_one_rank, cells.tensor_refused),
    4: (cells.tensor, cells.tensor_tied, cells.tensor_adapter, cells.tensor_mixture, cells.tensor_resumes),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """World size -> cell -> what each rank returned."""
    folder = tmp_path_factory.mktemp("runs")
    found = {n: run_cells(n, [With("fsdp2", cell) for cell in own], folder) for n, own in CELLS.items()}
    return {n: {name.removeprefix("fsdp2: "): answer for name, answer in each.items()} for n, each in found.items()}


def cases(*wanted):
    return pytest.mark.parametrize(
        "size, name", [(n, cell.__name__) for n, own in CELLS.items() for cell in own if cell in wanted]
    )


@cases(*EQUAL)
def test_outputs_loss_gradient_and_weights_equal_the_plain_engine(runs, size, name):
    errors = runs[size][name][0]["errors"]
    assert {"loss", "gradient", "weights"} < set(errors)
    assert all(error <= EXACT for error in errors.values()), errors


@cases(*EQUAL)
def test_metrics_are_those_of_the_whole_mini_batch_on_every_rank(runs, size, name):
    found = runs[size][name]
    assert all(answer["metrics"] == found[0]["metrics"] for answer in found)
    for metrics, expected in zip(found[0]["metrics"], found[0]["expected_metrics"]):
        waste = {"padding_waste"}  # is that of another cut into micro-batches
        assert {k: v for k, v in metrics.items() if k not in waste} == pytest.approx(
            {k: v for k, v in expected.items() if k not in waste}, rel=1e-5, abs=1e-6
        )


def test_each_rank_holds_half_of_every_map_and_computes_half_of_the_vocabulary(runs):
    for answer in runs[2]["tensor_is_shared"]:
        shared, sharded = answer["bytes"]
        assert shared == pytest.approx(answer["whole"] / 2, rel=0.01) and sharded == pytest.approx(shared, rel=0.01)
        assert answer["q_proj"] == [16, 32] and answer["o_proj"] == [32, 16]
        assert set(answer["widths"]) == {130}


def test_a_forward_pass_sums_once_behind_the_embedding_attention_and_the_mlp_of_each_layer(runs):
    """Ring sums of N tokens of width H: one for the embeddings, two per layer."""
    for answer in runs[2]["tensor_is_shared"]:
        assert answer["sums"] == [answer["tokens"] * 32] * (1 + 2 * 2)


def test_a_backward_pass_sums_once_for_all_maps_that_read_the_same_tensor(runs):
    """Queries, keys and values together, gate and input together, and the head."""
    for answer in runs[2]["tensor_is_shared"]:
        assert answer["sums_per_step"] == (1 + 2 * 2) + (2 * 2 + 1)


@cases(cells.tensor_resumes)
def test_a_checkpoint_goes_on_bitwise_and_in_other_engines_with_an_equal_loss(runs, size, name):
    for answer in runs[size][name]:
        losses = answer["losses"]
        assert losses[0] == losses[1] and losses[2] == pytest.approx(losses[0], rel=EXACT)
        assert answer["same"] and answer["near"] <= EXACT
    assert runs[size][name][0]["plain"] == pytest.approx(losses[0], rel=EXACT)


@cases(cells.tensor_nan_on_one_rank)
def test_a_loss_that_is_not_finite_skips_the_step_on_all(runs, size, name):
    assert all(answer["skipped"] == [1, 0] for answer in runs[size][name])


def test_what_cannot_be_shared_is_refused_before_training(runs):
    for told in runs[2]["tensor_refused"]:
        assert "1 KV heads cannot be shared evenly by 2 processes" in told["heads"]
        assert "2 processes cannot share" in told["ranks"] and "1, 2" in told["ranks"]
        assert "hybrid sharding" in told["hybrid"] and "ulysses_sequence_parallel_size" in told["sequences"]
        assert "no tensor-parallel plan for OPTForCausalLM" in told["plan"]
