"""``python -m recipe.pf_ppo.main_pf_ppo key=value ...``: `verl.trainer.main_ppo` with the settings of PF-PPO.

What the command line says wins over what stands here.
"""

from __future__ import annotations

import sys
from functools import partial

from verl.trainer import main_ppo

PF_PPO = (
    "algorithm.adv_estimator=gae",
    # rows are drawn again, with replacement, by their rewards
    "algorithm.use_pf_ppo=true",
    "algorithm.pf_ppo.reweight_method=pow",
    "algorithm.pf_ppo.weight_pow=2.0",
    "actor_rollout_ref.rollout.n=5",
    # as PPO with a reward model: the KL to the initial model is charged to the reward
    "algorithm.use_kl_in_reward=true",
    "algorithm.kl_ctrl.kl_coef=0.05",
    "trainer.project_name=verl-pf-ppo",
)

main = partial(main_ppo.main, defaults=PF_PPO)
"""Command line; the exit status is that of `verl.trainer.main_ppo`."""


if __name__ == "__main__":
    sys.exit(main())
