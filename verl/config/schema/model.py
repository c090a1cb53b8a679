"""Model settings."""

from __future__ import annotations

from dataclasses import dataclass

from verl.config.schema.node import ConfigNode, section, setting
from verl.config.schema.tree import AMOUNT


@dataclass(frozen=True)
class FusedKernelConfig(ConfigNode):
    """How the fused LM head is computed."""

    impl_backend: str = setting("torch", "torch (tiles, any device) or triton (CUDA)", choices=("torch", "triton"))


@dataclass(frozen=True)
class TiledMLPConfig(ConfigNode):
    """The MLP computed in tiles of tokens, for less memory."""

    enabled: bool = setting(
        False, "compute dense MLPs in tiles of tokens and recompute them in the backward pass, to save memory"
    )
    num_shards: int = setting(4, "number of tiles")


@dataclass(frozen=True)
class MegatronLoraConfig(ConfigNode):
    """Adapters as Megatron's users spell them; with a rank they become `lora_rank` and its neighbours."""

    type: str = setting(
        "lora",
        "kind of adapter: lora and canonical_lora mean the same: each Hugging Face weight has its own factors",
        choices=("lora", "canonical_lora", "dora", "vlm_lora"),
    )
    rank: int = setting(0, "another spelling of lora_rank; 0: nothing else here but merge counts")
    alpha: int = setting(32, "another spelling of lora_alpha")
    target_modules: list = setting(
        ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"],
        "target_modules under Megatron-Core's names; all four: all-linear",
    )
    exclude_modules: list = setting([], "exclude_modules under Megatron-Core's names")
    lora_A_init_method: str = setting(
        "xavier",
        "how the first factor is drawn; always kaiming, as peft draws it",
        choices=("xavier", "kaiming", "normal", "uniform"),
    )
    adapter_path: str | None = setting(None, "another spelling of lora_adapter_path", path=True)
    merge: bool = setting(
        False,
        "policy: send the sampler full weights with the adapter merged in, not the adapter alone",
    )


@dataclass(frozen=True)
class HFModelConfig(ConfigNode):
    """A Hugging Face model and its tokenizer."""

    path: str = setting("~/models/deepseek-llm-7b-chat", "model folder, or a name on the hub", path=True)
    hf_config_path: str | None = setting(None, "folder to read the model's config.json from; null: path", path=True)
    tokenizer_path: str | None = setting(None, "folder or hub name of the tokenizer; null: path", path=True)
    use_shm: bool = setting(False, "copy the weights to shared memory before loading")
    trust_remote_code: bool = setting(False, "run Python code that comes with the model or its tokenizer")
    custom_chat_template: str | None = setting(None, "chat template (Jinja text) instead of the tokenizer's own")
    external_lib: str | None = setting(
        None, "comma-separated modules to import before loading the model; they may register model classes"
    )
    override_config: dict = setting(
        {}, "entries of the model's config.json to override, e.g. {attn_implementation: sdpa}"
    )
    enable_gradient_checkpointing: bool | None = setting(
        None,
        "recompute activations in the backward pass, to save memory; null: on an accelerator only",
        upstream=True,
    )
    enable_activation_offload: bool = setting(False, "keep activations in host memory until the backward pass")
    use_remove_padding: bool = setting(
        True,
        "pack rows without padding; a notice says if a model cannot be packed",
    )
    lora_rank: int = setting(0, "LoRA rank; 0: train all weights", within=AMOUNT)
    lora_alpha: int = setting(16, "LoRA alpha; the adapter is scaled by alpha / rank")
    target_modules: str | list = setting("all-linear", "modules that get an adapter: all-linear, or a list of names")
    exclude_modules: list | str | None = setting(None, "modules without an adapter")
    target_parameters: list | None = setting(
        None,
        "weights outside linear modules that get an adapter, such as mlp.experts.gate_up_proj of a mixture; null: none "
        "by name",
    )
    lora_adapter_path: str | None = setting(
        None, "folder of an adapter to start from; its rank, scale and modules apply", path=True
    )
    lora_base_quantization: str | None = setting(
        None,
        "nf4: keep the linear layers of the frozen base under an adapter in 4 bits (QLoRA); null: as they are loaded",
        choices=("nf4",),
    )
    use_liger: bool = setting(
        False, "use Liger kernels for norms, rotary embeddings and MLPs; needs a GPU and liger-kernel"
    )
    use_fused_kernels: bool = setting(
        False, "compute log-probs and entropy without materialising the logits, to save memory"
    )
    fused_kernel_options: FusedKernelConfig = section(FusedKernelConfig)
    tiled_mlp: TiledMLPConfig = section(TiledMLPConfig)
    lora: MegatronLoraConfig = section(MegatronLoraConfig)
    model_type: str = setting(
        "language_model",
        "language_model, or value_model for critics",
        no_effect="the role decides the model class",
    )
    load_tokenizer: bool = setting(
        True, "load the tokenizer with the model", no_effect="the role decides the model class"
    )
