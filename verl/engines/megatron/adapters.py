"""LoRA adapters on Megatron-Core's parallel layers (Hu et al. 2021, arXiv 2106.09685).

What gets an adapter, its first values and its names are peft's on the Hugging Face model: here are its factors, cut as
the layer that they belong to. A layer that holds several Hugging Face weights (query, key and value) has factors for
each. Only the r numbers per token between two factors travel between tensor-parallel ranks.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from verl.engines.megatron.parallel import SECTION, has_transformer_engine, import_megatron
from verl.engines.megatron.stacks import part_name, part_of_stack
from verl.engines.megatron.weights import Bound, Read, Template, WeightTable
from verl.errors import NotBuiltError
from verl.models import lora
from verl.models.hollow import replace_parameters
from verl.models.lora import LoraSettings
from verl.models.megatron import COLUMNS, GATED, HALVES, QKV, ROWS, VALUE_HEAD, WHOLE, Slot, filled
from verl.weight_sync.resharding.model import LAST, LAYER

if TYPE_CHECKING:
    from transformers import PreTrainedModel

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
        complete: whether this rank has all of the layer, and tokens that no peer shares: an expert.
    """

    def __init__(
        self, layer: Any, form: str, rows: list[int], factors: dict[str, Factors], groups: int, complete: bool = False
    ):
        super().__init__()
        self.form, self.rows, self.groups, self.complete = form, rows, groups, complete
        self.factors, self.is_on = nn.ModuleDict(factors), True
        self.shared = bool(layer.sequence_parallel) and not complete
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
        if self.complete:
            return inner
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
        blueprint: PreTrainedModel,
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
        stacks = _stacks(blueprint, base.sizes.expert_tensor)
        self.factors: dict[str, tuple[Factors, int]] = {}
        values = _by_expert(values, stacks, int(base.settings.get("num_moe_experts") or 0))
        self.layers = list(self._attach(blueprint, values, stacks, base, chunks))
        shapes = {name: tuple(tensor.shape) for name, tensor in values.items()}
        self.table = base.for_weights(list(_templates(base, shapes, stacks)), shapes, chunks)
        self.table.fill(lambda name, axis, low, high: values[name].narrow(axis, low, high - low))
        for stage in chunks:
            if getattr(stage, "pre_process", False):  # what is computed again needs an input with a gradient
                stage.embedding.register_forward_hook(_with_gradient)  # type: ignore[union-attr]

    @torch.no_grad()
    def merged(self, name: str, weight: Tensor) -> Tensor:
        """This rank's part of a Hugging Face weight with its adapter's product added."""
        if name not in self.factors:
            return weight
        factors, number = self.factors[name]
        product = factors.product().unflatten(0, (-1, weight.shape[:-1].numel()))[number]
        return (weight.float() + product.view(weight.shape)).to(weight.dtype)

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
        self,
        blueprint: PreTrainedModel,
        values: Mapping[str, Tensor],
        stacks: Mapping[str, str],
        base: WeightTable,
        chunks: list[nn.Module],
    ) -> Iterator[LayerAdapter]:
        owners = {p: module for chunk in chunks for module in chunk.modules() for p in module._parameters.values()}
        for bound in base.trained:
            bound.parameter.requires_grad_(lora.PREFIX + bound.slot.theirs[0] in values)
            if bound.expert:
                yield from self._on_expert(blueprint, values, stacks, owners[bound.parameter], bound)
                continue
            adapted = {str(n): name for n, name in enumerate(bound.slot.theirs) if _disk(name, 0) in values}
            if not adapted:
                continue
            if bound.slot.form == WHOLE:  # a router, or latent attention's projection down
                message = f"an adapter on {bound.slot.theirs[0]} is not built yet on Megatron-Core models"
                raise NotBuiltError(message, key=KEY, fix="Set strategy=fsdp2.")
            pieces = {name: base.piece(name, lambda parameter: parameter) for name in bound.slot.theirs}
            parts = {name: piece.flatten(0, -2) for name, piece in pieces.items()}
            for name in adapted.values():
                (rows, columns), rank = parts[name].shape, values[_disk(name, 0)].shape[0]
                adapted_module: Any = blueprint.get_submodule(name.removesuffix(".weight"))
                scale = adapted_module.scaling[lora.NAME]
                self.factors[name] = Factors(rows, columns, rank, scale, bound.parameter.detach()), 0
            mine = {number: self.factors[name][0] for number, name in adapted.items()}
            layer = owners[bound.parameter]
            rows_of = [len(part) for part in parts.values()]
            yield _put(layer, LayerAdapter(layer, bound.slot.form, rows_of, mine, base.groups_here))

    def _on_expert(
        self,
        blueprint: PreTrainedModel,
        values: Mapping[str, Tensor],
        stacks: Mapping[str, str],
        layer: Any,
        bound: Bound,
    ) -> Iterator[LayerAdapter]:
        """One pair of factors for gate and up, which Hugging Face has in one weight, or one for down."""
        layer_number, expert = (int(number) for number in _NUMBERS.findall(bound.slot.ours))
        owner = stacks.get(_stack(bound.slot.form, layer_number))
        if owner is None:
            return
        rank = values[part_name(lora.PREFIX + owner + _FACTORS[0], expert)].shape[0]
        adapted: Any = blueprint.get_submodule(owner)
        (rows, columns), scale = bound.parameter.shape, adapted.scaling[lora.NAME]
        factors = Factors(rows, columns, rank, scale, bound.parameter.detach())
        self.factors |= {name: (factors, number) for number, name in enumerate(bound.slot.theirs)}
        yield _put(layer, LayerAdapter(layer, bound.slot.form, [rows], {"0": factors}, 1, complete=True))


_NUMBERS = re.compile(r"(?<=\.)\d+(?=\.)")
_STACKS = {GATED: "gate_up_proj", COLUMNS: "down_proj"}


def _stack(form: str, layer: int | str) -> str:
    """The weight in which transformers keeps those of a layer's experts."""
    return f"model.layers.{layer}.mlp.experts.{_STACKS[form]}"


def _stacks(blueprint: PreTrainedModel, ranks: int) -> dict[str, str]:
    """Stacked weight of experts -> the module of peft that adapts it.

    Args:
        ranks: that share an expert.
    """
    stacks = {lora.adapted_weight(blueprint, owner): owner for owner in lora.adapted_tensors(blueprint)}
    odd = [name for name in stacks if not name.endswith(tuple(f".mlp.experts.{kind}" for kind in _STACKS.values()))]
    if odd:
        message = f"an adapter on {odd[0]} is not built yet on Megatron-Core models"
        raise NotBuiltError(message, key=KEY, fix="Name target_modules and target_parameters without it.")
    if stacks and ranks > 1:
        message = f"an adapter on experts of which {ranks} processes have a part each is not built yet"
        raise NotBuiltError(message, key=KEY, fix=f"Set {SECTION}.expert_tensor_parallel_size=1.")
    return stacks


def _by_expert(values: Mapping[str, Tensor], stacks: Mapping[str, str], count: int) -> dict[str, Tensor]:
    """The first values of factors, those of experts apart."""
    files = {lora.PREFIX + owner + factor for owner in stacks.values() for factor in _FACTORS}
    factors = {name: value for name, value in values.items() if name not in files}
    for name in files:
        factors |= {part_name(name, n): part_of_stack(name, values[name], n, count) for n in range(count)}
    return factors


def _put(layer: Any, adapter: LayerAdapter) -> LayerAdapter:
    layer.add_module("adapter", adapter)
    layer.register_forward_hook(adapter.add)
    return adapter


def _templates(
    base: WeightTable, shapes: Mapping[str, tuple[int, ...]], stacks: Mapping[str, str]
) -> Iterator[Template]:
    """One slot per factor, and those of a new head, which is trained as a whole."""
    yield from (
        (Slot(slot.ours, (lora.PREFIX + slot.theirs[0],)), LAST, ())
        for slot in VALUE_HEAD
        if lora.PREFIX + slot.theirs[0] in shapes
    )
    for slot, place, where in base.templates:
        if place != LAYER:
            continue
        if "{expert}" in slot.ours:
            yield from _of_experts(slot, where, stacks)
            continue
        forms = {COLUMNS: (COLUMNS, WHOLE), HALVES: (WHOLE, HALVES)}.get(slot.form, (WHOLE, ROWS))
        for number, name in enumerate(slot.theirs):
            for factor, form in enumerate(forms):
                ours = slot.ours.removesuffix("weight") + f"adapter.factors.{number}.{'AB'[factor]}"
                adapted = Slot(ours, (_disk(name, factor),), form)
                layers = tuple(layer for layer in where if filled(adapted, layer, 0).theirs[0] in shapes)
                if layers:
                    yield adapted, LAYER, layers


def _of_experts(slot: Slot, where: tuple[int, ...], stacks: Mapping[str, str]) -> Iterator[Template]:
    """The two factors of a weight of experts, in the layers whose experts have an adapter."""
    layers = tuple(layer for layer in where if _stack(slot.form, layer) in stacks)
    if not layers:
        return
    first = stacks[_stack(slot.form, layers[0])]
    owner = first.replace(f"model.layers.{layers[0]}.", "model.layers.{layer}.", 1)
    if any(stacks[_stack(slot.form, layer)] != owner.format(layer=layer) for layer in layers):
        message = "an adapter on other experts' weights in some layers than in others is not built yet on Megatron-Core"
        raise NotBuiltError(message, key=KEY, fix="Adapt the same weights in all layers, or set strategy=fsdp2.")
    for factor, form in enumerate((COLUMNS, WHOLE) if slot.form == COLUMNS else (WHOLE, HALVES)):
        ours = slot.ours.removesuffix("weight") + f"adapter.factors.0.{'AB'[factor]}"
        name = part_name(lora.PREFIX + owner + _FACTORS[factor], "{expert}")
        yield Slot(ours, (name,), form), LAYER, layers


def _disk(name: str, factor: int) -> str:
    """A factor of the module with this weight, as peft calls it in a file."""
    return lora.PREFIX + name.removesuffix(".weight") + _FACTORS[factor]


def _with_gradient(_: nn.Module, __: Any, out: Tensor) -> Tensor:
    return out.requires_grad_() if torch.is_grad_enabled() and out.is_leaf else out


def _hollow(blueprint: PreTrainedModel, head: nn.Module | None, read: Read) -> None:
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


def _check(blueprint: PreTrainedModel) -> None:
    """An adapter to go on from may have dropout."""
    config: Any = blueprint.peft_config[lora.NAME]
    if config.lora_dropout:
        raise NotBuiltError(
            "an adapter with dropout is not built yet on Megatron-Core models",
            key="lora_adapter_path",
            fix="Set strategy=fsdp2.",
        )
