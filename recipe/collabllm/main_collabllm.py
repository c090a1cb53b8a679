"""``python -m recipe.collabllm.main_collabllm key=value ...``: GRPO of answers by the conversations that follow them.

What the command line says wins over what stands here. The user and the judge are the model of a server on this machine;
another address stands in copies of ``loops.yaml`` and ``users.yaml``.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

from verl.trainer import main_ppo

HERE = Path(__file__).resolve().parent
R = "actor_rollout_ref.rollout"
COLLABLLM = (
    "algorithm.adv_estimator=grpo",
    f"{R}.n=8",
    "data.return_raw_chat=true",
    f"{R}.agent.agent_loop_config_path={HERE / 'loops.yaml'}",
    f"{R}.agent.default_agent_loop=collabllm",
    f"{R}.multi_turn.interaction_config_path={HERE / 'users.yaml'}",
    f"{R}.multi_turn.max_user_turns=2",
    f"{R}.multi_turn.max_assistant_turns=3",
    # a KL to the initial model, against answers that please the simulated user alone
    "actor_rollout_ref.actor.use_kl_loss=true",
    "actor_rollout_ref.actor.kl_loss_coef=0.001",
    "actor_rollout_ref.actor.kl_loss_type=low_var_kl",
    "algorithm.use_kl_in_reward=false",
    "actor_rollout_ref.actor.entropy_coeff=0",
    "trainer.project_name=verl-collabllm",
)

main = partial(main_ppo.main, defaults=COLLABLLM)
"""Command line; the exit status is that of `verl.trainer.main_ppo`."""


if __name__ == "__main__":
    sys.exit(main())
