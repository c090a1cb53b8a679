"""A model of transformers as TorchTitan builds and shards it, under the names that its weights have in files."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from verl.config.torchtitan import FAMILIES
from verl.engines.torchtitan.modules import parts
from verl.engines.torchtitan.package import import_torchtitan
from verl.engines.torchtitan.parallel import TitanSizes
from verl.errors import NotBuiltError


class TitanModel(nn.Module):
    """A decoder of TorchTitan, with what the rest of the library asks a model of transformers for.

    Args:
        decoder: sharded.
        names: its weights' names -> those of ``blueprint``.
        blueprint: the model of transformers, without values.
    """

    def __init__(self, decoder: nn.Module, names: dict[str, str], blueprint: Any):
        super().__init__()
        self.decoder = decoder
        self.config = blueprint.config
        self.generation_config = getattr(blueprint, "generation_config", None)
        self._names, self._order = names, list(blueprint.state_dict())

    def can_generate(self) -> bool:
        """It is a language model."""
        return True

    def get_output_embeddings(self) -> nn.Module:
        """The language-model head."""
        head = self.decoder.lm_head
        assert isinstance(head, nn.Module)
        return head

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Under the names and in the order of transformers."""
        own = {self._names[name]: tensor for name, tensor in self.decoder.state_dict(*args, **kwargs).items()}
        return {name: own[name] for name in self._order}

    def forward(self, input_ids: Tensor, position_ids: Tensor, attention_plan: Any = None) -> Any:
        """(b, l) tokens -> ``logits``."""
        logits = self.decoder(input_ids, positions=position_ids, attention_masks=attention_plan)
        return SimpleNamespace(logits=logits)


def family_of(config: Any) -> str:
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
            allowed=f"dense models of the types {', '.join(FAMILIES)}",
            fix="Set strategy=fsdp2.",
        )
    return FAMILIES[config.model_type]


def titan_config(config: Any, rotary: Any, device: str) -> Any:
    """TorchTitan's configuration of a model of transformers.

    Args:
        rotary: the model's own rotary embedding, whose frequencies are taken over.
    """
    family = family_of(config)
    package, own = import_torchtitan(f"models.{family}", device), parts(device)
    common = import_torchtitan("models.common", device)
    helpers = import_torchtitan("models.common.config_utils", device)
    norms = import_torchtitan("models.common.nn_modules", device).RMSNorm
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    # TorchTitan wants to know how weights are drawn; ours are read, so they stay what the memory holds.
    undrawn = {"weight": lambda _: None}

    def norm(width: int) -> Any:
        return norms.Config(normalized_shape=width, eps=config.rms_norm_eps, param_init=undrawn)

    rope = own.rope.Config(
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
                inner_attention=own.attention.Config(),
                rope=rope,
                qk_norm=norm(head_dim) if family == "qwen3" else None,
            ),
            feed_forward=helpers.make_ffn_config(
                dim=config.hidden_size,
                hidden_dim=config.intermediate_size,
                w1_param_init=undrawn,
                w2w3_param_init=undrawn,
            ),
        )
        for _ in range(config.num_hidden_layers)
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


def build(
    blueprint: Any, rotary: Any, sizes: TitanSizes, device: str, dtype: torch.dtype, home: str, **choices: Any
) -> TitanModel:
    """The sharded model, with memory and without values.

    Args:
        blueprint: the model of transformers on the ``meta`` device.
        rotary: as for `titan_config`.
        dtype: of the computation.
        home: where the pieces live.
        choices: ``reshard`` (always, never, default), ``offload``, ``recompute``, ``compiles``.
    """
    config = titan_config(blueprint.config, rotary, device)
    settings = import_torchtitan("config", device)
    import_torchtitan("distributed.utils", device).set_spmd_backend(sizes.parallelism.spmd_backend)
    parallelism = dataclasses.replace(sizes.parallelism, fsdp_reshard_after_forward=choices["reshard"])
    name = {torch.float32: "float32", torch.bfloat16: "bfloat16"}[dtype]
    training = settings.TrainingConfig(mixed_precision_param=name, enable_cpu_offload=choices["offload"])
    _shard(config, family_of(blueprint.config), device)
    names = _names(config, blueprint, device)
    with torch.device("meta"):
        decoder = config.build()
    _keep_tied(decoder)
    package = import_torchtitan(f"models.{family_of(blueprint.config)}", device)
    parallelize = package.parallelize_qwen3 if hasattr(package, "parallelize_qwen3") else package.parallelize_llama
    recompute = import_torchtitan("distributed.activation_checkpoint", device).FullAC.Config()
    parallelize(
        decoder,
        parallel_dims=sizes.dims,
        training=training,
        parallelism=parallelism,
        compile_config=settings.CompileConfig(enable=choices["compiles"]),
        ac_config=recompute if choices["recompute"] else None,
        dump_folder="",
    )
    for module in decoder.modules():
        if isinstance(module, FSDPModule):  # losses are scaled for the mean over data-parallel ranks
            module.set_gradient_divide_factor(float(sizes.data))
            if device == "cpu":
                module.set_force_sum_reduction_for_comms(True)  # Gloo cannot multiply while it sums
    decoder.to_empty(device=home)
    decoder.init_states(buffer_device=None)
    return TitanModel(decoder, names, blueprint)


def _keep_tied(decoder: Any) -> None:
    """Tie embedding and head again once tensor-parallel ranks have their parts of each, which makes two of them.

    Before FSDP2 sees them: of two parameters tied later it keeps two pieces, and one of them misses the updates.
    """
    share = decoder.parallelize

    def parallelize(dims: Any) -> None:
        share(dims)
        if decoder.enable_weight_tying:
            decoder.tok_embeddings.weight = decoder.lm_head.weight

    decoder.parallelize = parallelize


def _shard(config: Any, family: str, device: str) -> None:
    """Say how each module is shared by tensor-parallel ranks, which keep parts of a sequence between them.

    By the function that the configuration's own method calls; that one also imports TorchTitan's trainer.
    """
    module = import_torchtitan(f"models.{family}.sharding", device)
    if family == "qwen3":
        module.set_qwen3_sharding_config(config, enable_sp=True, enable_ep=False)
    else:
        module.set_llama3_sharding_config(config, enable_sp=True)


def _names(config: Any, blueprint: Any, device: str) -> dict[str, str]:
    """Names in TorchTitan -> names in transformers, by TorchTitan's own adapter of the family."""
    family = family_of(blueprint.config)
    adapters = import_torchtitan(f"models.{family}.state_dict_adapter", device)
    adapter = adapters.Qwen3StateDictAdapter if family == "qwen3" else adapters.Llama3StateDictAdapter
    names = {}
    for theirs, own in adapter(config, None).from_hf_map.items():
        if own is None:
            continue
        for number in range(len(config.layers)) if "{}" in own else (0,):
            if theirs.count("{}") < 2:  # experts of mixtures have two numbers
                names[own.format(number)] = theirs.format(number)
    return names


@contextmanager
def selected(head: nn.Module, flat_index: Tensor) -> Iterator[None]:
    """As `verl.models.head.select_positions`, also of hidden states that tensor-parallel ranks have alike."""

    def keep(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        hidden = inputs[0]
        local = hidden.to_local() if isinstance(hidden, DTensor) else hidden
        chosen = local.flatten(0, -2).index_select(0, flat_index).unsqueeze(0)
        if isinstance(hidden, DTensor):
            chosen = DTensor.from_local(chosen, hidden.device_mesh, hidden.placements, run_check=False)
        return (chosen, *inputs[1:])

    handle = head.register_forward_pre_hook(keep)
    try:
        yield
    finally:
        handle.remove()
