"""``python -m recipe.deepeyes.main_deepeyes key=value ...``: GRPO of a model that sees, with a tool that zooms in.

What the command line says wins over what stands here.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

from verl.trainer import main_ppo

HERE = Path(__file__).resolve().parent
MULTI_TURN = "actor_rollout_ref.rollout.multi_turn"
DEEPEYES = (
    "algorithm.adv_estimator=grpo",
    "actor_rollout_ref.rollout.n=8",
    # up to four looks and an answer; what the tool shows is not trained on
    "data.return_raw_chat=true",
    f"{MULTI_TURN}.enable=true",
    f"{MULTI_TURN}.format=hermes",
    f"{MULTI_TURN}.max_assistant_turns=5",
    f"{MULTI_TURN}.max_user_turns=5",
    f"{MULTI_TURN}.max_parallel_calls=1",
    f"{MULTI_TURN}.tool_config_path={HERE / 'tools.yaml'}",
    f"reward.custom_reward_function.path={HERE / 'reward.py'}",
    # no reference policy
    "actor_rollout_ref.actor.use_kl_loss=false",
    "algorithm.use_kl_in_reward=false",
    "actor_rollout_ref.actor.entropy_coeff=0",
    "trainer.project_name=verl-deepeyes",
)

main = partial(main_ppo.main, defaults=DEEPEYES)
"""Command line; the exit status is that of `verl.trainer.main_ppo`."""


if __name__ == "__main__":
    sys.exit(main())
