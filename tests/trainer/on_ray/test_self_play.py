"""Pairs and a reference that follows the policy give the same numbers in this process and on two workers on Ray."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from recipe.spin.main_spin import SPIN
from tests.trainer.on_ray.conftest import Run

pytestmark = pytest.mark.slow
OURS = (*SPIN, "critic.enable=false", "actor_rollout_ref.rollout.n=3", "algorithm.kl_ctrl.type=fixed",
        "trainer.ref_update_freq=2", "trainer.save_freq=3")  # fmt: skip
COMPARED = ("actor/dpo_loss", "actor/grad_norm", "rewards/margins", "rewards/accuracies", "training/pairs")


def test_two_workers_keep_pairs_whole_and_move_the_reference_as_one_process_does(train: Callable[..., Run]):
    alone = train("spin_alone", 3, *OURS, "trainer.runtime=local")
    both = train("spin_both", 3, *OURS, "trainer.n_gpus_per_node=2")
    for mine, other in zip(both.steps, alone.steps, strict=True):
        for name in COMPARED:
            assert mine[name] == pytest.approx(other[name], rel=1e-4, abs=1e-5), name
    weights = alone.weights(3), both.weights(3)
    reference, actor = (
        [{name: t for (file, name), t in found.items() if file.startswith(f"{part}/hugging")} for found in weights]
        for part in ("ref", "actor")
    )
    for found in (reference, actor):
        assert found[0].keys() == found[1].keys() and len(found[0]) > 10
        for name, tensor in found[0].items():
            torch.testing.assert_close(found[1][name], tensor, rtol=1e-3, atol=1e-4)
    moved = [not torch.equal(reference[1][name], actor[1][name]) for name in actor[1]]
    assert any(moved), "the policy went on from the reference for one step"
