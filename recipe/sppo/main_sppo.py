"""``python -m recipe.sppo.main_sppo key=value ...``: `verl.trainer.main_ppo` with SPPO's estimator, loss and settings.

What the command line says wins over what stands here.
"""

from __future__ import annotations

import sys
from functools import partial

from verl.trainer import main_ppo

SPPO = (
    "algorithm.adv_estimator=recipe.sppo.core:centred",
    "actor_rollout_ref.actor.policy_loss.loss_mode=recipe.sppo.core:sppo",
    "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean",
    # the square keeps the policy near the one that sampled; there is no other reference
    "actor_rollout_ref.actor.use_kl_loss=false",
    "algorithm.use_kl_in_reward=false",
    "actor_rollout_ref.actor.entropy_coeff=0",
    "actor_rollout_ref.rollout.n=5",
    "trainer.project_name=verl-sppo",
)

main = partial(main_ppo.main, defaults=SPPO)
"""Command line; the exit status is that of `verl.trainer.main_ppo`."""


if __name__ == "__main__":
    sys.exit(main())
