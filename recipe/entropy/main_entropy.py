"""``python -m recipe.entropy.main_entropy key=value ...``: `verl.trainer.main_ppo` with the settings of KL-Cov.

What the command line says wins over what stands here; Clip-Cov is ``actor.policy_loss.loss_mode=clip_cov``.
"""

from __future__ import annotations

import sys
from functools import partial

from verl.trainer import main_ppo

KL_COV = (
    "algorithm.adv_estimator=grpo",
    # the tokens of highest covariance are charged with a KL to where they were
    "actor_rollout_ref.actor.policy_loss.loss_mode=kl_cov",
    "actor_rollout_ref.actor.policy_loss.kl_cov_ratio=0.0002",
    "actor_rollout_ref.actor.policy_loss.ppo_kl_coef=1.0",
    "actor_rollout_ref.actor.loss_agg_mode=token-mean",
    # no reference policy and no bonus: the two losses alone hold the entropy
    "actor_rollout_ref.actor.use_kl_loss=false",
    "algorithm.use_kl_in_reward=false",
    "actor_rollout_ref.actor.entropy_coeff=0",
    # dynamic sampling by the judgement
    "algorithm.filter_groups.enable=true",
    "algorithm.filter_groups.metric=acc",
    "algorithm.filter_groups.max_num_gen_batches=10",
    "reward.reward_manager.name=dapo",
    "actor_rollout_ref.rollout.n=8",
    "trainer.project_name=verl-entropy",
)

main = partial(main_ppo.main, defaults=KL_COV)
"""Command line; the exit status is that of `verl.trainer.main_ppo`."""


if __name__ == "__main__":
    sys.exit(main())
