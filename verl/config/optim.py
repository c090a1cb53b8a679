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
    weight_decay_incr_style: str = setting(
        "constant",
        "how the weight decay changes: constant, linear, cosine",
        no_effect="the weight decay starts and ends at weight_decay",
    )
    lr_wsd_decay_style: str = setting(
        "exponential",
        "lr_decay_style=WSD: shape of the last part",
        choices=("linear", "cosine", "exponential", "minus_sqrt"),
    )
    lr_wsd_decay_steps: float | None = setting(
        None, "lr_decay_style=WSD: steps of the last part; has to be set with it"
    )
    use_checkpoint_opt_param_scheduler: bool = setting(
        False, "take the schedule from the checkpoint", planned="schedules out of a checkpoint"
    )
    use_precision_aware_optimizer: bool = setting(
        False, "keep the optimizer's state in lower precision", planned=_LOW_PRECISION
    )
    main_grads_dtype: str = setting("fp32", "dtype of accumulated gradients", planned=_LOW_PRECISION)
    exp_avg_dtype: str = setting("fp32", "dtype of Adam's first moment", planned=_LOW_PRECISION)
    exp_avg_sq_dtype: str = setting("fp32", "dtype of Adam's second moment", planned=_LOW_PRECISION)
    use_layer_wise_distributed_optimizer: bool = setting(
        False, "Muon: shard the optimizer by layers", planned="the Muon optimizer"
    )
    muon_momentum: float = setting(0.95, "Muon: momentum", planned="the Muon optimizer")
    muon_nesterov: bool = setting(False, "Muon: Nesterov momentum", planned="the Muon optimizer")
    muon_split_qkv: bool = setting(True, "Muon: orthogonalize q, k and v each for itself", planned="the Muon optimizer")
    muon_scale_mode: str = setting("spectral", "Muon: rule that scales an update", planned="the Muon optimizer")
    muon_coefficient_type: str = setting("quintic", "Muon: Newton-Schulz coefficients", planned="the Muon optimizer")
    muon_num_ns_steps: int = setting(5, "Muon: Newton-Schulz steps", planned="the Muon optimizer")
    muon_tp_mode: str = setting(
        "blockwise", "Muon: how tensor-parallel matrices are treated", planned="the Muon optimizer"
    )
    muon_fp32_matmul_prec: str = setting("medium", "Muon: precision of float32 products", planned="the Muon optimizer")
    muon_extra_scale_factor: float = setting(1.0, "Muon: factor of every update", planned="the Muon optimizer")
    muon_scalar_optimizer: str = setting(
        "adam", "Muon: optimizer of parameters that are no matrices", planned="the Muon optimizer"
    )
    muon_match_adamw_update_rms: bool = setting(
        False, "Muon: scale updates to AdamW's size", planned="the Muon optimizer"
    )
    lr_min: float = setting(0.0, "VeOmni: the lowest learning rate", planned="the VeOmni engine")
    lr_start: float = setting(0.0, "VeOmni: learning rate at the start of the warm-up", planned="the VeOmni engine")
    lr_decay_ratio: float = setting(
        1.0, "VeOmni: share of the steps over which the learning rate falls", planned="the VeOmni engine"
    )
    name: str = setting("AdamW", "TorchTitan: class of the optimizer", planned="the TorchTitan engine")
    eps: float = setting(1e-08, "TorchTitan: Adam's epsilon", planned="the TorchTitan engine")
    decay_type: str = setting("linear", "TorchTitan: linear, sqrt or cosine", planned="the TorchTitan engine")
    min_lr_factor: float = setting(
        0.0, "TorchTitan: the lowest learning rate, as a share of lr", planned="the TorchTitan engine"
    )
