"""Optimizer settings."""

from __future__ import annotations

from dataclasses import dataclass

from verl.config.schema.bounds import AMOUNT, BETAS, POSITIVE, SHARE, at_least
from verl.config.schema.node import ConfigNode, setting


@dataclass(frozen=True)
class OptimizerConfig(ConfigNode):
    """Optimizer and learning-rate schedule of one trained model."""

    optimizer: str = setting("AdamW", "optimizer class")
    optimizer_impl: str = setting("torch.optim", "module of the optimizer class")
    lr: float = setting(1e-06, "learning rate, after any warm-up", within=AMOUNT)
    lr_warmup_steps_ratio: float = setting(
        0.0, "warm-up as a share of the run; lr_warmup_steps above 0 overrides it", within=SHARE
    )
    total_training_steps: int = setting(-1, "length of the schedule in steps; -1: the length of the run")
    weight_decay: float = setting(0.01, "decoupled weight decay", within=AMOUNT)
    lr_warmup_steps: int | None = setting(
        -1, "warm-up steps; 0, -1 or null: lr_warmup_steps_ratio decides", within=at_least(-1)
    )
    betas: list[float] = setting([0.9, 0.999], "Adam betas", within=BETAS)
    clip_grad: float = setting(
        1.0, "gradient clipping: maximum gradient norm; a grad_clip of the role overrides it", within=POSITIVE
    )
    min_lr_ratio: float = setting(0.0, "cosine, wsd: minimum learning rate, as a share of lr", within=SHARE)
    num_cycles: float = setting(0.5, "cosine, wsd: cosine waves until the end; 0.5 falls once", within=POSITIVE)
    lr_scheduler_type: str = setting(
        "constant",
        "constant; cosine; wsd (constant, then a cosine over the last tenth)",
        choices=("constant", "cosine", "wsd"),
    )
    zero_indexed_step: bool = setting(
        True, "cosine: number steps from 0; false: from 1, so that the first warm-up step has a learning rate above 0"
    )
    override_optimizer_config: dict | None = setting(None, "extra arguments of the optimizer class")
    lr_warmup_init: float = setting(0.0, "learning rate at the start of the warm-up", within=AMOUNT)
    lr_decay_steps: float | None = setting(
        None,
        "lr_decay_style: steps until min_lr, warm-up included; null: the length of the schedule",
        within=POSITIVE,
        needs=".lr_decay_style=linear, cosine, inverse_square_root or WSD",
    )
    lr_decay_style: str = setting(
        "constant",
        "Megatron's name for the schedule, instead of lr_scheduler_type",
        choices=("constant", "linear", "cosine", "inverse_square_root", "WSD"),
    )
    min_lr: float = setting(
        0.0,
        "lr_decay_style: minimum learning rate",
        within=AMOUNT,
        needs=".lr_decay_style=linear, cosine, inverse_square_root or WSD",
    )
    lr_wsd_decay_style: str = setting(
        "exponential",
        "lr_decay_style=WSD: shape of the decay",
        choices=("linear", "cosine", "exponential", "minus_sqrt"),
        needs=".lr_decay_style=WSD",
    )
    lr_wsd_decay_steps: float | None = setting(
        None, "lr_decay_style=WSD: steps of the decay; required", within=POSITIVE, needs=".lr_decay_style=WSD"
    )
