"""``python -m recipe.fapo.main_fapo [genrm] key=value ...``: `verl.trainer.main_ppo` with the settings of FAPO.

With the word ``genrm`` those of the generative reward model's training. What the command line says wins over them.
"""

from __future__ import annotations

import sys
from pathlib import Path

from verl.trainer import main_ppo

FOLDER = Path(__file__).resolve().parent
FUNCTION = "reward.custom_reward_function"
COMMON = (
    "algorithm.adv_estimator=grpo",
    # clip-higher, with a loose dual clip
    "actor_rollout_ref.actor.clip_ratio_low=0.2",
    "actor_rollout_ref.actor.clip_ratio_high=0.28",
    "actor_rollout_ref.actor.clip_ratio_c=10.0",
    "actor_rollout_ref.actor.loss_agg_mode=token-mean",
    # no reference policy
    "actor_rollout_ref.actor.use_kl_loss=false",
    "algorithm.use_kl_in_reward=false",
    "actor_rollout_ref.actor.entropy_coeff=0",
    "reward.reward_manager.name=dapo",
    "trainer.project_name=verl-fapo",
)
FAPO = (
    *COMMON,
    "actor_rollout_ref.rollout.n=8",
    f"{FUNCTION}.path={FOLDER / 'reward_fn_reasoning.py'}",
    f"{FUNCTION}.name=compute_score_fapo",
    # answers are reviewed while others are being sampled; a review is thousands of tokens long
    "reward.while_sampling=true",
    "reward.timeout=900",
)
GENRM = (
    *COMMON,
    "actor_rollout_ref.rollout.n=16",
    "actor_rollout_ref.rollout.temperature=1.2",
    f"{FUNCTION}.path={FOLDER / 'reward_fn_genrm.py'}",
    f"{FUNCTION}.name=compute_score_fapo_genrm",
)
STAGE = "genrm"


def main(argv: list[str] | None = None) -> int:
    """Command line; the exit status is that of `verl.trainer.main_ppo`."""
    words = sys.argv[1:] if argv is None else argv
    return main_ppo.main([word for word in words if word != STAGE], GENRM if STAGE in words else FAPO)


if __name__ == "__main__":
    sys.exit(main())
