"""Corrections of the gap between the sampler's distribution and the trainer's, and their usual forms by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

from verl.config.schema.node import ConfigNode, setting

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
