"""Settings of the algorithm, and corrections of the gap between sampler and trainer, with their usual forms by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

from verl.config.schema.bounds import AMOUNT, KL_KIND, POSITIVE, SHARE, ValueBound
from verl.config.schema.node import ABSENT, ConfigNode, section, setting
from verl.config.schema.thresholds import LEVELS, MODES

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
        """PPO's own clipping against the sampler's policy is the correction; no weights beside it."""
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
