"""Settings of the algorithm, and corrections of the gap between sampler and trainer, with their usual forms by name."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from verl.config.schema.node import ABSENT, ConfigNode, section, setting
from verl.config.schema.tree import AMOUNT, COUNT, KL_KIND, KL_KINDS, POSITIVE, SHARE, NameBound, ValueBound
from verl.errors import ConfigError, suggest

LEVELS = ("token", "sequence", "geometric")
MODES = ("truncate", "mask")
REJECTIONS = (
    "token_k1", "token_k2", "token_k3", "seq_sum_k1", "seq_sum_k2", "seq_sum_k3", "seq_mean_k1", "seq_mean_k2",
    "seq_mean_k3", "seq_max_k2", "seq_max_k3",
)  # fmt: skip
_IS, _CORRECTION = "algorithm.rollout_is", "algorithm.rollout_correction"


@dataclass(frozen=True)
class Bounds:
    """A closed interval of ratios; a lower bound of 0 stands for none."""

    lower: float
    upper: float


@dataclass(frozen=True)
class ImportanceSampling:
    """How importance weights are made and bounded (``algorithm.rollout_is_*``).

    Args:
        bounds: the interval that ``mask`` keeps; ``truncate`` caps at its upper end.
        level: one ratio per token, per sequence (product), or per sequence as the geometric mean of its tokens.
        mode: ``truncate`` caps weights, ``mask`` sets those outside the bounds to zero.
        veto_threshold: a sequence with a token whose ratio is below it gets weight 0; None vetoes nothing.
    """

    bounds: Bounds
    level: str = "token"
    mode: str = "truncate"
    veto_threshold: float | None = 1e-4


@dataclass(frozen=True)
class Rejection:
    """One option of ``rollout_rs``: what it measures, and the interval of that statistic which is kept.

    The statistics are k1 = -log r, k2 = (log r)^2 / 2 and k3 = r - 1 - log r of the ratio r (trainer over sampler); a
    person writes the bounds of k1 as ratios.
    """

    option: str
    upper: float
    lower: float | None = None

    @property
    def level(self) -> str:
        """``token`` drops tokens, ``seq_sum``, ``seq_mean`` and ``seq_max`` drop full sequences."""
        return self.option.rpartition("_")[0]

    @property
    def divergence(self) -> str:
        """``k1``, ``k2`` or ``k3``."""
        return self.option.rpartition("_")[2]


def importance_sampling(
    threshold: float,
    lower: float | None = None,
    level: str = "token",
    mode: str = "truncate",
    veto_threshold: float | None = 1e-4,
) -> ImportanceSampling:
    """The seed form, checked. ``lower`` None is ``1 / threshold``.

    Raises:
        ConfigError: an unknown level or mode, or thresholds that make no sense.
    """
    for name, value, allowed in (("level", level, LEVELS), ("mode", mode, MODES)):
        if value not in allowed:
            fix = suggest(str(value), allowed)
            raise ConfigError(f"unknown {name}", key=f"{_IS}_{name}", got=value, allowed=allowed, fix=fix)
    bounds = ratio_bounds(threshold, lower, f"{_IS}_threshold", f"{_IS}_threshold_lower")
    if veto_threshold is not None and not 0 < _number(veto_threshold, f"{_IS}_veto_threshold") < 1:
        raise ConfigError(
            "a veto is for ratios that are far too small",
            key=f"{_IS}_veto_threshold",
            got=veto_threshold,
            allowed="above 0 and below 1, such as 1e-4, or null for no veto",
        )
    return ImportanceSampling(bounds, level, mode, veto_threshold)


def ratio_bounds(upper: object, lower: object, key: str, lower_key: str | None = None) -> Bounds:
    """Bounds of a ratio; ``lower`` None is ``1 / upper``, which takes an upper bound above 1."""
    high = _number(upper, key)
    if high <= 0:
        raise ConfigError("a bound of a ratio must be positive", key=key, got=upper, allowed="above 0, such as 2.0")
    if lower is None:
        if high <= 1:
            message = "without a lower bound it is 1 / upper, which would not lie below the upper one"
            raise ConfigError(message, key=key, got=upper, allowed="above 1, such as 2.0")
        return Bounds(1 / high, high)
    low = _number(lower, lower_key or key)
    if not 0 < low < high:
        raise ConfigError(
            f"the lower bound must be positive and below the upper one, {high:g}",
            key=lower_key or key,
            got=lower,
            allowed=f"above 0 and below {high:g}, or null for 1 / upper" if lower_key else "'low_high' with low < high",
        )
    return Bounds(low, high)


def weight_bounds(threshold: float | str) -> tuple[Bounds, bool]:
    """``rollout_correction.rollout_is_threshold``: a number caps (TIS), a text ``low_high`` zeroes outside (IcePop).

    With a cap, 1 / cap is the lower bound of the metrics; a cap of 1 or less has none.

    Returns:
        The bounds, and whether weights outside them are zeroed.
    """
    key = f"{_CORRECTION}.rollout_is_threshold"
    parts = str(threshold).split("_")
    if len(parts) == 2:
        return ratio_bounds(parts[1], parts[0], key), True
    cap = _number(threshold, key)
    if cap <= 0:
        raise ConfigError("a cap of weights must be positive", key=key, got=threshold, allowed="above 0, such as 2.0")
    return Bounds(1 / cap if cap > 1 else 0.0, cap), False


def rejections(options: str | Sequence[str], thresholds: Any) -> tuple[Rejection, ...]:
    """``rollout_rs`` with ``rollout_rs_threshold``: options with commas, one threshold for all or one for each.

    Raises:
        ConfigError: an unknown option, no threshold, too few or too many, or one of the wrong form.
    """
    key, limit = f"{_CORRECTION}.rollout_rs", f"{_CORRECTION}.rollout_rs_threshold"
    names = [name.strip() for name in (options.split(",") if isinstance(options, str) else options)]
    for name in names:
        if name not in REJECTIONS:
            fix = suggest(name, REJECTIONS)
            raise ConfigError("no such way of rejecting", key=key, got=name, allowed=REJECTIONS, fix=fix)
    if thresholds is None:
        raise ConfigError("rejection needs a threshold", key=limit, fix="Set e.g. '0.5_2.0' for a k1 option.")
    if isinstance(thresholds, str):
        thresholds = [part.strip() for part in thresholds.split(",")]
    elif isinstance(thresholds, int | float):
        thresholds = [thresholds]
    values = list(thresholds)
    values = values * len(names) if len(values) == 1 else values
    if len(values) != len(names):
        message = f"{len(names)} options of rollout_rs need one threshold for all, or one for each"
        raise ConfigError(message, key=limit, got=thresholds)
    made: dict[str, Rejection] = {}
    for name, value in zip(names, values):
        rejection = _rejection(name, value, limit)
        if made.setdefault(name, rejection) != rejection:
            raise ConfigError(f"two thresholds for {name}", key=limit, got=thresholds, fix="Keep the narrower one.")
    return tuple(made.values())


def _rejection(option: str, threshold: Any, key: str) -> Rejection:
    parts = str(threshold).split("_")
    if option.endswith("k1"):
        low, high = parts if len(parts) == 2 else (None, threshold)
        bounds = ratio_bounds(high, low, key)
        return Rejection(option, upper=-math.log(bounds.lower), lower=-math.log(bounds.upper))
    if len(parts) != 1 or _number(threshold, key) <= 0:
        message = f"{option} is a divergence, which has an upper bound only"
        raise ConfigError(message, key=key, got=threshold, allowed="one number above 0, such as 0.01")
    return Rejection(option, upper=_number(threshold, key))


def _number(value: Any, key: str) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise ConfigError("not a number", key=key, got=value, allowed="a number, or a text 'low_high'") from None
    if not math.isfinite(number):
        raise ConfigError("not a finite number", key=key, got=value)
    return number


C = TypeVar("C", bound="RolloutCorrectionConfig")
GEO, K3, SEQ = "0.999_1.001", 0.01, "0.5_2.0"


@dataclass(frozen=True)
class RolloutCorrectionConfig(ConfigNode):
    """Importance weights and rejection where the sampler's log-probs differ from the trainer's (newer form).

    The class methods are the usual forms. ``decoupled`` keeps three policies (sampler, proximal, current), ``bypass``
    two: the sampler's log-probs are the old ones, and the pass that recomputes them is left out.

    Example:
        >>> RolloutCorrectionConfig.decoupled_token_is(threshold=3.0).rollout_is
        'token'
    """

    rollout_is: str | None = setting(
        None, "importance weights: null for none, token or sequence", choices=("token", "sequence")
    )
    rollout_is_threshold: float | str | None = setting(
        2.0,
        "a number caps the weights (TIS); a text 'low_high' sets weights outside to zero (IcePop); null: no weights are made",
    )
    rollout_rs: str | list | None = setting(
        None,
        "rejection criteria: token_k1..k3, seq_sum_k1..k3, seq_mean_k1..k3, seq_max_k2..k3; a list, or a text with commas",
    )
    rollout_rs_threshold: float | str | list | None = setting(
        None,
        "one threshold, or one per option of rollout_rs; a k1 option takes a text 'low_high'",
        needs=".rollout_rs",
    )
    bypass_mode: bool = setting(False, "use the sampler's log-probs as old log-probs")
    loss_type: str = setting(
        "ppo_clip",
        "loss of the bypass mode: ppo_clip or reinforce",
        choices=("ppo_clip", "reinforce"),
        needs=".bypass_mode=true",
    )
    rollout_is_batch_normalize: bool = setting(
        False,
        "scale importance weights to mean 1 in a batch; in the bypass mode in a mini-batch, by one more forward pass",
        needs=".rollout_is",
    )

    @classmethod
    def disabled(cls: type[C]) -> C:
        """No correction; the metrics of the mismatch remain."""
        return cls()

    @classmethod
    def decoupled_token_is(cls: type[C], threshold: float = 2.0) -> C:
        """Truncated importance weights per token."""
        return cls(rollout_is="token", rollout_is_threshold=threshold)

    @classmethod
    def decoupled_seq_is(cls: type[C], threshold: float = 2.0) -> C:
        """Truncated importance weights per sequence."""
        return cls(rollout_is="sequence", rollout_is_threshold=threshold)

    @classmethod
    def decoupled_token_icepop(cls: type[C], threshold: float = 5.0, threshold_lower: float = 0.5) -> C:
        """Tokens whose weight is outside the two thresholds do not count."""
        return cls(rollout_is="token", rollout_is_threshold=f"{threshold_lower}_{threshold}")

    @classmethod
    def decoupled_seq_is_rs(cls: type[C], is_threshold: float = 2.0, rs_threshold: str = SEQ) -> C:
        """Sequence weights, and rejection of sequences whose ratio is outside 'low_high'."""
        return _rejecting(cls, "seq_sum_k1", rs_threshold, "sequence", is_threshold)

    @classmethod
    def decoupled_geo_rs(cls: type[C], rs_threshold: str = GEO) -> C:
        """Rejection by the geometric mean of a sequence's ratios; it does not depend on the length."""
        return _rejecting(cls, "seq_mean_k1", rs_threshold)

    @classmethod
    def decoupled_geo_rs_seq_tis(cls: type[C], is_threshold: float = 2.0, rs_threshold: str = GEO) -> C:
        """Rejection by the geometric mean, and truncated weights per sequence."""
        return _rejecting(cls, "seq_mean_k1", rs_threshold, "sequence", is_threshold)

    @classmethod
    def decoupled_geo_rs_token_tis(cls: type[C], is_threshold: float = 2.0, rs_threshold: str = GEO) -> C:
        """Rejection by the geometric mean, and truncated weights per token."""
        return _rejecting(cls, "seq_mean_k1", rs_threshold, "token", is_threshold)

    @classmethod
    def decoupled_k3_rs(cls: type[C], rs_threshold: float = K3) -> C:
        """Rejection by a sequence's mean k3 divergence."""
        return _rejecting(cls, "seq_mean_k3", rs_threshold)

    @classmethod
    def decoupled_k3_rs_seq_tis(cls: type[C], is_threshold: float = 2.0, rs_threshold: float = K3) -> C:
        """Rejection by the mean k3 divergence, and truncated weights per sequence."""
        return _rejecting(cls, "seq_mean_k3", rs_threshold, "sequence", is_threshold)

    @classmethod
    def decoupled_k3_rs_token_tis(cls: type[C], is_threshold: float = 2.0, rs_threshold: float = K3) -> C:
        """Rejection by the mean k3 divergence, and truncated weights per token."""
        return _rejecting(cls, "seq_mean_k3", rs_threshold, "token", is_threshold)

    @classmethod
    def bypass_ppo_clip(cls: type[C]) -> C:
        """PPO's own clipping against the sampler's policy is the correction; no further weights."""
        return cls(bypass_mode=True)

    @classmethod
    def bypass_ppo_clip_geo_rs(cls: type[C], rs_threshold: str = GEO) -> C:
        """`bypass_ppo_clip` with rejection by the geometric mean."""
        return _rejecting(cls, "seq_mean_k1", rs_threshold, bypass_mode=True)

    @classmethod
    def bypass_ppo_clip_k3_rs(cls: type[C], rs_threshold: float = K3) -> C:
        """`bypass_ppo_clip` with rejection by the mean k3 divergence."""
        return _rejecting(cls, "seq_mean_k3", rs_threshold, bypass_mode=True)

    @classmethod
    def bypass_pg_is(cls: type[C], threshold: float = 2.0) -> C:
        """REINFORCE with truncated weights per sequence."""
        return cls(**_REINFORCE, rollout_is="sequence", rollout_is_threshold=threshold)

    @classmethod
    def bypass_pg_token_icepop(cls: type[C], threshold: float = 5.0, threshold_lower: float = 0.5) -> C:
        """REINFORCE in which tokens whose weight is outside the two thresholds do not count."""
        return cls(**_REINFORCE, rollout_is="token", rollout_is_threshold=f"{threshold_lower}_{threshold}")

    @classmethod
    def bypass_pg_geo_rs(cls: type[C], rs_threshold: str = GEO) -> C:
        """REINFORCE with rejection by the geometric mean."""
        return _rejecting(cls, "seq_mean_k1", rs_threshold, **_REINFORCE)

    @classmethod
    def bypass_pg_geo_rs_seq_tis(cls: type[C], is_threshold: float = 2.0, rs_threshold: str = GEO) -> C:
        """REINFORCE with rejection by the geometric mean and truncated weights per sequence."""
        return _rejecting(cls, "seq_mean_k1", rs_threshold, "sequence", is_threshold, **_REINFORCE)

    @classmethod
    def bypass_pg_geo_rs_token_tis(cls: type[C], is_threshold: float = 2.0, rs_threshold: str = GEO) -> C:
        """REINFORCE with rejection by the geometric mean and truncated weights per token."""
        return _rejecting(cls, "seq_mean_k1", rs_threshold, "token", is_threshold, **_REINFORCE)


_REINFORCE: dict[str, Any] = {"bypass_mode": True, "loss_type": "reinforce"}


def _rejecting(
    cls: type[C],
    option: str,
    threshold: float | str,
    weights: str | None = None,
    weights_threshold: float | str = 2.0,
    **more: Any,
) -> C:
    return cls(
        rollout_rs=option,
        rollout_rs_threshold=threshold,
        rollout_is=weights,
        rollout_is_threshold=weights_threshold,
        **more,
    )


@dataclass(frozen=True)
class FilterGroupsConfig(ConfigNode):
    """Dynamic sampling (DAPO): prompts whose samples all score the same are dropped, and more are sampled."""

    enable: bool = setting(
        False,
        "dynamic sampling (DAPO): drop prompts whose samples all score the same, and sample on until the batch is full",
    )
    metric: str | None = setting(
        None,
        "metric that must vary within a group: null (the reward), or a key that the scorer returns (acc, ...)",
        upstream="reward",
    )
    max_num_gen_batches: int = setting(0, "stop the run if one step needs more sampled batches than this; 0: never")
    max_inflight_gen_batches: int = setting(
        1, "dynamic sampling: prompt batches in flight at once; more keep a fast sampler busy but add waiting"
    )


@dataclass(frozen=True)
class KLControlConfig(ConfigNode):
    """The KL coefficient; used with algorithm.use_kl_in_reward=true."""

    type: str = setting(
        "fixed",
        "KL coefficient: fixed, or adaptive (steered towards target_kl)",
        choices=("fixed", "adaptive"),
    )
    kl_coef: float = setting(0.001, "initial KL coefficient", within=AMOUNT)
    horizon: int = setting(10000, "adaptive: horizon in samples; larger adapts more slowly", within=POSITIVE)
    target_kl: float = setting(0.1, "adaptive: target KL per sequence", within=POSITIVE)


@dataclass(frozen=True)
class PFPPOConfig(ConfigNode):
    """Resampling of a batch by its rewards (PF-PPO)."""

    reweight_method: str = setting(
        "pow",
        "how resampling weights rewards: pow, max_min or max_random",
        choices=("pow", "max_min", "max_random"),
    )
    weight_pow: float = setting(2.0, "exponent of pow")


@dataclass(frozen=True)
class GiGPOConfig(ConfigNode):
    """Comparison of the actions that episodes took in the same state (GiGPO)."""

    step_advantage_w: float = setting(
        1.0, "gigpo: weight of a turn's advantage next to its episode's", upstream=ABSENT, within=AMOUNT
    )


@dataclass(frozen=True)
class AlgoConfig(ConfigNode):
    """Advantages, KL in the reward, and correction of the sampler's mismatch."""

    rollout_correction: RolloutCorrectionConfig = section(RolloutCorrectionConfig)
    gamma: float = setting(1.0, "discount factor", within=SHARE)
    lam: float = setting(1.0, "GAE lambda", within=SHARE)
    adv_estimator: str = setting(
        "gae", "advantage estimator: a registered name, or a dotted path my_pkg.my_mod:my_estimator"
    )
    norm_adv_by_std_in_grpo: bool = setting(
        True, "GRPO: divide by the group's standard deviation; false: subtract the mean only (Dr. GRPO)"
    )
    filter_groups: FilterGroupsConfig = section(FilterGroupsConfig, needs=".enable=true")
    use_kl_in_reward: bool = setting(
        False, "subtract a KL term from the reward of every token; loads the reference policy"
    )
    kl_penalty: str = setting(
        "kl",
        "KL estimator: kl (k1), abs, mse (k2), low_var_kl (k3), full",
        needs=".use_kl_in_reward=true",
        within=KL_KIND,
    )
    kl_ctrl: KLControlConfig = section(KLControlConfig)
    use_pf_ppo: bool = setting(False, "resample the batch by reward before the update (PF-PPO)")
    pf_ppo: PFPPOConfig = section(PFPPOConfig)
    gdpo_reward_keys: list | None = setting(
        None, "gdpo: rewards to normalise separately, named by the keys that the scorer returns"
    )
    gdpo_reward_weights: list | None = setting(None, "gdpo: weights of these rewards; null: 1 each")
    vapo_length_alpha: float | None = setting(
        0.05,
        "vapo: alpha of the policy's lambda, max(0, 1 - 1 / (alpha * response length)); null: algorithm.lam",
        upstream=ABSENT,
        within=ValueBound("above 0, or null", lambda value: value > 0),
    )
    vapo_lam_critic: float = setting(1.0, "vapo: GAE lambda of the critic's targets", upstream=ABSENT, within=SHARE)
    gigpo: GiGPOConfig = section(GiGPOConfig)
    singleton: str = setting(
        "zero",
        "group estimators: advantage of a group of one: zero, or raw (its reward)",
        upstream="raw",
        choices=("zero", "raw"),
    )
    rollout_is_threshold: float | None = setting(
        None,
        "upper bound of the importance weights between sampler and trainer; null: compute none",
    )
    rollout_is: bool = setting(False, "apply the weights to the loss; false: metrics only")
    rollout_is_threshold_lower: float | None = setting(None, "lower bound; null: 1 / rollout_is_threshold")
    rollout_is_level: str = setting(
        "token",
        "level of the ratio: token, sequence (product), or geometric (mean over a sequence)",
        choices=LEVELS,
    )
    rollout_is_mode: str = setting(
        "truncate",
        "truncate: cap weights; mask: set weights outside the bounds to zero",
        choices=MODES,
    )
    rollout_is_veto_threshold: float | None = setting(
        0.0001,
        "give weight 0 to a sequence with any token ratio below this; null: off",
    )


TOP_K_KINDS = ("forward_kl_topk", "reverse_kl_topk", "jsd_topk")
"""Divergences of several tokens per position."""
_ESTIMATORS = tuple(kind for kind in KL_KINDS if kind != "full")
LOSS_MODES = (*_ESTIMATORS, *(f"{name}+" for name in _ESTIMATORS), *TOP_K_KINDS)
_TOP_K, _GRADIENT = f".loss_mode={', '.join(TOP_K_KINDS[:-1])} or {TOP_K_KINDS[-1]}", ".use_policy_gradient=true"


@dataclass(frozen=True)
class DivergenceConfig(ConfigNode):
    """How far a teacher's distribution is from the student's."""

    topk: int = setting(
        32, "tokens per position; the size of the vocabulary makes the divergence exact", within=COUNT, needs=_TOP_K
    )
    beta: float = setting(
        0.5,
        "weight of the teacher in the mixture that jsd compares both with",
        upstream=ABSENT,
        within=ValueBound("above 0, below 1 (forward_kl and reverse_kl are the limits)", lambda beta: 0 < beta < 1),
        needs=".loss_mode=jsd_topk",
    )


@dataclass(frozen=True)
class DistillationLossConfig(DivergenceConfig):
    """What the student learns of its teachers."""

    loss_mode: str = setting(
        "k3",
        "divergence of each token: an estimator of kl_loss_type; forward_kl_topk, reverse_kl_topk, jsd_topk: over the "
        "teacher's topk most likely tokens",
        within=NameBound(LOSS_MODES),
    )
    use_task_rewards: bool = setting(True, "add the policy loss on rewards; false: learn from the teacher alone")
    distillation_loss_coef: float = setting(1.0, "weight of the distillation loss", within=POSITIVE)
    loss_max_clamp: float | None = setting(
        None, "bound of each token's absolute divergence; null: none", within=POSITIVE
    )
    log_prob_min_clamp: float | None = setting(
        None, "lower bound of both log-probs; null: none", within=ValueBound("below 0", lambda value: value < 0)
    )
    use_policy_gradient: bool = setting(False, "take the negative divergence of each token as its advantage")
    policy_loss_mode: str = setting("vanilla", "policy loss with use_policy_gradient", needs=_GRADIENT)
    clip_ratio: float = setting(0.2, "clip range of that policy loss", within=AMOUNT, needs=_GRADIENT)
    clip_ratio_low: float | None = setting(0.2, "its lower clip range", within=AMOUNT, needs=_GRADIENT)
    clip_ratio_high: float | None = setting(0.2, "its upper clip range", within=AMOUNT, needs=_GRADIENT)


@dataclass(frozen=True)
class DistillationConfig(ConfigNode):
    """Frozen teachers that score the policy's samples; they run as actor_rollout_ref.ref says, or behind servers."""

    enabled: bool = setting(False, "learn from teachers on the samples of the policy")
    distillation_loss: DistillationLossConfig = section(DistillationLossConfig, needs="..enabled=true")
    n_gpus_per_node: int = setting(8, "processes per node of a pool for the teachers", within=COUNT, needs=".nnodes")
    nnodes: int = setting(0, "nodes of that pool; 0: teachers share the trainers' processes", within=AMOUNT)
    teacher_models: dict = setting(
        {},
        "by name: {math: {model_path: FOLDER, key: gsm8k}}; without a key: all rows that no other serves; behind servers "
        "with inference (as actor_rollout_ref.rollout) and num_replicas",
    )
    teacher_key: str = setting("data_source", "column of the data that picks a row's teacher by its key")
