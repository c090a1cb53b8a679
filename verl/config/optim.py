"""Optimizer settings."""

from __future__ import annotations

from dataclasses import dataclass

from verl.config.node import ConfigNode, setting


@dataclass(frozen=True)
class OptimizerConfig(ConfigNode):
    """Optimizer and learning-rate schedule of a trained model."""

    optimizer: str = setting("AdamW", "optimizer class name")
    optimizer_impl: str = setting("torch.optim", "module to import it from")
    lr: float = setting(1e-06, "learning rate (actor 1e-6, critic 1e-5 override)")
    lr_warmup_steps_ratio: float = setting(0.0, "warmup share when lr_warmup_steps <= 0")
    total_training_steps: int = setting(-1, "filled in at run time")
    weight_decay: float = setting(0.01, "decay")
    lr_warmup_steps: int = setting(-1, "warmup steps; wins over the ratio when > 0")
    betas: list[float] = setting([0.9, 0.999], "adam betas")
    clip_grad: float = setting(1.0, "gradient clip")
    min_lr_ratio: float = setting(0.0, "cosine floor")
    num_cycles: float = setting(0.5, "cosine cycles")
    lr_scheduler_type: str = setting("constant", "constant or cosine", choices=("constant", "cosine", "wsd"))
    zero_indexed_step: bool = setting(True, "schedule counts from 0")
    override_optimizer_config: dict | None = setting(None, "extra kwargs for the optimizer")
    lr_warmup_init: float = setting(0.0, "first warmup lr", planned="Megatron-Core training")
    lr_decay_steps: float | None = setting(None, "decay length", planned="Megatron-Core training")
    lr_decay_style: str = setting(
        "constant", "constant, linear, cosine, inverse_square_root", planned="Megatron-Core training"
    )
    min_lr: float = setting(0.0, "floor", planned="Megatron-Core training")
    weight_decay_incr_style: str = setting("constant", "weight-decay schedule", planned="Megatron-Core training")
    lr_wsd_decay_style: str = setting("exponential", "WSD tail shape", planned="Megatron-Core training")
    lr_wsd_decay_steps: float | None = setting(None, "WSD tail length", planned="Megatron-Core training")
    use_checkpoint_opt_param_scheduler: bool = setting(
        False, "restore scheduler params from checkpoint", planned="Megatron-Core training"
    )
    use_precision_aware_optimizer: bool = setting(
        False, "lower-precision optimizer states", planned="Megatron-Core training"
    )
    main_grads_dtype: str = setting("fp32", "main grad dtype", planned="Megatron-Core training")
    exp_avg_dtype: str = setting("fp32", "adam m dtype", planned="Megatron-Core training")
    exp_avg_sq_dtype: str = setting("fp32", "adam v dtype", planned="Megatron-Core training")
    use_layer_wise_distributed_optimizer: bool = setting(
        False, "muon distribution switch", planned="Megatron-Core training"
    )
    muon_momentum: float = setting(0.95, "muon momentum", planned="Megatron-Core training")
    muon_nesterov: bool = setting(False, "muon Nesterov", planned="Megatron-Core training")
    muon_split_qkv: bool = setting(True, "orthogonalize q,k,v apart", planned="Megatron-Core training")
    muon_scale_mode: str = setting("spectral", "muon scale rule", planned="Megatron-Core training")
    muon_coefficient_type: str = setting("quintic", "newton-Schulz coefficients", planned="Megatron-Core training")
    muon_num_ns_steps: int = setting(5, "newton-Schulz steps", planned="Megatron-Core training")
    muon_tp_mode: str = setting("blockwise", "muon under tensor parallel", planned="Megatron-Core training")
    muon_fp32_matmul_prec: str = setting("medium", "matmul precision", planned="Megatron-Core training")
    muon_extra_scale_factor: float = setting(1.0, "extra scale", planned="Megatron-Core training")
    muon_scalar_optimizer: str = setting("adam", "optimizer for non-matrix params", planned="Megatron-Core training")
    muon_match_adamw_update_rms: bool = setting(
        False, "derive scale so RMS equals AdamW", planned="Megatron-Core training"
    )
    lr_min: float = setting(0.0, "floor", planned="the VeOmni engine")
    lr_start: float = setting(0.0, "warmup start", planned="the VeOmni engine")
    lr_decay_ratio: float = setting(1.0, "share of steps spent decaying", planned="the VeOmni engine")
    name: str = setting("AdamW", "optimizer class", planned="the TorchTitan engine")
    eps: float = setting(1e-08, "adam eps", planned="the TorchTitan engine")
    decay_type: str = setting("linear", "linear, sqrt, cosine", planned="the TorchTitan engine")
    min_lr_factor: float = setting(0.0, "floor factor", planned="the TorchTitan engine")
