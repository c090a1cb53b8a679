"""LoRA adapters on Megatron-Core's parallel layers (Hu et al. 2021, arXiv 2106.09685).

What gets an adapter, its first values and its names are peft's on the Hugging Face model: here are its factors, cut as
the layer that they belong to. A layer that holds several Hugging Face weights (query, key and value) has factors for
each. Only the r numbers per token between two factors travel between tensor-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from verl.engines.megatron.parallel import has_transformer_engine, import_megatron
from verl.engines.megatron.weights import Bound, Read, Template, WeightTable
from verl.errors import NotBuiltError
from verl.models import lora
from verl.models.hollow import replace_parameters
from verl.models.lora import LoraSettings
from verl.models.megatron import COLUMNS, QKV, ROWS, VALUE_HEAD, WHOLE, Slot, filled
from verl.weight_sync.resharding.model import LAST, LAYER

KEY = "lora_rank"
_FACTORS = (".lora_A.weight", ".lora_B.weight")


class Factors(nn.Module):
    """x -> scale B A x for one Hugging Face module, as far as this rank has it.

    Args:
        rows, columns: of this rank's part of the module's weight.
        rank: inner size.
        scale: of the product.
        like: a tensor of the dtype and on the device of the layer's weight.
    """

    def __init__(self, rows: int, columns: int, rank: int, scale: float, like: Tensor):
        super().__init__()
        self.A, self.B = nn.Parameter(like.new_empty(rank, columns)), nn.Parameter(like.new_empty(rows, rank))
        self.scale = scale

    def product(self) -> Tensor:
        """(rows, columns), float32: what the adapter adds to the weight."""
        return self.scale * (self.B.float() @ self.A.float())


class LayerAdapter(nn.Module):
    """The adapters of one layer.

    Args:
        layer: Megatron-Core's, or one of ours, that maps (l, b, in) to (l, b, out) and a bias.
        form: how tensor parallelism cuts the layer's weight.
        rows: rows that each Hugging Face weight has in it on this rank.
        factors: number of a Hugging Face weight -> its adapter; some may have none.
        groups: KV groups of this rank, where the form is ``qkv``.
    """

    def __init__(self, layer: Any, form: str, rows: list[int], factors: dict[str, Factors], groups: int):
        super().__init__()
        self.form, self.rows, self.groups = form, rows, groups
        self.factors, self.is_on = nn.ModuleDict(factors), True
        self.shared = bool(layer.sequence_parallel)
        for part in factors.values():
            # Each rank sees its part of the tokens there, so the gradients of the parts are summed.
            part.A.sequence_parallel = self.shared and form != COLUMNS  # type: ignore[attr-defined]
            part.B.sequence_parallel = self.shared and form == COLUMNS  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """(l, b, in) to what is added to the layer's output, (l, b, out)."""
        adapters: list[Any] = list(self.factors.values())
        inner = self._between(F.linear(x, torch.cat([each.A for each in adapters])))
        projected = dict(zip(self.factors, inner.split([each.A.shape[0] for each in adapters], dim=-1)))
        parts = [self._part(str(number), rows, projected, inner) for number, rows in enumerate(self.rows)]
        if self.form == QKV:
            return torch.cat([part.unflatten(-1, (self.groups, -1)) for part in parts], dim=-1).flatten(-2)
        return torch.cat(parts, dim=-1) if len(parts) > 1 else parts[0]

    def _part(self, name: str, rows: int, projected: Mapping[str, Tensor], inner: Tensor) -> Tensor:
        if name not in projected:
            return inner.new_zeros(*inner.shape[:-1], rows)
        adapter: Any = self.factors[name]
        return adapter.scale * F.linear(projected[name], adapter.B)

    def _between(self, inner: Tensor) -> Tensor:
        """What the first factors found, as the second ones need it: summed, or of all tokens."""
        mappings = import_megatron("tensor_parallel.mappings")
        if self.form == COLUMNS:
            if self.shared:
                return mappings.reduce_scatter_to_sequence_parallel_region(inner)
            return mappings.reduce_from_tensor_model_parallel_region(inner)
        if self.shared:
            return mappings.gather_from_sequence_parallel_region(inner)
        return mappings.copy_to_tensor_model_parallel_region(inner)

    def add(self, layer: nn.Module, inputs: tuple[Any, ...], out: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
        """The layer's answer with the adapter's; a forward hook."""
        return (out[0] + self(inputs[0]), out[1]) if self.is_on else out


class Adapters:
    """The adapters of a model on this rank; making them freezes everything else.

    Args:
        blueprint: the Hugging Face model without values; it gets an adapter, with the first values.
        base: the table of its weights.
        chunks: this rank's stages.
        read: gives parts of the folder's weights.
        seed: of the first factors.
        head: of the blueprint, where it is a value model's: trained as a whole.

    Attributes:
        table: everything that is trained, under the names of an adapter's file.
        names: name there -> name in memory of peft's model, under which the optimizer's state is saved.

    Raises:
        NotBuiltError: a kind of adapter that peft's file describes and that is not built here.
    """

    def __init__(
        self,
        blueprint: Any,
        settings: LoraSettings,
        base: WeightTable,
        chunks: Iterable[nn.Module],
        read: Read,
        *,
        seed: int,
        head: nn.Module | None,
    ):
        if has_transformer_engine():
            raise NotBuiltError("LoRA beside Transformer Engine's layers is not built yet", key=KEY)
        chunks = list(chunks)
        _hollow(blueprint, head, read)
        lora.add_adapter(blueprint, settings, seed, also=head)
        _check(blueprint)
        names = lora.adapter_names(blueprint)
        tensors = dict(blueprint.named_parameters())
        values = {disk: tensors[name].detach() for name, disk in names.items()}
        self.names = {disk: name for name, disk in names.items()}
        self.factors: dict[str, Factors] = {}
        self.layers = list(self._attach(blueprint, values, base, chunks))
        shapes = {name: tuple(tensor.shape) for name, tensor in values.items()}
        self.table = base.beside(list(_templates(base, shapes)), shapes, chunks)
        self.table.fill(lambda name, axis, low, high: values[name].narrow(axis, low, high - low))
        for stage in chunks:
            if getattr(stage, "pre_process", False):  # what is computed again needs an input with a gradient
                stage.embedding.register_forward_hook(_with_gradient)  # type: ignore[union-attr]

    @torch.no_grad()
    def merged(self, name: str, weight: Tensor) -> Tensor:
        """This rank's part of a Hugging Face weight with its adapter's product added."""
        factors = self.factors.get(name)
        return weight if factors is None else (weight.float() + factors.product()).to(weight.dtype)

    @contextmanager
    def off(self) -> Iterator[None]:
        """Within the block the model is its base."""
        for layer in self.layers:
            layer.is_on = False
        try:
            yield
        finally:
            for layer in self.layers:
                layer.is_on = True

    def _attach(
        self, blueprint: Any, values: Mapping[str, Tensor], base: WeightTable, chunks: list[nn.Module]
    ) -> Iterator[LayerAdapter]:
        owners = {p: module for chunk in chunks for module in chunk.modules() for p in module._parameters.values()}
        for bound in base.trained:
            bound.parameter.requires_grad_(lora.PREFIX + bound.slot.theirs[0] in values)
            adapted = {str(n): name for n, name in enumerate(bound.slot.theirs) if _disk(name, 0) in values}
            if not adapted:
                continue
            if bound.slot.form == WHOLE:  # a router, or latent attention's projection down
                message = f"an adapter on {bound.slot.theirs[0]} is not built yet on Megatron-Core models"
                raise NotBuiltError(message, key=KEY, fix="Set strategy=fsdp2.")
            parts = {name: base.piece(name, lambda parameter: parameter) for name in bound.slot.theirs}
            for name in adapted.values():
                (rows, columns), rank = parts[name].shape, values[_disk(name, 0)].shape[0]
                scale = blueprint.get_submodule(name.removesuffix(".weight")).scaling[lora.NAME]
                self.factors[name] = Factors(rows, columns, rank, scale, bound.parameter.detach())
            mine = {number: self.factors[name] for number, name in adapted.items()}
            yield _put(owners[bound.parameter], bound, [len(part) for part in parts.values()], mine, base)


def _put(layer: Any, bound: Bound, rows: list[int], factors: dict[str, Factors], base: WeightTable) -> LayerAdapter:
    adapter = LayerAdapter(layer, bound.slot.form, rows, factors, base.groups_here)
    layer.add_module("adapter", adapter)
    layer.register_forward_hook(adapter.add)
    return adapter


def _templates(base: WeightTable, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[Template]:
    """One slot per factor, and those of a new head, which is trained as a whole."""
    yield from (
        (Slot(slot.ours, (lora.PREFIX + slot.theirs[0],)), LAST, ())
        for slot in VALUE_HEAD
        if lora.PREFIX + slot.theirs[0] in shapes
    )
    for slot, place, where in base.templates:
        if place != LAYER:
            continue
        forms = (COLUMNS, WHOLE) if slot.form == COLUMNS else (WHOLE, ROWS)
        for number, name in enumerate(slot.theirs):
            for factor, form in enumerate(forms):
                ours = slot.ours.removesuffix("weight") + f"adapter.factors.{number}.{'AB'[factor]}"
                adapted = Slot(ours, (_disk(name, factor),), form)
                layers = tuple(layer for layer in where if filled(adapted, layer, 0).theirs[0] in shapes)
                if layers:
                    yield adapted, LAYER, layers


def _disk(name: str, factor: int) -> str:
    """A factor of the module with this weight, as peft calls it in a file."""
    return lora.PREFIX + name.removesuffix(".weight") + _FACTORS[factor]


def _with_gradient(_: nn.Module, __: Any, out: Tensor) -> Tensor:
    return out.requires_grad_() if torch.is_grad_enabled() and out.is_leaf else out


def _hollow(blueprint: Any, head: nn.Module | None, read: Read) -> None:
    """Give a model without values zeros that need no memory: peft then draws what it draws for one that has them.

    A head is trained as a whole besides, so it gets its values.
    """
    trained = set() if head is None else {id(parameter) for parameter in head.parameters()}

    def make(name: str, old: nn.Parameter) -> nn.Parameter:
        value = torch.zeros((), dtype=old.dtype).expand(old.shape)
        if id(old) in trained:
            value = read(name, 0, 0, old.shape[0]).to(old.dtype)
        return nn.Parameter(value, old.requires_grad)

    replace_parameters(blueprint, make)


def _check(blueprint: Any) -> None:
    """An adapter to go on from may be of a kind that is not two factors alone."""
    if any(".experts." in name for name in lora.adapter_names(blueprint).values()):
        message = "an adapter on experts is not built yet on Megatron-Core models"
        raise NotBuiltError(message, key=KEY, fix="Name target_modules without them, or set strategy=fsdp2.")
    odd = sorted(n for n in lora.adapter_names(blueprint).values() if ".lora_" in n and not n.endswith(_FACTORS))
    dropout = blueprint.peft_config[lora.NAME].lora_dropout
    if odd or dropout:
        raise NotBuiltError(
            f"an adapter with {'dropout' if dropout else odd[0]} is not built yet on Megatron-Core models",
            key="lora_adapter_path",
            fix="Set strategy=fsdp2.",
        )
