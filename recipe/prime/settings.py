"""The settings of PRIME: its reward model, and what ratings and outcomes weigh."""

from __future__ import annotations

from dataclasses import dataclass

from verl.config.loading.aliases import SCHEDULE_NAMES, Aliases, to
from verl.config.schema.node import ABSENT, ConfigNode, section, setting
from verl.config.schema.role import OptimizerConfig

IMPLICIT = "reward.reward_model.implicit"


@dataclass(frozen=True)
class ImplicitRewardConfig(ConfigNode):
    """The reward model as a language model that rates every token and learns from outcomes (PRIME)."""

    enable: bool = setting(
        True,
        "the reward model is a language model that is trained along and pays for single tokens",
        upstream=ABSENT,
    )
    prime_granularity: str = setting(
        "token",
        "token: every token is paid its own process reward; whole: their sum on the last one",
        upstream=ABSENT,
        choices=("token", "whole"),
    )
    prime_norm: str = setting(
        "batch_norm",
        "batch_norm: process rewards are divided by the largest sum of them from any token to the end of its answer",
        upstream=ABSENT,
        choices=("batch_norm", "none"),
    )
    zero_last: bool = setting(
        False, "leave out the process reward of the last token, as upstream's recipe does", upstream=ABSENT
    )
    ref_type: str = setting(
        "freeze",
        "what its log-probs are compared with: freeze, those of a model that does not learn; policy, those of the "
        "policy that sampled",
        upstream=ABSENT,
        choices=("freeze", "policy"),
    )
    ref_path: str | None = setting(
        None,
        "ref_type=freeze: folder or hub name of that model",
        follows="reward.reward_model.model_path",
        upstream=ABSENT,
        path=True,
    )
    beta_train: float = setting(0.05, "factor between a log-ratio and a process reward", upstream=ABSENT)
    loss_type: str = setting("ce", "what it learns from outcomes by: ce, the cross-entropy of the sum", upstream=ABSENT)
    update: str = setting(
        "before",
        "it learns from a batch before that batch is rated, after it (or reverse, the same here), or never (none)",
        upstream=ABSENT,
        choices=("before", "after", "reverse", "none"),
    )
    mini_batch_size: int = setting(
        256,
        "prompts per optimizer step of it",
        follows="actor_rollout_ref.actor.ppo_mini_batch_size",
        upstream=ABSENT,
    )
    enable_gradient_checkpointing: bool | None = setting(
        None,
        "compute activations again in the backward pass; null: on an accelerator yes, on CPU no",
        follows="actor_rollout_ref.model.enable_gradient_checkpointing",
        upstream=ABSENT,
    )
    use_fused_kernels: bool = setting(
        False,
        "compute its log-probs without writing out the logits",
        follows="actor_rollout_ref.model.use_fused_kernels",
        upstream=ABSENT,
    )
    grad_clip: float = setting(
        10.0,
        "largest gradient norm; a larger gradient is scaled down to it",
        follows=".optim.clip_grad",
        upstream=ABSENT,
    )
    optim: OptimizerConfig = section(OptimizerConfig, weight_decay=0.0, clip_grad=10.0)


@dataclass(frozen=True)
class PrimeAlgoConfig(ConfigNode):
    """What the estimators of PRIME weigh."""

    reward_dpo_coef: float = setting(5.0, "weight of the process rewards in the return", upstream=ABSENT)
    reward_gt_coef: float = setting(5.0, "weight of the outcome in the return", upstream=ABSENT)


ALIASES = Aliases(
    moved={
        **{
            f"reward_model.{name}": to(f"{IMPLICIT}.{name}")
            for name in ("prime_granularity", "prime_norm", "mini_batch_size")
        },
        **{
            f"reward_model.model.{name}": to(f"{IMPLICIT}.{name}")
            for name in (
                "ref_path",
                "ref_type",
                "beta_train",
                "loss_type",
                "update",
                "optim",
                "enable_gradient_checkpointing",
                "use_fused_kernels",
            )
        },
        "reward_model.model.optim.grad_clip": to(f"{IMPLICIT}.grad_clip"),
        **{f"reward_model.model.optim.{old}": to(f"{IMPLICIT}.optim.{new}") for old, new in SCHEDULE_NAMES},
    },
    removed={},
    ignored={
        "reward_model.model.tokenizer_path": "has no effect: an implicit reward model reads the policy's tokens",
        "reward_model.model.fused_kernel_options": "has no effect: a reward model takes those of the policy",
    },
)
