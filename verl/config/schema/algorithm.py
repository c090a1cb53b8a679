"""Settings of the algorithm."""

from __future__ import annotations

from dataclasses import dataclass

from verl.config.schema.bounds import AMOUNT, KL_KIND, POSITIVE, SHARE, ValueBound
from verl.config.schema.correction import RolloutCorrectionConfig
from verl.config.schema.node import ABSENT, ConfigNode, section, setting
from verl.config.schema.thresholds import LEVELS, MODES


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
