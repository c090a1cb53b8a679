"""Megatron-Core, chosen by configuration, raises the accuracy of the quickstart's task on two processes over gloo.

`tests.megatron.shim` answers its CUDA calls; it is loaded as the model's external library, in every worker.
"""

from __future__ import annotations

import json

import pytest

from tests.e2e.test_learning import ACCURACY, learn
from tests.harness.programs import curve

pytestmark = pytest.mark.slow
TWO = ["trainer.nnodes=1", "trainer.n_gpus_per_node=2", "trainer.device=cpu"]
MEGATRON = [*TWO, "--config-name=ppo_megatron_trainer", "actor_rollout_ref.model.external_lib=tests.megatron.shim"]


def test_grpo_learns_on_packed_rows_that_two_ranks_share_with_rollout_importance_sampling(arithmetic):
    steps = learn(
        arithmetic,
        "megatron",
        6,
        *MEGATRON,
        "algorithm.adv_estimator=grpo",
        "actor_rollout_ref.actor.megatron.context_parallel_size=2",
        "actor_rollout_ref.actor.use_kl_loss=true",
        "actor_rollout_ref.actor.use_dynamic_bsz=true",
        "algorithm.rollout_is_threshold=2",
        "algorithm.rollout_is=true",
        "actor_rollout_ref.rollout.calculate_log_probs=true",
    )
    before, *_, after = curve(steps, ACCURACY)
    print(f"accuracy {before:.2f} -> {after:.2f}")
    assert before <= 0.6
    assert after >= 0.9
    assert abs(curve(steps, "actor/kl_loss")[0]) < 1e-6, "actor and reference start alike"
    for name, least in (("mean", 1.0), ("max", 1.0), ("min", 1.0)):
        assert curve(steps, f"mismatch/rollout_is_{name}") == pytest.approx([least] * 6, abs=1e-4), (
            "the sampler has this step's weights"
        )


def test_ppo_with_a_critic_on_pipeline_stages_goes_on_where_it_was_stopped(arithmetic):
    """Three steps at once, and two and one: the same numbers, bit for bit."""
    common = [
        *MEGATRON,
        "algorithm.adv_estimator=gae",
        "critic.optim.lr=1e-3",
        "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=2",
        "actor_rollout_ref.actor.entropy_coeff=0.001",
        "actor_rollout_ref.actor.ppo_mini_batch_size=32",
    ]
    whole = learn(arithmetic, "stages", 3, *common, "trainer.save_freq=2")
    losses = curve(whole, "critic/vf_loss")
    assert len(losses) == 3 and losses[-1] < losses[0], "the critic learns to predict the return"
    resumed = learn(
        arithmetic,
        "stages_again",
        3,
        *common,
        "trainer.resume_mode=resume_path",
        "trainer.resume_from_path=stages/global_step_2",
    )
    for name in ("actor/pg_loss", "actor/grad_norm", "actor/entropy", "critic/vf_loss", "critic/grad_norm", ACCURACY):
        assert curve(resumed, name)[-1] == curve(whole, name)[-1], name
    folder = arithmetic.folder / "stages" / "global_step_2"
    assert json.loads((folder / "actor" / "huggingface" / "config.json").read_text())["model_type"] == "qwen2"
