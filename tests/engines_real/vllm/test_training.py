"""`main_ppo` with vLLM as its sampler learns the quickstart's task as it does with `hf`."""

from __future__ import annotations

import pytest

from tests.harness.programs import command, curve, metrics

pytestmark = pytest.mark.slow
ACCURACY = "val-core/arithmetic/reward/mean@1"
STEPS = 30


def test_grpo_over_vllm_reaches_the_accuracy_of_hf(arithmetic):  # the fixture
    found = {}
    for engine in ("hf", "vllm"):
        command(
            "verl.trainer.main_ppo",
            *arithmetic.arguments,
            "algorithm.adv_estimator=grpo",
            f"actor_rollout_ref.rollout.name={engine}",
            f"trainer.experiment_name={engine}",
            f"trainer.total_training_steps={STEPS}",
            f"trainer.test_freq={STEPS}",
            f"trainer.default_local_dir={engine}",
            "trainer.skip_old_log_prob=false",  # so that the trainer's log-probs are there to compare with
            cwd=arithmetic.folder,
        )
        found[engine] = metrics(arithmetic.folder, "e2e", engine)
    before, *_, after = curve(found["vllm"], ACCURACY)
    assert before <= 0.6
    assert after >= 0.9 and after >= curve(found["hf"], ACCURACY)[-1] - 0.05
    # What was sampled is what is trained on: the trainer finds the sampler's log-probs.
    gaps = curve(found["vllm"], "training/rollout_probs_diff_max")
    assert len(gaps) == STEPS and max(gaps) < 1e-4
