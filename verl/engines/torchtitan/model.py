"""A model of transformers as TorchTitan builds and shards it, under the names that its weights have in files."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard

from verl.engines.torchtitan.configuration import names_in_titan, say_how_to_share, titan_config, titan_family
from verl.engines.torchtitan.package import import_torchtitan
from verl.engines.torchtitan.parallel import TitanSizes

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class TitanModel(nn.Module):
    """A decoder of TorchTitan, or a stage of one, with what the rest of the library asks a model of transformers for.

    Args:
        decoder: sharded.
        names: its weights' names -> those of ``blueprint``.
        blueprint: the model of transformers, without values.
        sizes: the ranks that share it.
    """

    def __init__(self, decoder: nn.Module, names: dict[str, str], blueprint: PreTrainedModel, sizes: TitanSizes):
        super().__init__()
        self.sizes = sizes
        self.decoder = decoder
        self.config = blueprint.config
        self.generation_config = getattr(blueprint, "generation_config", None)
        self._names, self._order = names, list(blueprint.state_dict())

    def can_generate(self) -> bool:
        """It is a language model."""
        return True

    def get_output_embeddings(self) -> nn.Module:
        """The language-model head; nothing that computes on a stage without it."""
        head = self.decoder.lm_head
        return head if isinstance(head, nn.Module) else nn.Identity()

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Under the names and in the order of transformers."""
        tensors = {self._names[name]: tensor for name, tensor in self.decoder.state_dict(*args, **kwargs).items()}
        return {name: tensors[name] for name in self._order if name in tensors}

    def forward(
        self, input_ids: Tensor, position_ids: Tensor, attention_plan: Any = None, hidden: Tensor | None = None
    ) -> Any:
        """(b, l) tokens -> ``logits``, or on a stage without the head hidden states (b, l, D) under that name.

        Args:
            hidden: (b, l, D) of the stage before; of these and those it returns tensor-parallel ranks have parts of l.
        """
        inputs = input_ids if hidden is None else self._shared(hidden)
        out = self.decoder(inputs, positions=position_ids, attention_masks=attention_plan)
        if self.decoder.lm_head is None and isinstance(out, DTensor):
            out = out.to_local()
        return SimpleNamespace(logits=out)

    def _shared(self, hidden: Tensor) -> Tensor:
        """What a tensor-parallel rank has of hidden states between layers, as a part of all of them."""
        if self.sizes.tensor == 1:
            return hidden
        return DTensor.from_local(hidden, self.sizes.dims.get_mesh("tp"), [Shard(1)], run_check=False)


def build_stage(
    blueprint: PreTrainedModel,
    rotary: nn.Module,
    sizes: TitanSizes,
    stage: int,
    device: str,
    dtype: torch.dtype,
    home: str,
    **choices: Any,
) -> TitanModel:
    """A stage of the sharded model, with memory and without values.

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
    say_how_to_share(config, titan_family(blueprint.config), sizes, device)
    names = names_in_titan(config, blueprint.config, device)
    with torch.device("meta"):
        decoder = config.build()
    _keep_stage(decoder, stage, sizes)
    _keep_tied(decoder)
    package = import_torchtitan(f"models.{titan_family(blueprint.config)}", device)
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
    if device == "cpu":
        for module in decoder.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)  # Gloo cannot multiply while it sums
    decoder.to_empty(device=home)
    decoder.init_states(buffer_device=None)
    return TitanModel(decoder, names, blueprint, sizes)


def _keep_stage(decoder: Any, stage: int, sizes: TitanSizes) -> None:
    """Leave the layers of a stage, with the embedding on the first one and the head on the last."""
    layers = sizes.layers_here(stage, len(decoder.layers))
    for name in list(decoder.layers):
        if int(name) not in layers:
            del decoder.layers[name]
    if stage > 0:
        decoder.tok_embeddings = None
    if stage < sizes.pipeline - 1:
        decoder.norm = decoder.lm_head = None


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


@contextmanager
def select_sharded(head: nn.Module, flat_index: Tensor) -> Iterator[None]:
    """As `verl.models.head.select_positions`, also of hidden states that tensor-parallel ranks have alike."""

    def keep(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        hidden = inputs[0]
        local = hidden.to_local() if isinstance(hidden, DTensor) else hidden
        rows = local.flatten(0, -2).index_select(0, flat_index).unsqueeze(0)
        if isinstance(hidden, DTensor):
            rows = DTensor.from_local(rows, hidden.device_mesh, hidden.placements, run_check=False)
        return (rows, *inputs[1:])

    handle = head.register_forward_pre_hook(keep)
    try:
        yield
    finally:
        handle.remove()
