"""``python -m recipe.spo.main_spo key=value ...``: `verl.trainer.main_ppo` with the settings of SPO as defaults.

What the command line says wins over what stands here. An epoch is one draw of prompts, so a run is as long as
``trainer.total_training_steps`` says.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

from verl.trainer import main_ppo

CORE = Path(__file__).resolve().with_name("core.py")
SPO = (
    "algorithm.adv_estimator=recipe.spo.core:single_stream",
    # one answer per prompt: its baseline is the prompt's value
    "actor_rollout_ref.rollout.n=1",
    f"data.custom_cls.path={CORE}",
    "data.custom_cls.name=ValuedPrompts",
    f"data.sampler.class_path={CORE}",
    "data.sampler.class_name=ByUncertainty",
    # values are read when a prompt is taken, not ahead
    "data.dataloader_num_workers=0",
    # clip-higher, over tokens
    "actor_rollout_ref.actor.clip_ratio_low=0.2",
    "actor_rollout_ref.actor.clip_ratio_high=0.28",
    "actor_rollout_ref.actor.loss_agg_mode=token-mean",
    # no reference policy
    "actor_rollout_ref.actor.use_kl_loss=false",
    "algorithm.use_kl_in_reward=false",
    "actor_rollout_ref.actor.entropy_coeff=0",
    "trainer.project_name=verl-spo",
)

main = partial(main_ppo.main, defaults=SPO)
"""Command line; the exit status is that of `verl.trainer.main_ppo`."""


if __name__ == "__main__":
    sys.exit(main())
