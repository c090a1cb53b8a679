"""``python -m recipe.prime.main_prime key=value ...``: `verl.trainer.main_ppo` with PRIME's model, stage and settings.

What the command line says wins over what stands here; the reward model's path, ``reward_model.model.path``, has
to be on the command line. ``algorithm.adv_estimator=rloo``, as upstream's commands have it, means the recipe's own
leave-one-out.
"""

from __future__ import annotations

import sys

from verl.metrics import notice
from verl.trainer import main_ppo

ESTIMATOR = "algorithm.adv_estimator=recipe.prime.core:leave_one_out"
PRIME = (
    ESTIMATOR,
    "trainer.v1.trainer_mode=recipe.prime.schedule:PrimeSchedule",
    "reward.reward_model.enable=true",
    # four times as many prompts are sampled; those in the middle of the range of difficulty are trained on
    "data.oversample_factor=4",
    "data.filter_accuracy=true",
    "data.filter_truncate=true",
    "actor_rollout_ref.rollout.n=4",
    "actor_rollout_ref.actor.entropy_coeff=0.001",
    # the reward model is compared with what it started from; the policy has no reference
    "actor_rollout_ref.actor.use_kl_loss=false",
    "trainer.project_name=verl-prime",
)


def main(argv: list[str] | None = None) -> int:
    """Command line; the exit status is that of `verl.trainer.main_ppo`."""
    return main_ppo.main([*map(_of_recipe, sys.argv[1:] if argv is None else argv)], PRIME)


def _of_recipe(word: str) -> str:
    if word != "algorithm.adv_estimator=rloo":
        return word
    notice("algorithm.adv_estimator", f"rloo is PRIME's own here, of process rewards, too: {ESTIMATOR}")
    return ESTIMATOR


if __name__ == "__main__":
    sys.exit(main())
