"""``python -m recipe.rep_exp.main_rep_exp key=value ...``: `verl.trainer.main_ppo` with the exploration bonus.

What the command line says wins over what stands here.
"""

from __future__ import annotations

import sys
from functools import partial

from verl.trainer import main_ppo

REP_EXP = (
    "algorithm.adv_estimator=recipe.rep_exp.core:explored",
    "trainer.v1.trainer_mode=recipe.rep_exp.schedule:RepExpSchedule",
    "actor_rollout_ref.rollout.n=8",
    "actor_rollout_ref.actor.loss_agg_mode=token-mean",
    # nothing holds the policy near the initial model
    "actor_rollout_ref.actor.use_kl_loss=false",
    "algorithm.use_kl_in_reward=false",
    "actor_rollout_ref.actor.entropy_coeff=0",
    "trainer.project_name=verl-rep-exp",
)

main = partial(main_ppo.main, defaults=REP_EXP)
"""Command line; the exit status is that of `verl.trainer.main_ppo`."""


if __name__ == "__main__":
    sys.exit(main())
