"""``python -m recipe.online_dpo.main_online_dpo algorithm=online_dpo|xpo|nash_md key=value ...``.

`verl.trainer.main_ppo` with the settings of one of the three as defaults; what the command line says wins over them.
"""

from __future__ import annotations

import sys

from verl.errors import ConfigError, suggest
from verl.trainer import main_ppo
from verl.trainer.command import report_error

CORE = "recipe.online_dpo.core"
LOSS = "actor_rollout_ref.actor.policy_loss.loss_mode"
PAIRS = (
    # of the answers to a prompt the one with the largest advantage wins, the one with the smallest loses
    "algorithm.adv_estimator=grpo",
    "actor_rollout_ref.rollout.n=2",
    # the losses hold the policy near the reference, which is the initial model
    "algorithm.use_kl_in_reward=false",
)
ALGORITHMS = {
    "online_dpo": (f"{LOSS}={CORE}:online_dpo", *PAIRS),
    "xpo": (f"{LOSS}={CORE}:xpo", "actor_rollout_ref.actor.use_rollout_log_probs=true", *PAIRS),
    "nash_md": (
        f"algorithm.adv_estimator={CORE}:nash_md",
        "actor_rollout_ref.rollout.n=4",
        # the gradient of the paper: sums over the tokens of an answer, and tau = kl_coef
        "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum",
        "algorithm.use_kl_in_reward=true",
        "algorithm.kl_ctrl.kl_coef=0.05",
    ),
}
COMMON = (
    "actor_rollout_ref.actor.use_kl_loss=false",
    "actor_rollout_ref.actor.entropy_coeff=0",
    "trainer.project_name=verl-online-dpo",
)


def defaults_of(words: list[str]) -> tuple[list[str], tuple[str, ...]]:
    """The other words, and the settings of the algorithm that they name; without one online DPO.

    Raises:
        ConfigError: no such algorithm.
    """
    names = [word.partition("=")[2] for word in words if word.startswith("algorithm=")]
    name = names[-1] if names else "online_dpo"
    if name not in ALGORITHMS:
        fix = suggest(name, list(ALGORITHMS))
        raise ConfigError("no such algorithm", key="algorithm", got=name, allowed=list(ALGORITHMS), fix=fix)
    return [word for word in words if not word.startswith("algorithm=")], (*ALGORITHMS[name], *COMMON)


def main(argv: list[str] | None = None) -> int:
    """Command line; the exit status is that of `verl.trainer.main_ppo`."""
    try:
        words, settings = defaults_of(sys.argv[1:] if argv is None else argv)
    except ConfigError as error:
        return report_error(error)
    return main_ppo.main(words, settings)


if __name__ == "__main__":
    sys.exit(main())
