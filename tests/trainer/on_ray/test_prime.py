"""Models that a recipe adds are roles as any: on two Ray workers, and in a pool of their own, with the same numbers."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from recipe.prime.main_prime import PRIME
from tests.trainer.on_ray.conftest import Run

pytestmark = pytest.mark.slow
COMMAND = [
    *PRIME, "reward.reward_model.model_path=model", "reward.reward_model.implicit.optim.lr=1e-3",
    "reward.reward_model.implicit.prime_norm=none", "data.oversample_factor=2", "data.train_batch_size=2",
]  # fmt: skip
NAMES = ("dpo_loss", "grad_norm", "dpo_acc", "process_reward/mean")


def test_an_implicit_reward_model_learns_and_rates_on_two_workers_as_in_this_process(train: Callable[..., Run]):
    alone = train("prime_alone", 2, *COMMAND, "trainer.runtime=local")
    two = train("prime_two", 2, *COMMAND, "trainer.n_gpus_per_node=2")
    assert [[s["output"] for s in step] for step in two.samples] == [
        [s["output"] for s in step] for step in alone.samples
    ]
    for mine, other in zip(two.steps, alone.steps, strict=True):
        for name in (*(f"reward_model/{name}" for name in NAMES), "actor/loss", "actor/grad_norm"):
            assert mine[name] == pytest.approx(other[name], rel=1e-4, abs=1e-5), name
    assert alone.steps[1]["reward_model/dpo_loss"] < alone.steps[0]["reward_model/dpo_loss"]
