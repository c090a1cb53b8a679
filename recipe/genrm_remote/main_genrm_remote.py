"""``python -m recipe.genrm_remote.main_genrm_remote key=value ...``: GRPO by the grades of a judge on a server.

What the command line says wins over what stands here; the judge's address has to be on the command line.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

from verl.trainer import main_ppo

GENRM = (
    "algorithm.adv_estimator=grpo",
    "actor_rollout_ref.rollout.n=8",
    f"reward.custom_reward_function.path={Path(__file__).resolve().with_name('reward_function.py')}",
    "reward.custom_reward_function.name=compute_score",
    # a KL to the initial model, against answers that please the judge alone
    "actor_rollout_ref.actor.use_kl_loss=true",
    "actor_rollout_ref.actor.kl_loss_coef=0.001",
    "actor_rollout_ref.actor.kl_loss_type=low_var_kl",
    "algorithm.use_kl_in_reward=false",
    # answers are judged while others are being sampled
    "reward.while_sampling=true",
    "trainer.project_name=verl-genrm-remote",
)

main = partial(main_ppo.main, defaults=GENRM)
"""Command line; the exit status is that of `verl.trainer.main_ppo`."""


if __name__ == "__main__":
    sys.exit(main())
