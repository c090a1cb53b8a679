"""One vLLM engine of two processes beside two trainer ranks on Ray: the first rank leads it, both train."""

from __future__ import annotations

import pytest

from tests.harness.programs import command, curve, metrics

pytestmark = pytest.mark.slow
STEPS = 6


def test_grpo_with_one_engine_of_two_processes_beside_two_trainers_learns(arithmetic, own_ray_folder):
    done = command(
        "verl.trainer.main_ppo",
        *arithmetic.arguments,
        "algorithm.adv_estimator=grpo",
        "actor_rollout_ref.rollout.name=vllm",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
        "trainer.runtime=ray",
        "trainer.n_gpus_per_node=2",
        "trainer.device=cpu",
        "trainer.experiment_name=two",
        f"trainer.total_training_steps={STEPS}",
        f"trainer.test_freq={STEPS}",
        "trainer.default_local_dir=two",
        "trainer.skip_old_log_prob=false",  # so that the trainers' log-probs are there to compare with
        cwd=arithmetic.folder,
    )
    steps = metrics(arithmetic.folder, "e2e", "two")
    gaps = curve(steps, "training/rollout_probs_diff_max")
    assert len(gaps) == STEPS and max(gaps) < 1e-5, done.stdout[-2000:]
    rewards = curve(steps, "critic/rewards/mean")
    assert rewards[-1] > rewards[0] + 0.02
