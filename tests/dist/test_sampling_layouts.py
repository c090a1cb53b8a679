"""Weights from the training layout to a tensor group that samples on the same ranks."""

import pytest

from tests.dist import sampling_cells as cells
from tests.dist.group import run_cells

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    chosen = [
        cells.fsdp_shards_to_a_tensor_group,
        cells.shared_linear_maps_to_a_tensor_group,
        cells.an_adapter_to_a_tensor_group,
        cells.experts_to_a_tensor_group,
        cells.layouts_that_a_sampler_cannot_hold,
    ]
    return run_cells(2, chosen, tmp_path_factory.mktemp("layouts"))


@pytest.mark.parametrize(
    "cell, planned",
    [
        ("fsdp_shards_to_a_tensor_group", True),
        ("shared_linear_maps_to_a_tensor_group", False),
        ("an_adapter_to_a_tensor_group", False),
        ("experts_to_a_tensor_group", False),
    ],
)
def test_samples_have_the_trainers_log_probs_after_each_step(answers, cell, planned):
    for found in answers[cell]:
        assert found["planned"] == planned
        assert found["stale"] > 1e-3, "before the weights arrive the sampler has older ones"
        assert max(found["gaps"]) < 1e-4 and len(found["gaps"]) == 3


def test_a_plan_brings_each_rank_its_part_and_no_more(answers):
    for found in answers["fsdp_shards_to_a_tensor_group"]:
        assert found["sent"] == pytest.approx(found["kept"]) and found["sent"] < 0.52


@pytest.mark.parametrize(
    "name, words",
    [
        ("workers", ("4 workers", "tensor_model_parallel_size", "1, 2, 4")),
        ("heads", ("4 attention heads", "tensor_model_parallel_size", "1, 2, 4")),
        ("elsewhere", ("checkpoint_engine.backend", "naive")),
        ("exactness", ("full_determinism", "tensor_model_parallel_size")),
    ],
)
def test_a_layout_that_the_sampler_cannot_hold_is_refused_with_what_it_can(answers, name, words):
    for told in answers["layouts_that_a_sampler_cannot_hold"]:
        for word in words:
            assert word in told[name], told[name]
