"""``python -m recipe.ladder.main_ladder grpo|token_mean|clip_higher|dr_grpo|gspo key=value ...``.

`verl.trainer.main_ppo` with the settings of one rung as defaults; what the command line says wins over them.
"""

from __future__ import annotations

import sys

from verl.errors import ConfigError
from verl.trainer import main_ppo
from verl.trainer.command import report_error

A = "actor_rollout_ref.actor"
COMMON = (
    "algorithm.adv_estimator=grpo",
    "actor_rollout_ref.rollout.n=8",
    # no reference policy
    f"{A}.use_kl_loss=false",
    "algorithm.use_kl_in_reward=false",
    f"{A}.entropy_coeff=0",
    "trainer.project_name=verl-ladder",
)
OF_TOKENS = f"{A}.loss_agg_mode=token-mean"
RUNGS = {
    # every answer weighs the same
    "grpo": (f"{A}.loss_agg_mode=seq-mean-token-mean",),
    # every token weighs the same
    "token_mean": (OF_TOKENS,),
    # an unlikely token of a good answer may become more likely than before
    "clip_higher": (OF_TOKENS, f"{A}.clip_ratio_low=0.2", f"{A}.clip_ratio_high=0.28"),
    # no weight depends on an answer's length or on how much the scores of its group differ
    "dr_grpo": (f"{A}.loss_agg_mode=seq-mean-token-sum-norm", "algorithm.norm_adv_by_std_in_grpo=false"),
    # the ratio is that of the answer, to the power of 1 / length
    "gspo": (
        f"{A}.policy_loss.loss_mode=gspo",
        f"{A}.loss_agg_mode=seq-mean-token-mean",
        f"{A}.clip_ratio_low=3e-4",
        f"{A}.clip_ratio_high=4e-4",
    ),
}


def defaults_of(words: list[str]) -> tuple[list[str], tuple[str, ...]]:
    """The other words, and the settings of the rung that they name.

    Raises:
        ConfigError: not exactly one rung is named.
    """
    names = [word for word in words if word in RUNGS]
    if len(names) != 1:
        fix = "Write the name of one as a word of the command line, without a key."
        raise ConfigError("a run is on one rung", key="rung", got=names or None, allowed=list(RUNGS), fix=fix)
    return [word for word in words if word not in RUNGS], (*COMMON, *RUNGS[names[0]])


def main(argv: list[str] | None = None) -> int:
    """Command line; the exit status is that of `verl.trainer.main_ppo`."""
    try:
        words, settings = defaults_of(sys.argv[1:] if argv is None else argv)
    except ConfigError as error:
        return report_error(error)
    return main_ppo.main(words, settings)


if __name__ == "__main__":
    sys.exit(main())
