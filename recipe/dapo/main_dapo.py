"""``python -m recipe.dapo.main_dapo key=value ...``: `verl.trainer.main_ppo` with the settings of DAPO as defaults.

Everything that DAPO adds to GRPO is a setting of the library; what the command line says wins over what stands here.
The penalty for long answers depends on their length, so a command gives it itself (see the scripts in this folder).
"""

from __future__ import annotations

import re
import sys

from verl.trainer import main_ppo

DAPO = (
    "algorithm.adv_estimator=grpo",
    # clip-higher, with a loose dual clip
    "actor_rollout_ref.actor.clip_ratio_low=0.2",
    "actor_rollout_ref.actor.clip_ratio_high=0.28",
    "actor_rollout_ref.actor.clip_ratio_c=10.0",
    # the loss of a token does not depend on the length of its answer
    "actor_rollout_ref.actor.loss_agg_mode=token-mean",
    # no reference policy
    "actor_rollout_ref.actor.use_kl_loss=false",
    "algorithm.use_kl_in_reward=false",
    "actor_rollout_ref.actor.entropy_coeff=0",
    # dynamic sampling by the judgement, without the penalty for length
    "algorithm.filter_groups.enable=true",
    "algorithm.filter_groups.metric=acc",
    "algorithm.filter_groups.max_num_gen_batches=10",
    "reward.reward_manager.name=dapo",
    "actor_rollout_ref.rollout.n=16",
    "trainer.project_name=verl-dapo",
)


def main(argv: list[str] | None = None) -> int:
    """Command line; the exit status is that of `verl.trainer.main_ppo`."""
    return main_ppo.main([*map(_of_recipe, sys.argv[1:] if argv is None else argv)], DAPO)


def _of_recipe(word: str) -> str:
    """``dapo_trainer`` and ``dapo_megatron_trainer`` name upstream's configurations, which differ by the engine."""
    return re.sub(r"^(--config-name=|-cn=)?dapo_((megatron_)?trainer(\.yaml)?)$", r"\1ppo_\2", word)


if __name__ == "__main__":
    sys.exit(main())
