"""Correction, greedy baselines and group filtering are the controller's: two workers change none of their numbers."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.trainer.on_ray.conftest import Run

pytestmark = pytest.mark.dist
WORDS = (
    "algorithm.adv_estimator=remax",
    "algorithm.filter_groups.enable=true",
    "algorithm.rollout_is_threshold=1.0005",
    "algorithm.rollout_is=true",
    "algorithm.rollout_is_mode=mask",
    "actor_rollout_ref.rollout.dtype=bfloat16",
)
SAME = ("critic/score/", "critic/advantages/", "training/num_gen_batches", "training/filter_groups/", "mismatch/")


def test_two_workers_weigh_and_filter_as_one_process_does(train: Callable[..., Run]):
    one = train("corrected_alone", 2, *WORDS, "trainer.runtime=local")
    two = train("corrected_two", 2, *WORDS, "trainer.n_gpus_per_node=2")
    first, other = one.steps[0], two.steps[0]
    names = [name for name in first if name.startswith(SAME)]
    assert len([name for name in names if name.startswith("mismatch/")]) > 30
    for name in names:
        assert other[name] == pytest.approx(first[name], rel=1e-4, abs=1e-5), name
    assert 0 < first["mismatch/rollout_is_masked_fraction"] < 1
    assert two.steps[1]["actor/grad_norm"] == pytest.approx(one.steps[1]["actor/grad_norm"], rel=1e-2)
