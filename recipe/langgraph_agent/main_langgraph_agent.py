"""``python -m recipe.langgraph_agent.main_langgraph_agent key=value ...``: the model of a LangGraph agent, by GRPO.

What the command line says wins over what stands here.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

from verl.trainer import main_ppo

HERE = Path(__file__).resolve().parent
R = "actor_rollout_ref.rollout"
LANGGRAPH_AGENT = (
    "algorithm.adv_estimator=grpo",
    f"{R}.n=8",
    "data.return_raw_chat=true",
    f"{R}.agent.agent_loop_config_path={HERE / 'loops.yaml'}",
    f"{R}.agent.default_agent_loop=langgraph",
    f"{R}.multi_turn.format=hermes",
    # as upstream's example: no reference policy, clip-higher
    "actor_rollout_ref.actor.use_kl_loss=false",
    "algorithm.use_kl_in_reward=false",
    "actor_rollout_ref.actor.clip_ratio_low=0.2",
    "actor_rollout_ref.actor.clip_ratio_high=0.28",
    "actor_rollout_ref.actor.clip_ratio_c=10.0",
    "trainer.project_name=verl-langgraph-agent",
)

main = partial(main_ppo.main, defaults=LANGGRAPH_AGENT)
"""Command line; the exit status is that of `verl.trainer.main_ppo`."""


if __name__ == "__main__":
    sys.exit(main())
