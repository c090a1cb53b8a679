"""FSDP2 on two and four processes against the plain engine: outputs, loss, gradients, weights, checkpoints."""

from __future__ import annotations

import pytest

from tests.dist import engine_cells as cells
from tests.dist import resume_cells as resume
from tests.dist.group import run_cells

pytestmark = pytest.mark.dist

EXACT = 1e-5
RESUME = (resume.same_ranks_same_bits, resume.saved_here, resume.loaded_here, resume.loaded_into_a_frozen_engine)
CELLS = {
    2: (
        cells.tied_and_uneven,
        cells.a_rank_without_rows,
        cells.value_model,
        cells.mixture,
        cells.kept_gathered_and_reduced_once,
        cells.offloaded,
        cells.replicated,
        cells.half_precision,
        cells.shards_are_real,
        cells.nan_on_one_rank,
        cells.empty_everywhere,
        cells.ranks_called_differently,
        cells.weights_in_and_out,
        *RESUME,
        resume.written_by_a_worker,
    ),
    4: (
        cells.tied_and_uneven,
        cells.a_rank_without_rows,
        cells.hybrid,
        cells.shards_are_real,
        cells.nan_on_one_rank,
        *RESUME,
    ),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """World size -> cell -> what each rank returned; checkpoints of each size wait in one folder for the next."""
    folder = tmp_path_factory.mktemp("runs")
    found = {1: {"saved_here": [resume.plain_saved(folder)]}}
    found |= {size: run_cells(size, CELLS[size], folder) for size in CELLS}
    found[1]["loaded_here"] = [{f"from-{size}": resume.plain_loaded(folder, size) for size in CELLS}]
    return found


def world(*names: str):
    return pytest.mark.parametrize("size, name", [(size, name) for name in names for size in CELLS if _has(size, name)])


def _has(size: int, name: str) -> bool:
    return any(cell.__name__ == name for cell in CELLS[size])


@world("tied_and_uneven", "a_rank_without_rows", "value_model", "mixture", "kept_gathered_and_reduced_once")
def test_outputs_loss_gradient_and_weights_equal_the_plain_engine(runs, size, name):
    errors = runs[size][name][0]["errors"]
    assert {"loss", "gradient", "weights"} < set(errors)
    assert all(error <= EXACT for error in errors.values()), errors


@world("offloaded", "hybrid", "replicated")
def test_where_weights_live_and_how_often_does_not_change_a_number(runs, size, name):
    assert all(error <= EXACT for error in runs[size][name][0]["errors"].values())


@world("half_precision")
def test_bf16_products_stay_near_float32(runs, size, name):
    errors = runs[size][name][0]["errors"]
    assert 1e-5 < errors["gradient"] < 0.03 and errors["weights"] < 0.02 and errors["log_probs"] < 0.01


@world("tied_and_uneven", "a_rank_without_rows", "value_model", "hybrid")
def test_metrics_are_those_of_the_whole_mini_batch_on_every_rank(runs, size, name):
    found = runs[size][name]
    assert all(answer["metrics"] == found[0]["metrics"] for answer in found)
    for metrics, expected in zip(found[0]["metrics"], found[0]["expected_metrics"]):
        assert metrics == pytest.approx(expected, rel=1e-5, abs=1e-6)


@world("a_rank_without_rows")
def test_a_rank_may_have_no_rows(runs, size, name):
    assert runs[size][name][-1]["rows"] == 0 and sum(answer["rows"] for answer in runs[size][name]) == cells.ROWS


@world("shards_are_real")
def test_each_rank_holds_its_share_of_weights_and_moments(runs, size, name):
    found = runs[size][name]
    whole = found[0]["whole"]
    assert sum(answer["weights"] for answer in found) == whole
    assert all(answer["weights"] == pytest.approx(whole / size, rel=0.01) for answer in found)
    assert found[0]["report"] == f"{found[0]['weights']} of {whole} bytes of weights; " + (
        "a forward pass gathers them in 3 steps"
    )
    assert all(answer["moments"] == pytest.approx(2 * whole / size, rel=0.01) for answer in found)


@world("shards_are_real")
def test_each_layer_is_gathered_once_per_pass_and_reduced_once_per_step(runs, size, name):
    for answer in runs[size][name]:
        layers, gathers, reduces = answer["layers"], "_allgather_base_", "_reduce_scatter_base_"
        assert layers == 2 and answer["left_gathered"] == 0
        assert answer["infer"][gathers] == layers + 1 and reduces not in answer["infer"]
        assert answer["train"][gathers] == 2 * layers + 1  # what lies outside the layers stays gathered
        assert answer["train_kept"][gathers] == layers + 1
        assert answer["train"][reduces] == answer["train_kept"][reduces] == layers + 1
        assert answer["batches"][reduces] == answer["micro_batches"] * (layers + 1)
        assert answer["batches_once"][reduces] == layers + 1


@world("nan_on_one_rank")
def test_a_nan_gradient_on_one_rank_skips_the_step_on_all(runs, size, name):
    for answer in runs[size][name]:
        assert answer["skipped"] == 1 and not answer["finite"] and answer["changed"] == []
        assert answer["skipped_next"] == 0


@world("empty_everywhere")
def test_a_step_without_rows_anywhere_is_skipped(runs, size, name):
    assert all(answer["skipped_empty_step"] == 1 and answer["loss"] == 0 for answer in runs[size][name])


@world("ranks_called_differently")
def test_a_rank_that_is_called_differently_or_fails_is_an_error_on_all_and_nobody_waits(runs, size, name):
    for rank, answer in enumerate(runs[size][name]):
        told = answer["told"]
        assert "disagree about what to compute" in told["outputs"] and "entropy" in told["outputs"]
        assert told["rows"].startswith("DataError: row 0" if rank == 1 else "WorkerError: rank 1 failed: row 0")
        assert told["folder"].startswith("ModelError: there is no such folder")
        assert answer["after"] == [2, 7]


@world("weights_in_and_out")
def test_weights_move_between_engines_under_their_names_on_disk(runs, size, name):
    for answer in runs[size][name]:
        assert answer["different"] and answer["equal"] and answer["doubled"] and answer["names"]
        assert "model.norm.weight" in answer["told"]


@world("same_ranks_same_bits")
def test_a_resumed_engine_is_bitwise_the_one_that_went_on(runs, size, name):
    for rank, answer in enumerate(runs[size][name]):
        assert answer["metrics"][0] == answer["metrics"][1] and answer["rng"]
        assert answer["different"] == [] and answer["same_names"] and answer["same_scalars"]
        assert (answer["tensors"] > 0) == (rank == 0), "whole tensors are gathered on rank 0 alone"
    assert len(runs[size][name][0]["rng_names"]) == size


@pytest.mark.parametrize("saved, loaded", [(1, 2), (1, 4), (2, 1), (2, 4), (4, 1)])
def test_a_checkpoint_goes_on_with_equal_numbers_on_another_number_of_ranks(runs, saved, loaded):
    expected = runs[saved]["saved_here"][0]
    for answer in runs[loaded]["loaded_here"]:
        found = answer[f"from-{saved}"]
        assert found["loss"] == pytest.approx(expected["loss"], rel=EXACT) and found["lr"] == expected["lr"]
        assert found["weights"] <= EXACT


def test_training_has_the_same_loss_on_one_two_and_four_ranks(runs):
    losses = [runs[size]["saved_here"][0]["loss"] for size in (1, 2, 4)]
    assert losses == pytest.approx([losses[0]] * 3, rel=EXACT)


@world("written_by_a_worker")
def test_a_worker_writes_on_its_first_rank_and_fails_on_all(runs, size, name):
    found = runs[size][name]
    assert found[0]["records"] == ["optimizer.safetensors", "extra.safetensors"][::-1] and found[1]["records"] == []
    for answer in found:
        assert answer["losses"][0] == answer["losses"][1] and answer["hf"]
        assert "holds no such role" in answer["told"]


@world("loaded_into_a_frozen_engine")
def test_a_frozen_engine_takes_only_weights_and_no_other_models(runs, size, name):
    for answer in runs[size][name]:
        assert answer["moved"] > 1e-3
        assert "Qwen3ForCausalLM" in answer["told"] and "LlamaForCausalLM" in answer["told"]
