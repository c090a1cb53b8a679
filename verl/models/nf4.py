"""The frozen base under an adapter in 4 bits: QLoRA's NormalFloat (Dettmers et al. 2023, arXiv 2305.14314, section 3).

A weight is a row of blocks of 64 numbers. Each number is the nearest of 16 levels, the quantiles of a normal
distribution, times the largest magnitude of its block, which is kept in float32: 4.5 bits a weight. bitsandbytes rounds
and restores. A layer restores its weight for each product and keeps nothing of it: the policy is exactly the one with
the rounded weights, which `export_weights` gives, and which a sampler has to be sent.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from verl.device import AutogradContext
from verl.errors import CheckpointError, ConfigError, ModelError
from verl.json_text import read_json
from verl.metrics import log

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NAME, KEY = "nf4", "lora_base_quantization"
BLOCK = 64
RECORD = "base_quantization.json"
"""In an adapter's folder: how the base was rounded that the adapter was trained on."""


class NF4Linear(nn.Module):
    """A frozen linear layer, x (..., in) -> (..., out), whose weight (out, in) is in 4 bits.

    Args:
        weight: (out, in), any float dtype; it is rounded in float32.
        bias: (out,) or None; kept as it is.
    """

    packed: Tensor
    """uint8, two codes a byte."""
    largest: Tensor
    """float32, the largest magnitude of each block."""

    def __init__(self, weight: Tensor, bias: nn.Parameter | None = None):
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.dtype = weight.dtype
        packed, state = _functional().quantize_4bit(weight.detach().float(), blocksize=BLOCK, quant_type=NAME)
        # Neither is a weight under a name of the files: those are what `restored` gives.
        self.register_buffer("packed", packed, persistent=False)
        self.register_buffer("largest", state.absmax, persistent=False)
        self.register_buffer("levels", state.code, persistent=False)
        self.bias = bias

    def restored(self) -> Tensor:
        """The weight (out, in) that the layer multiplies with, in the dtype of the one that was rounded."""
        functional = _functional()
        state = functional.QuantState(
            absmax=self.largest,
            shape=torch.Size((self.out_features, self.in_features)),
            code=self.levels,
            blocksize=BLOCK,
            quant_type=NAME,
            dtype=torch.float32,
        )
        return functional.dequantize_4bit(self.packed, state).to(self.dtype)

    def forward(self, x: Tensor) -> Tensor:
        kind = x.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        return _Product.apply(x.to(dtype), self, None if self.bias is None else self.bias.to(dtype))

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, {NAME}"


class _Product(torch.autograd.Function):
    """x W^T + b; the backward pass restores W again instead of keeping it."""

    @staticmethod
    def forward(ctx: AutogradContext, x: Tensor, layer: NF4Linear, bias: Tensor | None) -> Tensor:
        ctx.layer = layer
        return linear(x, layer.restored().to(x.dtype), bias)

    @staticmethod
    def backward(ctx: AutogradContext, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0] @ ctx.layer.restored().to(grads[0].dtype), None, None


def quantize_frozen(model: PreTrainedModel, weight_of: Callable[[str], Tensor] | None = None) -> None:
    """Put NF4 layers into the place of all frozen linear layers but the head, one after the other.

    Args:
        model: with or without an adapter, whose factors stay as they are.
        weight_of: name in memory -> the values of a weight; None: those that the model has.

    Raises:
        ModelError: no layer is linear; a tied one would be restored from one of its names alone.
    """
    every = inner_linears(model)
    trained = any(p.requires_grad for name, p in model.named_parameters() if ".lora_" in name)
    targets = [(n, m) for n, m in every if not (trained and m.weight.requires_grad)]
    if not targets:
        raise ModelError(f"{type(model).__name__} has no linear layer whose weights could be kept in 4 bits", key=KEY)
    for name, module in targets:
        weight = module.weight.detach() if weight_of is None else weight_of(f"{name}.weight").to(module.weight.dtype)
        if module.bias is not None:
            module.bias.requires_grad_(False)
        owner, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(owner), attribute, NF4Linear(weight, module.bias))
    log.info("%s", size_in_words(model))


def inner_linears(model: PreTrainedModel) -> list[tuple[str, nn.Linear]]:
    """Names and modules of all linear layers but the head and an adapter's factors."""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    every = ((name, m) for name, m in model.named_modules() if isinstance(m, nn.Linear) and ".lora_" not in name)
    return [(name, m) for name, m in every if m is not head]


def nf4_layers(model: nn.Module) -> Iterator[tuple[str, NF4Linear]]:
    """Name of the weight in memory, and its layer."""
    return ((f"{name}.weight", m) for name, m in model.named_modules() if isinstance(m, NF4Linear))


def is_quantized(model: nn.Module) -> bool:
    """Whether `quantize_frozen` was here."""
    return any(True for _ in nf4_layers(model))


def record_of(model: PreTrainedModel) -> dict[str, str]:
    """What a checkpoint says about the base; nothing where it is not quantized."""
    return {KEY: NAME} if isinstance(model, nn.Module) and is_quantized(model) else {}


def check_record(saved: Mapping[str, Any], model: PreTrainedModel) -> None:
    """Raise `CheckpointError` where an adapter was trained on a base that was rounded otherwise than this model."""
    before, now = saved.get(KEY), record_of(model).get(KEY)
    if before != now:
        what = "was trained on a base in 4 bits" if before else "was not trained on a base in 4 bits"
        raise CheckpointError(f"the adapter {what}", key=KEY, got=now, fix=f"Set it to {before or 'null'}.")


def size_in_words(model: nn.Module) -> str:
    """How many bytes a quantized model's linear layers take, and how many they would take unquantized."""
    layers = [layer for _, layer in nf4_layers(model)]
    packed = sum(layer.packed.nbytes + layer.largest.nbytes for layer in layers)
    before = sum(layer.in_features * layer.out_features * layer.dtype.itemsize for layer in layers)
    rest = sum(p.nbytes for p in model.parameters())
    return f"{len(layers)} linear layers in 4 bits: {packed} bytes instead of {before}; {rest} bytes stay as they are"


def write_rounding_record(model: nn.Module, folder: Path) -> None:
    """Say in an adapter's folder how its base was rounded."""
    if is_quantized(model):
        (folder / RECORD).write_text(json.dumps({KEY: NAME, "block_size": BLOCK}, indent=2) + "\n", encoding="utf-8")


def recorded(folder: Path) -> str | None:
    """How the base of the adapter in this folder was rounded; None if it was not.

    Raises:
        ModelError: in a way that this version does not know.
    """
    if not (folder / RECORD).is_file():
        return None
    stored = read_json((folder / RECORD).read_text(encoding="utf-8"))
    if stored != {KEY: NAME, "block_size": BLOCK}:
        raise ModelError("the base of this adapter was rounded in an unknown way", got=str(stored), allowed=NAME)
    return NAME


def _functional() -> Any:
    try:
        import bitsandbytes.functional as functional
    except ImportError as error:
        raise ConfigError("a base in 4 bits needs bitsandbytes", key=KEY, fix="pip install bitsandbytes") from error
    return functional
