"""``python -m recipe.gkd.main_gkd key=value ...``: `verl.trainer.main_ppo` that learns from a teacher alone.

What the command line says wins over what stands here; the teacher's model has to be on the command line.
"""

from __future__ import annotations

import sys
from functools import partial

from verl.trainer import main_ppo

GKD = (
    # the student samples, the teacher says how likely it finds the tokens, and no reward enters the loss
    "distillation.enabled=true",
    "distillation.distillation_loss.use_task_rewards=false",
    "distillation.distillation_loss.loss_mode=jsd_topk",
    "distillation.distillation_loss.beta=0.5",
    "distillation.distillation_loss.topk=32",
    "actor_rollout_ref.actor.loss_agg_mode=token-mean",
    # advantages are reported, and not learned from
    "algorithm.adv_estimator=reinforce_plus_plus",
    "actor_rollout_ref.rollout.n=1",
    "actor_rollout_ref.actor.use_kl_loss=false",
    "algorithm.use_kl_in_reward=false",
    "trainer.project_name=verl-gkd",
)

main = partial(main_ppo.main, defaults=GKD)
"""Command line; the exit status is that of `verl.trainer.main_ppo`."""


if __name__ == "__main__":
    sys.exit(main())
