"""vLLM as an async engine in an actor of its own beside a trainer on Ray; weights reach it through shared memory."""

from __future__ import annotations

import pytest

from tests.harness.programs import command, curve, metrics

pytestmark = pytest.mark.slow
STEPS = 6


@pytest.mark.parametrize("backend", ["shared_memory", "gloo"])
def test_grpo_with_vllm_in_its_own_actor_trains_on_what_the_new_weights_sample(arithmetic, own_ray_folder, backend):
    done = command(
        "verl.trainer.main_ppo",
        *arithmetic.arguments,
        "algorithm.adv_estimator=grpo",
        "actor_rollout_ref.rollout.name=vllm",
        f"actor_rollout_ref.rollout.checkpoint_engine.backend={backend}",
        "trainer.runtime=ray",
        "trainer.n_gpus_per_node=1",
        "trainer.async_weight_update=true",
        f"trainer.experiment_name={backend}",
        f"trainer.total_training_steps={STEPS}",
        f"trainer.test_freq={STEPS}",
        f"trainer.default_local_dir={backend}",
        "trainer.skip_old_log_prob=false",  # so that the trainer's log-probs are there to compare with
        cwd=arithmetic.folder,
    )
    found = metrics(arithmetic.folder, "e2e", backend)
    gaps = curve(found, "training/rollout_probs_diff_max")
    assert len(gaps) == STEPS and max(gaps) < 1e-4, done.stdout[-2000:]
    rewards = curve(found, "critic/rewards/mean")
    assert rewards[-1] > rewards[0] + 0.02


def test_groups_that_vllm_samples_beside_training_go_on_with_new_weights(arithmetic, own_ray_folder):
    """Old log-probs are recomputed with the newest version, so that their gap to vLLM's shows its staleness alone."""
    command(
        "verl.trainer.main_ppo",
        *arithmetic.arguments,
        "algorithm.adv_estimator=grpo",
        "trainer.v1.trainer_mode=fully_async",
        "async_training.staleness_threshold=1",
        "async_training.trigger_parameter_sync_step=1",
        "async_training.partial_rollout=true",
        "algorithm.rollout_correction.rollout_is=token",
        "actor_rollout_ref.rollout.name=vllm",
        "actor_rollout_ref.rollout.calculate_log_probs=true",
        "actor_rollout_ref.hybrid_engine=false",
        "actor_rollout_ref.rollout.nnodes=1",
        "actor_rollout_ref.rollout.n_gpus_per_node=1",
        "actor_rollout_ref.rollout.checkpoint_engine.backend=shared_memory",
        "trainer.experiment_name=beside",
        f"trainer.total_training_steps={STEPS}",
        f"trainer.test_freq={STEPS}",
        "trainer.default_local_dir=beside",
        cwd=arithmetic.folder,
    )
    steps = metrics(arithmetic.folder, "e2e", "beside")
    stale = curve(steps, "training/off_policy/trajectory_staleness_worst/max")
    gaps = curve(steps, "training/rollout_probs_diff_max")
    assert stale[0] == 0 and max(stale) == 1
    assert gaps[0] < 1e-4 < max(gaps)
    rewards = curve(steps, "critic/rewards/mean")
    assert rewards[-1] > rewards[0] + 0.02
