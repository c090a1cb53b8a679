"""Settings of the actor and of the reference policy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from verl.config.engine import FSDPEngineConfig
from verl.config.megatron import MegatronEngineConfig
from verl.config.node import ConfigNode, section, setting
from verl.config.optim import OptimizerConfig
from verl.config.profiler import ProfilerConfig
from verl.config.torchtitan import TorchtitanEngineConfig
from verl.config.veomni import VeOmniEngineConfig

CHECKPOINT_CONTENTS = ("model", "optimizer", "extra", "hf_model")


@dataclass(frozen=True)
class PolicyLossConfig(ConfigNode):
    """``actor_rollout_ref.actor.policy_loss``."""

    loss_mode: str = setting("vanilla", "name in the policy-loss registry")
    clip_cov_ratio: float = setting(0.0002, "share of tokens dropped by clip_cov", planned="the policy loss clip_cov")
    clip_cov_lb: float = setting(1.0, "lower covariance bound for clip_cov", planned="the policy loss clip_cov")
    clip_cov_ub: float = setting(5.0, "upper covariance bound for clip_cov", planned="the policy loss clip_cov")
    kl_cov_ratio: float = setting(
        0.0002, "share of top-covariance tokens that get the KL term (kl_cov)", planned="the policy loss kl_cov"
    )
    ppo_kl_coef: float = setting(0.1, "KL weight inside kl_cov", planned="the policy loss kl_cov")
    dro_beta: float | None = setting(
        None, "quadratic log-ratio weight; must be > 0 for dro", planned="the policy loss dro"
    )


@dataclass(frozen=True)
class CheckpointConfig(ConfigNode):
    """``actor_rollout_ref.actor.checkpoint``."""

    save_contents: list = setting(
        ["model", "optimizer", "extra"], "any of model, optimizer, extra, hf_model", choices=CHECKPOINT_CONTENTS
    )
    load_contents: list | None = setting(
        None, "same vocabulary; defaults to save_contents", follows=".save_contents", choices=CHECKPOINT_CONTENTS
    )
    async_save: bool = setting(False, "background save (Megatron only)", planned="asynchronous checkpoints")
    strict: bool = setting(
        True, "strict check while exporting weights", no_effect="weights are always exported strictly"
    )
    save_lora_only: bool = setting(False, "save adapters only", planned="LoRA")
    mbridge_config: dict = setting({}, "arguments of the weight bridge", planned="Megatron-Core training")


@dataclass(frozen=True)
class ActorQATConfig(ConfigNode):
    """``actor_rollout_ref.actor.qat``."""

    enable: bool = setting(False, "quantization-aware training on", planned="quantization-aware training")
    mode: str = setting("w4a16", "w4a16 (w4a4 exists, not recommended)", planned="quantization-aware training")
    group_size: int = setting(16, "quantization block (16 for NVFP4)", planned="quantization-aware training")
    ignore_patterns: list = setting(
        ["lm_head", "embed_tokens", "re:.*mlp.gate$"], "modules left unquantized", planned="quantization-aware training"
    )
    activation_observer: str = setting(
        "static_minmax", "activation range observer (w4a4)", planned="quantization-aware training"
    )
    quantization_config_path: str | None = setting(
        None, "vLLM quantization JSON", planned="quantization-aware training", path=True
    )


@dataclass(frozen=True)
class ActorConfig(ConfigNode):
    """The policy being trained."""

    rollout_n: int = setting(1, "mirrors rollout.n (used to scale batch sizes)", follows="actor_rollout_ref.rollout.n")
    strategy: str = setting(
        "auto", "training backend: fsdp, fsdp2, fsdp_turbo, megatron, veomni, torchtitan, automodel", upstream="fsdp"
    )
    ppo_mini_batch_size: int = setting(
        256, "global mini-batch per optimizer step, counted in prompts (times n in samples)"
    )
    ppo_micro_batch_size: int | None = setting(None, "deprecated global micro-batch")
    ppo_micro_batch_size_per_gpu: int | None = setting(
        None, "samples per forward/backward on one GPU; required unless dynamic batching"
    )
    use_dynamic_bsz: bool = setting(False, "pack micro-batches by token budget instead of sample count")
    ppo_max_token_len_per_gpu: int = setting(16384, "token budget per GPU per micro-batch when dynamic")
    clip_ratio: float = setting(0.2, "symmetric PPO clip epsilon")
    clip_ratio_low: float | None = setting(None, "lower epsilon (decoupled clip)", upstream=0.2)
    clip_ratio_high: float | None = setting(None, "upper epsilon (clip-higher / DAPO)", upstream=0.2)
    tau_pos: float = setting(1.0, "SAPO gate temperature when advantage > 0", planned="the policy loss sapo")
    tau_neg: float = setting(1.05, "SAPO gate temperature when advantage <= 0", planned="the policy loss sapo")
    freeze_vision_tower: bool = setting(False, "do not train the vision encoder", planned="vision-language models")
    policy_loss: PolicyLossConfig = section(PolicyLossConfig)
    clip_ratio_c: float = setting(3.0, "dual-clip constant (>1) used when advantage < 0")
    loss_agg_mode: str = setting(
        "token-mean", "token-mean, token-sum, seq-mean-token-sum, seq-mean-token-mean, seq-mean-token-sum-norm"
    )
    loss_scale_factor: float | None = setting(
        None, "fixed divisor for seq-mean-token-sum-norm (null = response length)"
    )
    entropy_coeff: float = setting(0.0, "weight of the entropy bonus")
    calculate_entropy: bool = setting(False, "ask the forward pass to also return entropy")
    calculate_sum_pi_squared: bool = setting(
        False,
        "also return sum of squared probabilities (needed by the OTB estimators)",
        planned="the optimal token baseline estimators",
    )
    use_kl_loss: bool = setting(False, "add KL(ref) term to the actor loss; also turns the reference policy on")
    use_prefix_grouper: bool = setting(
        False, "compute a shared prompt prefix once per group", planned="shared prompts in training"
    )
    use_torch_compile: bool = setting(
        True,
        "torch.compile for log-prob/entropy parts",
        no_effect="the plain engine does not compile; the FSDP engines will",
    )
    kl_loss_coef: float = setting(0.001, "weight of the KL loss")
    kl_loss_type: str = setting(
        "low_var_kl", "kl/k1, abs, mse/k2, low_var_kl/k3, full; suffix + = straight-through k2 gradient"
    )
    ppo_epochs: int = setting(1, "passes over one rollout batch")
    shuffle: bool = setting(False, "shuffle mini-batches between PPO epochs")
    data_loader_seed: int = setting(42, "seed for mini-batch order")
    checkpoint: CheckpointConfig = section(CheckpointConfig)
    use_fused_kernels: bool = setting(
        False,
        "inherits model.use_fused_kernels",
        follows="actor_rollout_ref.model.use_fused_kernels",
        planned="the fused LM head",
    )
    qat: ActorQATConfig = section(ActorQATConfig)
    grad_clip: float = setting(1.0, "max gradient norm", follows=".optim.clip_grad")
    ulysses_sequence_parallel_size: int = setting(
        1, "deprecated alias of fsdp_config.ulysses_sequence_parallel_size", planned="Ulysses sequence parallelism"
    )
    entropy_from_logits_with_chunking: bool = setting(
        False, "chunked entropy to lower peak memory", planned="the memory-saving entropy"
    )
    entropy_from_logits_chunk_size: int = setting(2048, "chunk length", planned="the memory-saving entropy")
    entropy_checkpointing: bool = setting(False, "recompute entropy in backward", planned="the memory-saving entropy")
    pad_to_length: bool = setting(False, "round packed micro-batches up to a bucket", planned="padded packing")
    use_remove_padding: bool = setting(
        False,
        "inherits model.use_remove_padding (sequence packing)",
        follows="actor_rollout_ref.model.use_remove_padding",
        no_effect="the plain engine computes no padding between prompt and response in either case",
    )
    use_rollout_log_probs: bool = setting(
        False, "take the sampler's log-probs as old log-probs", planned="training against rollout log-probs"
    )
    ppo_infer_micro_batch_size_per_gpu: int | None = setting(
        None, "rows per forward pass when log-probs are computed", planned="training against rollout log-probs"
    )
    ppo_infer_max_token_len_per_gpu: int = setting(
        16384, "token budget of that pass", planned="training against rollout log-probs"
    )
    optim: OptimizerConfig = section(OptimizerConfig)
    fsdp_config: FSDPEngineConfig = section(FSDPEngineConfig)
    megatron: MegatronEngineConfig = section(MegatronEngineConfig)
    veomni: VeOmniEngineConfig = section(VeOmniEngineConfig)
    torchtitan: TorchtitanEngineConfig = section(TorchtitanEngineConfig)
    profiler: ProfilerConfig = section(ProfilerConfig)

    @property
    def global_batch_info(self) -> dict[str, Any]:
        """Empty, and no setting: losses written for upstream pass it on to `agg_loss`, which has the norm already."""
        return {}


@dataclass(frozen=True)
class RefConfig(ConfigNode):
    """The reference policy."""

    rollout_n: int = setting(
        1,
        "samples per prompt; follows rollout.n",
        follows="actor_rollout_ref.rollout.n",
        no_effect="the reference policy has no mini-batches",
    )
    strategy: str = setting("auto", "follows actor", follows="actor_rollout_ref.actor.strategy", upstream="fsdp")
    use_torch_compile: bool = setting(
        True,
        "follows actor",
        follows="actor_rollout_ref.actor.use_torch_compile",
        no_effect="the plain engine does not compile; the FSDP engines will",
    )
    log_prob_micro_batch_size: int | None = setting(None, "deprecated global value")
    log_prob_micro_batch_size_per_gpu: int | None = setting(
        None, "samples per GPU per forward; required without dynamic batching"
    )
    log_prob_use_dynamic_bsz: bool = setting(
        False, "follows actor.use_dynamic_bsz", follows="actor_rollout_ref.actor.use_dynamic_bsz"
    )
    log_prob_max_token_len_per_gpu: int = setting(
        16384, "follows actor.ppo_max_token_len_per_gpu", follows="actor_rollout_ref.actor.ppo_max_token_len_per_gpu"
    )
    ulysses_sequence_parallel_size: int = setting(
        1,
        "follows actor",
        follows="actor_rollout_ref.actor.ulysses_sequence_parallel_size",
        planned="Ulysses sequence parallelism",
    )
    entropy_from_logits_with_chunking: bool = setting(False, "chunked entropy", planned="the memory-saving entropy")
    entropy_from_logits_chunk_size: int = setting(2048, "chunk", planned="the memory-saving entropy")
    entropy_checkpointing: bool = setting(False, "recompute", planned="the memory-saving entropy")
    pad_to_length: bool = setting(
        False, "follows actor", follows="actor_rollout_ref.actor.pad_to_length", planned="padded packing"
    )
    fsdp_config: FSDPEngineConfig = section(FSDPEngineConfig)
    megatron: MegatronEngineConfig = section(MegatronEngineConfig)
    veomni: VeOmniEngineConfig = section(VeOmniEngineConfig)
    torchtitan: TorchtitanEngineConfig = section(TorchtitanEngineConfig)
    profiler: ProfilerConfig = section(ProfilerConfig)
