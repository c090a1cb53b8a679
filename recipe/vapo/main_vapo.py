"""``python -m recipe.vapo.main_vapo key=value ...``: `verl.trainer.main_ppo` with the settings of VAPO as defaults.

What the command line says wins over what stands here. Batch sizes and the critic's model have to be on the
command line: see the README in this folder.
"""

from __future__ import annotations

import sys
from functools import partial

from verl.trainer import main_ppo

PRETRAINING = 50
"""Steps in which the critic alone learns."""
VAPO = (
    # the critic's targets are rewards to go; the policy's lambda grows with the length of a response
    "algorithm.adv_estimator=vapo",
    "algorithm.gamma=1.0",
    "algorithm.vapo_lam_critic=1.0",
    "algorithm.vapo_length_alpha=0.05",
    # value pretraining: the samples of these steps come from the fixed initial policy
    f"trainer.critic_warmup={PRETRAINING + 1}",
    # clip-higher
    "actor_rollout_ref.actor.clip_ratio_low=0.2",
    "actor_rollout_ref.actor.clip_ratio_high=0.28",
    # the loss of a token does not depend on the length of its response
    "actor_rollout_ref.actor.loss_agg_mode=token-mean",
    # imitation of right answers
    "actor_rollout_ref.actor.positive_lm_coef=0.1",
    # few prompts, many answers to each
    "actor_rollout_ref.rollout.n=16",
    "actor_rollout_ref.actor.optim.lr=1e-6",
    "critic.optim.lr=2e-6",
    # no reference policy
    "actor_rollout_ref.actor.use_kl_loss=false",
    "algorithm.use_kl_in_reward=false",
    "actor_rollout_ref.actor.entropy_coeff=0",
    "trainer.project_name=verl-vapo",
)

main = partial(main_ppo.main, defaults=VAPO)
"""Command line; the exit status is that of `verl.trainer.main_ppo`."""


if __name__ == "__main__":
    sys.exit(main())
