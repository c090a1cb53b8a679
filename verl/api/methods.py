"""Methods by name: the program that runs one, and the settings that it needs beyond the defaults.

A name is a shorthand: the settings are those of a command line, lie below the user's, and are shown with the run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module

from verl.errors import ConfigError, suggest

_ALGORITHM, _ACTOR, _ROLLOUT = "algorithm", "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
_GROUP = f"{_ROLLOUT}.n=8"


@dataclass(frozen=True)
class Method:
    """A way to train.

    Args:
        configuration: name of the settings that its program reads (`verl.config.loading.groups.NAMES`).
        module: that holds the program's ``main``.
        defaults: ``a.b=c``, which the user's settings win over.
        meaning: for the help text.
    """

    configuration: str
    module: str
    defaults: tuple[str, ...]
    meaning: str

    @property
    def main(self) -> Callable[..., int]:
        """The program; loads its module."""
        program: Callable[..., int] = import_module(self.module).main
        return program


def _by_reward(meaning: str, estimator: str, *defaults: str) -> Method:
    settings = (f"{_ALGORITHM}.adv_estimator={estimator}", *defaults)
    return Method("ppo_trainer", "verl.trainer.main_ppo", settings, meaning)


_CLIP_HIGHER = (f"{_ACTOR}.clip_ratio_low=0.2", f"{_ACTOR}.clip_ratio_high=0.28")
BY_REWARD = {
    "grpo": _by_reward("a response against the mean of its group, in standard deviations", "grpo", _GROUP),
    "ppo": _by_reward("a critic's values (GAE)", "gae"),
    "dapo": _by_reward(
        "GRPO with clip-higher, token mean, and only prompts whose answers differ",
        "grpo",
        _GROUP,
        *_CLIP_HIGHER,
        f"{_ACTOR}.loss_agg_mode=token-mean",
        f"{_ALGORITHM}.filter_groups.enable=true",
        f"{_ALGORITHM}.filter_groups.metric=seq_reward",
    ),
    "dr_grpo": _by_reward(
        "GRPO without its two normalisations",
        "grpo",
        _GROUP,
        f"{_ALGORITHM}.norm_adv_by_std_in_grpo=false",
        f"{_ACTOR}.loss_agg_mode=seq-mean-token-sum-norm",
    ),
    "gspo": _by_reward(
        "GRPO with the ratio of whole sequences",
        "grpo",
        _GROUP,
        f"{_ACTOR}.policy_loss.loss_mode=gspo",
        f"{_ACTOR}.clip_ratio_low=0.0003",
        f"{_ACTOR}.clip_ratio_high=0.0004",
    ),
    "rloo": _by_reward("a response against the mean of the others of its group", "rloo", _GROUP),
    "reinforce_plus_plus": _by_reward("returns against those of the batch", "reinforce_plus_plus"),
    "reinforce_plus_plus_baseline": _by_reward(
        "the mean of its group, then of the batch", "reinforce_plus_plus_baseline", _GROUP
    ),
    "remax": _by_reward("a response against the greedy one", "remax"),
    "opo": _by_reward("a response against its group's mean by length", "opo", _GROUP),
}
"""What ``verl train METHOD`` and `verl.train` know."""
SUPERVISED = {
    "sft": Method("sft_trainer", "verl.trainer.sft_trainer", (), "imitate conversations"),
    "dpo": Method("dpo_trainer", "verl.trainer.dpo_trainer", (), "prefer chosen answers to rejected ones"),
    "reward_model": Method("rm_trainer", "verl.trainer.rm_trainer", (), "score chosen answers above rejected ones"),
}
METHODS = {**BY_REWARD, **SUPERVISED}


def method_of(name: str, known: Sequence[str] = tuple(BY_REWARD)) -> Method:
    """The method of a name.

    Raises:
        ConfigError: it is none of ``known``.
    """
    if name not in known:
        raise ConfigError("unknown method", got=name, allowed=list(known), fix=suggest(name, known))
    return METHODS[name]
