"""Optimizer settings."""

from __future__ import annotations

from dataclasses import dataclass

from verl.config.node import ConfigNode, setting

_LOW_PRECISION = "optimizer states in lower precision"


@dataclass(frozen=True)
class OptimizerConfig(ConfigNode):
    """Optimizer and learning-rate schedule of one trained model."""

    optimizer: str = setting("AdamW", "class of the optimizer")
    optimizer_impl: str = setting("torch.optim", "module that has this class")
    lr: float = setting(1e-06, "learning rate; after the warm-up, where there is one")
    lr_warmup_steps_ratio: float = setting(
        0.0, "share of the run over which the learning rate rises from 0, unless lr_warmup_steps is above 0"
    )
    total_training_steps: int = setting(-1, "length of the schedule in steps; -1 is the length of the run")
    weight_decay: float = setting(0.01, "decoupled weight decay")
    lr_warmup_steps: int = setting(-1, "steps of the warm-up; 0 or -1: lr_warmup_steps_ratio decides")
    betas: list[float] = setting([0.9, 0.999], "Adam's decay of the first and the second moment")
    clip_grad: float = setting(1.0, "largest gradient norm, unless the role sets a grad_clip of its own")
    min_lr_ratio: float = setting(0.0, "cosine, wsd: the lowest learning rate, as a share of lr")
    num_cycles: float = setting(0.5, "cosine, wsd: cosine waves until the end; 0.5 falls once")
    lr_scheduler_type: str = setting(
        "constant",
        "constant; cosine; wsd (constant, then a cosine over the last tenth)",
        choices=("constant", "cosine", "wsd"),
    )
    zero_indexed_step: bool = setting(
        True, "cosine: the first step has number 0 (false: 1, so that it has a learning rate above 0 in a warm-up)"
    )
    override_optimizer_config: dict | None = setting(None, "further arguments of the optimizer's class")
    lr_warmup_init: float = setting(0.0, "learning rate at the start of the warm-up")
    lr_decay_steps: float | None = setting(
        None, "lr_decay_style: steps until min_lr, those of the warm-up included; null: the length of the schedule"
    )
    lr_decay_style: str = setting(
        "constant",
        "Megatron's name for the schedule, instead of lr_scheduler_type",
        choices=("constant", "linear", "cosine", "inverse_square_root", "WSD"),
    )
    min_lr: float = setting(0.0, "lr_decay_style: the lowest learning rate")
    lr_wsd_decay_style: str = setting(
        "exponential",
        "lr_decay_style=WSD: shape of the last part",
        choices=("linear", "cosine", "exponential", "minus_sqrt"),
    )
    lr_wsd_decay_steps: float | None = setting(
        None, "lr_decay_style=WSD: steps of the last part; has to be set with it"
    )
