"""TorchTitan's configuration of a model of transformers: its layers, how ranks share them, names of weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from verl.config.schema.torchtitan import FAMILIES
from verl.engines.torchtitan.modules import parts
from verl.engines.torchtitan.package import import_torchtitan
from verl.engines.torchtitan.parallel import TitanSizes
from verl.errors import NotBuiltError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_EXPERTS = "moe.routed_experts.inner_experts"


def titan_family(config: PretrainedConfig) -> str:
    """TorchTitan's package for a model, by the configuration of transformers.

    Raises:
        NotBuiltError: there is none, or the model is one of a kind that the package does not compute.
    """
    odd = None
    if config.model_type not in FAMILIES:
        odd = f"a model of the type {config.model_type!r}"
    elif config.hidden_act != "silu":
        odd = f"the activation {config.hidden_act!r}"
    elif any(getattr(config, name, False) for name in ("attention_bias", "mlp_bias")):
        odd = "a bias of linear layers"
    elif getattr(config, "use_sliding_window", False):
        odd = "a sliding window"
    elif getattr(config, "attention_dropout", 0):
        odd = "dropout of attention weights"
    if odd is not None:
        raise NotBuiltError(
            f"{odd} is not built yet on TorchTitan's models",
            key="strategy",
            got="torchtitan",
            allowed=f"models of the types {', '.join(FAMILIES)}",
            fix="Set strategy=fsdp2.",
        )
    return FAMILIES[config.model_type]


def titan_config(config: PretrainedConfig, rotary: Any, device: str) -> Any:
    """TorchTitan's configuration of a model of transformers.

    Args:
        rotary: the model's own rotary embedding, whose frequencies are taken over.
    """
    family = titan_family(config)
    package, modules = import_torchtitan(f"models.{family}", device), parts(device)
    common = import_torchtitan("models.common", device)
    helpers = import_torchtitan("models.common.config_utils", device)
    norms = import_torchtitan("models.common.nn_modules", device).RMSNorm
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    undrawn = {"weight": _as_it_is}

    def norm(width: int) -> Any:
        return norms.Config(normalized_shape=width, eps=config.rms_norm_eps, param_init=undrawn)

    rope = modules.rope.Config(
        dim=head_dim,
        max_seq_len=config.max_position_embeddings,
        frequencies=tuple(rotary.inv_freq.float().tolist()),
        attention_scaling=float(rotary.attention_scaling),
    )
    block = package.model.Qwen3TransformerBlock if family == "qwen3" else package.model.Llama3TransformerBlock
    layers = [
        block.Config(
            attention_norm=norm(config.hidden_size),
            ffn_norm=norm(config.hidden_size),
            attention=helpers.make_gqa_config(
                dim=config.hidden_size,
                n_heads=config.num_attention_heads,
                n_kv_heads=config.num_key_value_heads,
                head_dim=head_dim,
                wqkv_param_init=undrawn,
                wo_param_init=undrawn,
                inner_attention=modules.attention.Config(),
                rope=rope,
                qk_norm=norm(head_dim) if family == "qwen3" else None,
            ),
            feed_forward=None
            if has_experts(config, number)
            else helpers.make_ffn_config(
                dim=config.hidden_size,
                hidden_dim=config.intermediate_size,
                w1_param_init=undrawn,
                w2w3_param_init=undrawn,
            ),
            moe=_mixture(config, device) if has_experts(config, number) else None,
        )
        for number in range(config.num_hidden_layers)
    ]
    model = package.model.Qwen3Model if family == "qwen3" else package.model.Llama3Model
    return model.Config(
        dim=config.hidden_size,
        vocab_size=config.vocab_size,
        enable_weight_tying=bool(config.tie_word_embeddings),
        tok_embeddings=common.Embedding.Config(
            num_embeddings=config.vocab_size, embedding_dim=config.hidden_size, param_init=undrawn
        ),
        norm=norm(config.hidden_size),
        lm_head=common.Linear.Config(
            in_features=config.hidden_size, out_features=config.vocab_size, param_init=undrawn
        ),
        layers=layers,
    )


def has_experts(config: PretrainedConfig, layer: int) -> bool:
    """Whether a layer of a model is a mixture."""
    experts = getattr(config, "num_experts", 0) or 0
    return bool(experts and layer not in config.mlp_only_layers and (layer + 1) % config.decoder_sparse_step == 0)


def _as_it_is(weight: Any) -> None:
    """TorchTitan wants to know how weights are drawn; ours are read, so they stay what the memory holds."""


def _mixture(config: PretrainedConfig, device: str) -> Any:
    """The experts of a layer and their router, whose choice no bias and no loss of its own evens out."""
    helpers = import_torchtitan("models.common.config_utils", device)
    experts = parts(device).experts.Config(
        dim=config.hidden_size,
        hidden_dim=config.moe_intermediate_size,
        num_experts=config.num_experts,
        param_init={"gate_up_proj": _as_it_is, "down_proj": _as_it_is},
    )
    exchange = helpers.make_token_dispatcher_config(
        num_experts=config.num_experts, top_k=config.num_experts_per_tok, comm_backend="standard"
    )
    return helpers.make_moe_config(
        num_experts=config.num_experts,
        router=helpers.make_router_config(
            dim=config.hidden_size,
            num_experts=config.num_experts,
            gate_param_init={"weight": _as_it_is},
            top_k=config.num_experts_per_tok,
            score_func="softmax",
            route_norm=bool(config.norm_topk_prob),
        ),
        routed_experts=helpers.RoutedExperts.Config(inner_experts=experts, token_dispatcher=exchange),
        load_balance_coeff=None,
    )


def say_how_to_share(config: PretrainedConfig, family: str, sizes: TitanSizes, device: str) -> None:
    """Say how each module is shared by tensor-parallel ranks, which keep parts of a sequence between them.

    By the function that the configuration's own method calls; that one also imports TorchTitan's trainer.
    """
    module = import_torchtitan(f"models.{family}.sharding", device)
    if family == "llama3":
        module.set_llama3_sharding_config(config, enable_sp=True)
        return
    module.set_qwen3_sharding_config(config, enable_sp=True, enable_ep=sizes.expert > 1)
    expert_placement = import_torchtitan("models.common.moe_sharding", device).expert_param_placement_sparse
    placed = import_torchtitan("protocols.sharding", device).ShardingConfig
    for layer in config.layers:
        if layer.moe is not None:  # under the names of our stacked experts
            names = ("gate_up_proj", "down_proj")
            shared = placed(state_shardings={name: expert_placement() for name in names})
            layer.moe.routed_experts.inner_experts.sharding_config = shared


def names_in_titan(config: PretrainedConfig, theirs: PretrainedConfig, device: str) -> dict[str, str]:
    """Names in TorchTitan -> names in transformers, by TorchTitan's own adapter of the family.

    Args:
        config: TorchTitan's.
        theirs: the configuration of transformers.
    """
    family = titan_family(theirs)
    adapters = import_torchtitan(f"models.{family}.state_dict_adapter", device)
    adapter = adapters.Qwen3StateDictAdapter if family == "qwen3" else adapters.Llama3StateDictAdapter
    names = {}
    for other, ours in adapter(config, None).from_hf_map.items():
        if ours is None or other.count("{}") == 2:  # experts of a mixture have two numbers there, and are stacked here
            continue
        for number in range(len(config.layers)) if "{}" in ours else (0,):
            names[ours.format(number)] = other.format(number)
    for number in range(len(config.layers)):
        for name in ("gate_up_proj", "down_proj"):
            names[f"layers.{number}.{_EXPERTS}.{name}"] = f"model.layers.{number}.mlp.experts.{name}"
    return names
