"""Settings of the algorithm."""

from __future__ import annotations

from dataclasses import dataclass

from verl.config.correction import RolloutCorrectionConfig
from verl.config.node import ConfigNode, section, setting


@dataclass(frozen=True)
class FilterGroupsConfig(ConfigNode):
    """``algorithm.filter_groups``."""

    enable: bool = setting(False, "DAPO dynamic sampling")
    metric: str | None = setting(
        None, "reward or any reward_extra_info key (acc, score, seq_reward...)", upstream="reward"
    )
    max_num_gen_batches: int = setting(0, "regeneration cap (<=0 none)")
    max_inflight_gen_batches: int = setting(1, "prompt batches in flight (v1 sync)", planned="prompt batches in flight")


@dataclass(frozen=True)
class KLControlConfig(ConfigNode):
    """``algorithm.kl_ctrl``."""

    type: str = setting("fixed", "fixed or adaptive", choices=("fixed", "adaptive"))
    kl_coef: float = setting(0.001, "initial coefficient")
    horizon: int = setting(10000, "adaptive horizon")
    target_kl: float = setting(0.1, "adaptive target")


@dataclass(frozen=True)
class PFPPOConfig(ConfigNode):
    """``algorithm.pf_ppo``."""

    reweight_method: str = setting("pow", "pow, max_min, max_random", planned="PF-PPO")
    weight_pow: float = setting(2.0, "exponent", planned="PF-PPO")


@dataclass(frozen=True)
class AlgoConfig(ConfigNode):
    """Advantages, KL and what surrounds them."""

    rollout_correction: RolloutCorrectionConfig = section(RolloutCorrectionConfig)
    gamma: float = setting(1.0, "discount")
    lam: float = setting(1.0, "GAE lambda")
    adv_estimator: str = setting("gae", "name in estimator registry (see 3.6)")
    norm_adv_by_std_in_grpo: bool = setting(True, "false = Dr.GRPO style, mean only")
    filter_groups: FilterGroupsConfig = section(FilterGroupsConfig)
    use_kl_in_reward: bool = setting(False, "subtract KL from token rewards")
    kl_penalty: str = setting("kl", "estimator for the in-reward KL")
    kl_ctrl: KLControlConfig = section(KLControlConfig)
    use_pf_ppo: bool = setting(False, "resample by reward (only with gae)", planned="PF-PPO")
    pf_ppo: PFPPOConfig = section(PFPPOConfig)
    gdpo_reward_keys: list | None = setting(
        None, "reward components of the estimator gdpo", planned="the estimator gdpo"
    )
    gdpo_reward_weights: list | None = setting(None, "their weights", planned="the estimator gdpo")
    singleton: str = setting(
        "zero",
        "advantage of a group of one: 0, or the raw reward as upstream has it",
        upstream="raw",
        choices=("zero", "raw"),
    )
    rollout_is_threshold: float | None = setting(
        None,
        "upper bound of rollout importance weights; null switches the system off",
        planned="rollout importance sampling",
    )
    rollout_is: bool = setting(False, "apply the weights (else metrics only)", planned="rollout importance sampling")
    rollout_is_threshold_lower: float | None = setting(
        None, "lower bound; null is 1/upper", planned="rollout importance sampling"
    )
    rollout_is_level: str = setting("token", "token, sequence or geometric", planned="rollout importance sampling")
    rollout_is_mode: str = setting("truncate", "truncate or mask", planned="rollout importance sampling")
    rollout_is_veto_threshold: float | None = setting(
        0.0001, "a token ratio below it discards the sequence; null is off", planned="rollout importance sampling"
    )
