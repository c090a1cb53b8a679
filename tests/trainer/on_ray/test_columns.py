"""Columns that stay in Ray's object store change no number, and move from worker to worker."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.trainer.on_ray.conftest import Run
from tests.trainer.on_ray.test_same_numbers import numbers

pytestmark = pytest.mark.slow
WORDS = (
    "algorithm.adv_estimator=grpo",
    "algorithm.use_kl_in_reward=false",
    "algorithm.filter_groups.enable=true",
    "trainer.n_gpus_per_node=2",
    "trainer.save_freq=2",
)


def test_a_run_by_reference_has_the_bits_of_one_by_value(train: Callable[..., Run]):
    value, reference = (
        train(f"columns_{state}", 2, *WORDS, f"transfer_queue.enable={state}") for state in ("false", "true")
    )
    assert [numbers(step) for step in reference.steps] == [numbers(step) for step in value.steps]
    assert reference.samples == value.samples and len(value.samples) == 2
    ours, theirs = reference.weights(2), value.weights(2)
    assert ours.keys() == theirs.keys() and len(ours) > 30
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    assert all(step["perf/controller/fetched/responses_mb"] > 0 for step in reference.steps), "text is scored"
    first, last = ("perf/controller/fetched/input_ids_mb" in step for step in reference.steps)
    assert not first, "only workers read these"
    assert last, "the surplus is saved with its entries"
    for step in value.steps:
        assert step["perf/controller/total_mb"] > 0
        assert not any(name.startswith("perf/controller/fetched/") for name in step)
