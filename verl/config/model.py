"""Model settings."""

from __future__ import annotations

from dataclasses import dataclass

from verl.config.node import ConfigNode, section, setting


@dataclass(frozen=True)
class FusedKernelConfig(ConfigNode):
    """``actor_rollout_ref.model.fused_kernel_options``."""

    impl_backend: str = setting("torch", "torch, triton, liger", planned="the fused LM head")


@dataclass(frozen=True)
class TiledMLPConfig(ConfigNode):
    """``actor_rollout_ref.model.tiled_mlp``."""

    enabled: bool = setting(False, "tile the MLP to cut memory", planned="the tiled MLP")
    num_shards: int = setting(4, "tiles", planned="the tiled MLP")


@dataclass(frozen=True)
class MtpConfig(ConfigNode):
    """``actor_rollout_ref.model.mtp``."""

    enable: bool = setting(False, "load multi-token-prediction heads", planned="multi-token prediction")
    enable_train: bool = setting(False, "train them", planned="multi-token prediction")
    enable_rollout: bool = setting(False, "use for speculative rollout", planned="multi-token prediction")
    detach_encoder: bool = setting(False, "stop gradient to trunk", planned="multi-token prediction")
    mtp_loss_scaling_factor: float = setting(0.1, "MTP loss weight", planned="multi-token prediction")
    speculative_algorithm: str = setting("EAGLE", "SGLang algorithm", planned="multi-token prediction")
    speculative_num_steps: int = setting(3, "draft steps", planned="multi-token prediction")
    speculative_eagle_topk: int = setting(1, "draft top-k", planned="multi-token prediction")
    speculative_num_draft_tokens: int = setting(4, "draft tokens", planned="multi-token prediction")
    method: str = setting("mtp", "vLLM method", planned="multi-token prediction")
    num_speculative_tokens: int = setting(1, "vLLM draft tokens", planned="multi-token prediction")


@dataclass(frozen=True)
class MegatronLoraConfig(ConfigNode):
    """``actor_rollout_ref.model.lora``."""

    type: str = setting("lora", "megatron LoRA kind: lora, vlm_lora, canonical_lora, dora", planned="LoRA")
    merge: bool = setting(False, "merge adapter before sync (both backends)", planned="LoRA")
    rank: int = setting(0, "megatron LoRA rank (0 = off)", planned="LoRA")
    alpha: int = setting(32, "scale", planned="LoRA")
    dropout: float = setting(0.0, "dropout", planned="LoRA")
    target_modules: list = setting(
        ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"], "megatron module names", planned="LoRA"
    )
    exclude_modules: list = setting([], "skip list", planned="LoRA")
    dropout_position: str = setting("pre", "pre or post", planned="LoRA")
    lora_A_init_method: str = setting("xavier", "A init", planned="LoRA")
    lora_B_init_method: str = setting("zero", "B init", planned="LoRA")
    a2a_experimental: bool = setting(False, "all-to-all mode", planned="LoRA")
    dtype: str | None = setting(None, "adapter dtype", planned="LoRA")
    adapter_path: str | None = setting(None, "adapter to load", planned="LoRA", path=True)
    freeze_vision_model: bool = setting(True, "vlm_lora freeze", planned="LoRA")
    freeze_vision_projection: bool = setting(True, "vlm_lora freeze", planned="LoRA")
    freeze_language_model: bool = setting(True, "vlm_lora freeze", planned="LoRA")


@dataclass(frozen=True)
class HFModelConfig(ConfigNode):
    """A Hugging Face model and its tokenizer."""

    path: str = setting("~/models/deepseek-llm-7b-chat", "HF id or local/HDFS path", path=True)
    hf_config_path: str | None = setting(None, "config elsewhere", path=True)
    tokenizer_path: str | None = setting(None, "tokenizer elsewhere", path=True)
    use_shm: bool = setting(False, "copy weights to /dev/shm first")
    trust_remote_code: bool = setting(False, "allow custom code")
    custom_chat_template: str | None = setting(None, "jinja override")
    external_lib: str | None = setting(None, "module imported before load")
    override_config: dict = setting({}, "HF config overrides")
    enable_gradient_checkpointing: bool | None = setting(
        None, "recompute activations in the backward pass; null: on an accelerator yes, on CPU no", upstream=True
    )
    enable_activation_offload: bool = setting(False, "activations to host", planned="activation offloading")
    use_remove_padding: bool = setting(
        True,
        "sequence packing",
        no_effect="the plain engine computes no padding between prompt and response in either case",
    )
    lora_rank: int = setting(0, "> 0 enables LoRA (FSDP)", planned="LoRA")
    lora_alpha: int = setting(16, "loRA scale", planned="LoRA")
    target_modules: str | list = setting("all-linear", "all-linear or list", planned="LoRA")
    exclude_modules: list | str | None = setting(None, "skip list", planned="LoRA")
    lora_adapter_path: str | None = setting(None, "continue an adapter", planned="LoRA", path=True)
    use_liger: bool = setting(False, "liger kernels", planned="Liger kernels")
    use_fused_kernels: bool = setting(False, "fused linear+cross-entropy", planned="the fused LM head")
    fused_kernel_options: FusedKernelConfig = section(FusedKernelConfig)
    tiled_mlp: TiledMLPConfig = section(TiledMLPConfig)
    mtp: MtpConfig = section(MtpConfig)
    lora: MegatronLoraConfig = section(MegatronLoraConfig)
    target_parameters: list | None = setting(None, "loRA on raw parameters", planned="LoRA")
    model_type: str = setting(
        "language_model", "language_model or value_model", no_effect="the role decides which model class is loaded"
    )
    load_tokenizer: bool = setting(
        True, "load the tokenizer too", no_effect="the role decides which model class is loaded"
    )
