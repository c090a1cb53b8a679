"""``python -m recipe.spin.main_spin key=value ...``: `verl.trainer.main_ppo` with the settings of SPIN as defaults.

What the command line says wins over what stands here.
"""

from __future__ import annotations

import sys
from functools import partial

from verl.trainer import main_ppo

SPIN = (
    # of the answers to a prompt the one with the largest advantage wins, the one with the smallest loses
    "algorithm.adv_estimator=grpo",
    "actor_rollout_ref.rollout.n=2",
    "actor_rollout_ref.actor.policy_loss.loss_mode=recipe.spin.core:dpo",
    # the opponent of a step is the policy that sampled in it
    "trainer.ref_update_freq=1",
    # the loss holds the policy near the reference by itself
    "actor_rollout_ref.actor.use_kl_loss=false",
    "algorithm.use_kl_in_reward=false",
    "actor_rollout_ref.actor.entropy_coeff=0",
    "trainer.project_name=verl-spin",
)

main = partial(main_ppo.main, defaults=SPIN)
"""Command line; the exit status is that of `verl.trainer.main_ppo`."""


if __name__ == "__main__":
    sys.exit(main())
