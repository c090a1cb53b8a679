"""Advantage estimators, one file each, and the one place that calls them.

An estimator is any function ``(token_level_rewards, response_mask, ...) -> (advantages, returns)`` that takes what it
needs by keyword: `index` (the prompt id of each row), `values`, `gamma`, `lam`, `config`, or all of it by
``**kwargs``. It is found by name in `verl.registry.ADVANTAGE_ESTIMATORS`, or by a dotted path as
``algorithm.adv_estimator``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor

from verl.algorithms.calls import accepted_inputs, check_shapes, function_place
from verl.algorithms.masked import zero_outside
from verl.errors import ConfigError
from verl.metrics import notice
from verl.registry import ADVANTAGE_ESTIMATORS

AdvantageFn = Callable[..., tuple[Tensor, Tensor]]
_NAMES = {name.upper(): name for name in ADVANTAGE_ESTIMATORS.builtin_targets()}
AdvantageEstimator = StrEnum("AdvantageEstimator", _NAMES)  # type: ignore[misc]
"""The built-in estimators by name."""

PER_TOKEN = (
    "response_mask", "token_level_rewards", "values", "old_log_probs", "ref_log_prob", "sum_pi_squared",
    "rollout_is_weights",
)  # fmt: skip
WHERE_FROM = {
    "values": "A critic computes them: set critic.enable=true.",
    "index": "It is the uid of each row; the batch has none.",
    "reward_baselines": "They are the rewards of one greedy response per prompt.",
    "old_log_probs": "They need a pass of the actor over the batch.",
    "ref_log_prob": "They need the reference policy: set algorithm.use_kl_in_reward or "
    "actor_rollout_ref.actor.use_kl_loss.",
    "sum_pi_squared": "The actor returns them with actor_rollout_ref.actor.calculate_sum_pi_squared=true.",
}


def call_estimator(
    estimator: AdvantageFn, *, token_level_rewards: Tensor, response_mask: Tensor, **inputs: Any
) -> tuple[Tensor, Tensor]:
    """Call an estimator with what it asks for and check what it returns.

    Args:
        estimator: built in or the user's own.
        token_level_rewards, response_mask: (B, T).
        inputs: whatever else the step has, by name; a value of None counts as absent.

    Returns:
        advantages and returns: (B, T), at least float32, 0 where the mask is 0.

    Raises:
        ConfigError: the estimator requires an input that this run does not have, or returns something else.
    """
    available = {"token_level_rewards": token_level_rewards, "response_mask": response_mask}
    available.update({name: value for name, value in inputs.items() if value is not None})
    _check_required(estimator, available)
    arguments = accepted_inputs(estimator, available)
    check_shapes({name: x for name, x in arguments.items() if name in PER_TOKEN})
    result = estimator(**arguments)
    return _checked(estimator, result, response_mask)


def _check_required(estimator: AdvantageFn, available: Mapping[str, Any]) -> None:
    for parameter in inspect.signature(estimator).parameters.values():
        optional = parameter.default is not parameter.empty or parameter.name in available or parameter.name == "config"
        if optional or parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            continue
        raise ConfigError(
            f"the advantage estimator {function_place(estimator)} requires {parameter.name!r}, "
            "which this run does not have",
            key="algorithm.adv_estimator",
            allowed=sorted(available),
            fix=WHERE_FROM.get(parameter.name, "Give the parameter a default, or take another estimator."),
        )


def _checked(estimator: AdvantageFn, result: Any, response_mask: Tensor) -> tuple[Tensor, Tensor]:
    is_pair = isinstance(result, (tuple, list)) and len(result) == 2 and all(isinstance(x, Tensor) for x in result)
    if not is_pair or any(x.shape != response_mask.shape for x in result):
        shapes = [tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__ for x in result] if is_pair else result
        raise ConfigError(
            f"the advantage estimator {function_place(estimator)} returned something else than two tensors",
            key="algorithm.adv_estimator",
            got=shapes,
            allowed=f"(advantages, returns), both of shape {tuple(response_mask.shape)}",
        )
    advantages, returns = (zero_outside(x.detach(), response_mask) for x in result)
    if not torch.isfinite(advantages).all():
        notice("algorithm.adv_estimator", f"{function_place(estimator)} returned NaN or infinity for a valid token")
    return advantages, returns
