"""``python -m recipe.retool.main_retool key=value ...``: `verl.trainer.main_ppo` with ReTool's settings as defaults.

Everything that ReTool needs is a setting of the library: the loop with tools, the Python interpreter in the sandbox, a
reward from a file. What the command line says wins over what stands here.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

from verl.trainer import main_ppo

HERE = Path(__file__).resolve().parent

RETOOL = (
    "algorithm.adv_estimator=grpo",
    "actor_rollout_ref.rollout.n=16",
    # conversations with the interpreter; what it answers is not trained on
    "data.return_raw_chat=true",
    "actor_rollout_ref.rollout.multi_turn.enable=true",
    "actor_rollout_ref.rollout.multi_turn.format=hermes",
    f"actor_rollout_ref.rollout.multi_turn.tool_config_path={HERE / 'tools.yaml'}",
    "actor_rollout_ref.rollout.multi_turn.max_assistant_turns=8",
    "actor_rollout_ref.rollout.multi_turn.max_user_turns=8",
    "actor_rollout_ref.rollout.multi_turn.max_tool_response_length=1024",
    f"reward.custom_reward_function.path={HERE / 'reward.py'}",
    # as DAPO: no reference policy, clip-higher
    "actor_rollout_ref.actor.use_kl_loss=false",
    "algorithm.use_kl_in_reward=false",
    "actor_rollout_ref.actor.clip_ratio_low=0.2",
    "actor_rollout_ref.actor.clip_ratio_high=0.28",
    "actor_rollout_ref.actor.clip_ratio_c=10.0",
    "trainer.project_name=verl-retool",
)

main = partial(main_ppo.main, defaults=RETOOL)
"""Command line; the exit status is that of `verl.trainer.main_ppo`."""


if __name__ == "__main__":
    sys.exit(main())
