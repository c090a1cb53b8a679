"""Settings of the algorithm."""

from __future__ import annotations

from dataclasses import dataclass

from verl.config.correction import RolloutCorrectionConfig
from verl.config.node import ABSENT, ConfigNode, section, setting
from verl.config.thresholds import LEVELS, MODES


@dataclass(frozen=True)
class FilterGroupsConfig(ConfigNode):
    """Dynamic sampling (DAPO): prompts whose samples all score the same are dropped, and more are sampled."""

    enable: bool = setting(
        False,
        "dynamic sampling (DAPO): drop prompts whose samples all score the same, and sample on until the batch is full",
    )
    metric: str | None = setting(
        None,
        "what has to differ inside a group: null for the reward, or a key that the scorer returns (acc, ...)",
        upstream="reward",
    )
    max_num_gen_batches: int = setting(0, "stop the run after that many sampled batches for one step; 0: never")
    max_inflight_gen_batches: int = setting(
        1, "batches of prompts sampled in one go with dynamic sampling; more keep a fast sampler busy, and wait longer"
    )


@dataclass(frozen=True)
class KLControlConfig(ConfigNode):
    """The weight of the KL in the reward; has an effect with algorithm.use_kl_in_reward=true."""

    type: str = setting(
        "fixed",
        "weight of the KL in the reward: fixed, or adaptive (steered towards target_kl)",
        choices=("fixed", "adaptive"),
    )
    kl_coef: float = setting(0.001, "that weight, at the start")
    horizon: int = setting(10000, "adaptive: samples over which the weight follows; larger is slower")
    target_kl: float = setting(0.1, "adaptive: the KL per sequence to hold")


@dataclass(frozen=True)
class PFPPOConfig(ConfigNode):
    """Resampling of a batch by its rewards (PF-PPO)."""

    reweight_method: str = setting(
        "pow",
        "how that resampling weighs rewards: pow, max_min or max_random",
        choices=("pow", "max_min", "max_random"),
    )
    weight_pow: float = setting(2.0, "exponent of pow")


@dataclass(frozen=True)
class AlgoConfig(ConfigNode):
    """Advantages, the KL in the reward, and what is done with the sampler's mismatch."""

    rollout_correction: RolloutCorrectionConfig = section(RolloutCorrectionConfig)
    gamma: float = setting(1.0, "discount of later rewards")
    lam: float = setting(1.0, "lambda of generalised advantage estimation")
    adv_estimator: str = setting(
        "gae", "advantage estimator: a registered name, or a dotted path my_pkg.my_mod:my_estimator"
    )
    norm_adv_by_std_in_grpo: bool = setting(
        True, "GRPO: divide by the group's standard deviation; false: subtract the mean only (Dr. GRPO)"
    )
    filter_groups: FilterGroupsConfig = section(FilterGroupsConfig)
    use_kl_in_reward: bool = setting(
        False, "subtract a KL term from the reward of every token; loads the reference policy"
    )
    kl_penalty: str = setting("kl", "estimator of that KL: kl (k1), abs, mse (k2), low_var_kl (k3), full")
    kl_ctrl: KLControlConfig = section(KLControlConfig)
    use_pf_ppo: bool = setting(False, "resample the batch by reward before the update (PF-PPO)")
    pf_ppo: PFPPOConfig = section(PFPPOConfig)
    gdpo_reward_keys: list | None = setting(
        None, "gdpo: the rewards to normalise apart, by the keys that the scorer returns"
    )
    gdpo_reward_weights: list | None = setting(None, "gdpo: their weights; null: 1 each")
    vapo_length_alpha: float | None = setting(
        0.05,
        "vapo: lambda of the policy is 1 - 1 / (this times the response's tokens), at least 0; null: algorithm.lam",
        upstream=ABSENT,
    )
    vapo_lam_critic: float = setting(1.0, "vapo: lambda of the critic's targets", upstream=ABSENT)
    singleton: str = setting(
        "zero",
        "group estimators: advantage of a sample that is alone in its group: zero, or raw for its reward",
        upstream="raw",
        choices=("zero", "raw"),
    )
    rollout_is_threshold: float | None = setting(
        None,
        "upper bound of importance weights between sampler and trainer; null: no weights and no metrics of them",
    )
    rollout_is: bool = setting(False, "let the weights enter the loss; false: metrics only")
    rollout_is_threshold_lower: float | None = setting(None, "lower bound; null: 1 / rollout_is_threshold")
    rollout_is_level: str = setting(
        "token",
        "ratio of a token, of a sequence (product), or geometric (mean over a sequence)",
        choices=LEVELS,
    )
    rollout_is_mode: str = setting(
        "truncate",
        "truncate caps weights, mask sets those outside the bounds to zero",
        choices=MODES,
    )
    rollout_is_veto_threshold: float | None = setting(
        0.0001,
        "a sequence with a token whose ratio is below this gets weight 0; null: none does",
    )
