"""vLLM samples a published model of 135 million parameters in a run, with the trainer's probabilities."""

from __future__ import annotations

import pytest

from tests.harness.programs import curve
from tests.harness.published import STEPS, R, digits, to_digits

pytestmark = pytest.mark.slow


def test_a_published_model_sampled_by_vllm_learns_as_by_hf(published, digits_task):
    """Sampled tokens differ between the two, what is learnt does not; vLLM's probabilities are the trainer's."""
    for engine in ("hf", "vllm"):
        steps = to_digits(published, digits_task, engine, f"{R}.name={engine}", "trainer.device=cpu")
        rewards, gaps = curve(steps, "critic/score/mean"), curve(steps, "training/rollout_probs_diff_max")
        print(engine, [round(reward, 3) for reward in rewards], f"probabilities {max(gaps):.1e}")
        assert len(rewards) == len(gaps) == STEPS
        assert rewards[-1] > rewards[0] + 0.1 and max(gaps) < 1e-4
        assert digits(digits_task / engine / f"global_step_{STEPS - 1}/actor/huggingface") > digits(published) + 0.05
