"""The algorithms under the path and the names that users' estimators, losses and recipes import from upstream."""
# ruff: noqa: F401

from collections.abc import Callable
from enum import Enum

from verl.algorithms.advantages import AdvantageFn, reinforce_plus_plus, reinforce_plus_plus_baseline
from verl.algorithms.advantages.gae import gae as compute_gae_advantage_return
from verl.algorithms.advantages.gpg import gpg as compute_gpg_outcome_advantage
from verl.algorithms.advantages.grpo import grpo as compute_grpo_outcome_advantage
from verl.algorithms.advantages.opo import opo as compute_opo_outcome_advantage
from verl.algorithms.advantages.remax import remax as compute_remax_outcome_advantage
from verl.algorithms.advantages.rloo import rloo as compute_rloo_outcome_advantage
from verl.algorithms.kl import AdaptiveKLController, FixedKLController, get_kl_controller
from verl.algorithms.policy_losses import PolicyLossFn
from verl.algorithms.upstream_forms import (
    agg_loss,
    compute_entropy_loss,
    compute_policy_loss,
    compute_policy_loss_vanilla,
    compute_value_loss,
    kl_penalty,
    kl_penalty_forward,
)
from verl.registry import ADVANTAGE_ESTIMATORS, POLICY_LOSSES

compute_grpo_vectorized_outcome_advantage = compute_grpo_outcome_advantage
compute_rloo_vectorized_outcome_advantage = compute_rloo_outcome_advantage
compute_reinforce_plus_plus_outcome_advantage = reinforce_plus_plus.reinforce_plus_plus
compute_reinforce_plus_plus_baseline_outcome_advantage = reinforce_plus_plus_baseline.reinforce_plus_plus_baseline


class _Name(str, Enum):
    __str__ = str.__str__  # a member stands wherever a configuration value does


_NAMES = {name.upper(): name for name in ADVANTAGE_ESTIMATORS.builtin_targets()}
AdvantageEstimator = _Name("AdvantageEstimator", _NAMES)  # type: ignore[call-overload]


def register_adv_est(name_or_enum: str) -> Callable[[AdvantageFn], AdvantageFn]:
    """Decorator: make an estimator known under a name for ``algorithm.adv_estimator``."""
    return ADVANTAGE_ESTIMATORS.register(name_or_enum)


def get_adv_estimator_fn(name_or_enum: str) -> AdvantageFn:
    """The estimator of that name or dotted path."""
    return ADVANTAGE_ESTIMATORS.get(name_or_enum)


def register_policy_loss(name: str) -> Callable[[PolicyLossFn], PolicyLossFn]:
    """Decorator: make a policy loss known under a name for ``actor.policy_loss.loss_mode``."""
    return POLICY_LOSSES.register(name)


def get_policy_loss_fn(name: str) -> PolicyLossFn:
    """The policy loss of that name or dotted path."""
    return POLICY_LOSSES.get(name)
