"""``python -m recipe.flowrl.main_flowrl key=value ...``: `verl.trainer.main_ppo` with the settings of FlowRL.

What the command line says wins over what stands here.
"""

from __future__ import annotations

import sys
from functools import partial

from verl.trainer import main_ppo

FLOWRL = (
    "algorithm.adv_estimator=recipe.flowrl.core:group_partition",
    "actor_rollout_ref.actor.policy_loss.loss_mode=recipe.flowrl.core:flow_balance",
    # the reference is loaded for its log-probs; the balance holds the policy near it, and no further term does
    "actor_rollout_ref.actor.use_kl_loss=true",
    "actor_rollout_ref.actor.kl_loss_coef=0",
    "algorithm.use_kl_in_reward=false",
    "actor_rollout_ref.actor.entropy_coeff=0",
    "actor_rollout_ref.rollout.n=8",
    "trainer.project_name=verl-flowrl",
)

main = partial(main_ppo.main, defaults=FLOWRL)
"""Command line; the exit status is that of `verl.trainer.main_ppo`."""


if __name__ == "__main__":
    sys.exit(main())
