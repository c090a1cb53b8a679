"""Correction, greedy baselines and group filtering are the controller's: two workers change none of their numbers."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.trainer.on_ray.conftest import Run

pytestmark = pytest.mark.slow
WORDS = (
    "algorithm.adv_estimator=remax",
    "algorithm.filter_groups.enable=true",
    "algorithm.rollout_is_threshold=1.0005",
    "algorithm.rollout_is=true",
    "algorithm.rollout_is_mode=mask",
    "actor_rollout_ref.rollout.dtype=bfloat16",
)
SAME = ("critic/score/", "critic/advantages/", "training/num_gen_batches", "training/filter_groups/", "mismatch/")


def test_two_workers_weigh_and_filter_as_one_process_does(train: Callable[..., Run], tmp_path: Path):
    """Both have the environment variables of the run's ``runtime_env``, which an external library shows."""
    one = train("corrected_alone", 2, *WORDS, "trainer.runtime=local")
    variables = "ray_kwargs.ray_init.runtime_env.env_vars"
    shown = (
        f"{variables}.SEEN_FOLDER={tmp_path}",
        f"{variables}.SEEN_COUNT=3",
        "actor_rollout_ref.model.external_lib=tests.trainer.on_ray.seen",
    )
    two = train("corrected_two", 2, *WORDS, "trainer.n_gpus_per_node=2", *shown)
    workers = {int(file.name): file.read_text() for file in tmp_path.iterdir()}
    workers.pop(os.getpid(), None)
    assert list(workers.values()) == ["3", "3"]
    first, other = one.steps[0], two.steps[0]
    names = [name for name in first if name.startswith(SAME)]
    assert len([name for name in names if name.startswith("mismatch/")]) > 30
    for name in names:
        assert other[name] == pytest.approx(first[name], rel=1e-4, abs=1e-5), name
    assert 0 < first["mismatch/rollout_is_masked_fraction"] < 1
    assert two.steps[1]["actor/grad_norm"] == pytest.approx(one.steps[1]["actor/grad_norm"], rel=1e-2)
