"""The sampler's linear layers in 8 bits (``rollout.quantization``): rounded as weights arrive, restored for a product.

Two formats: ``int8`` with a scale for each output channel, and ``fp8``, float8 e4m3 (Micikevicius et al. 2022, arXiv
2209.05433) with a scale for each block of 128 x 128, the blocks of upstream's fp8 rollouts. The policy that is sampled
from is the one with the rounded weights. Activations are not rounded: the products are those of a plain layer,
so a model with the rounded weights gives the same bits. A layer keeps nothing of what it restores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from verl.errors import ModelError, RolloutError
from verl.metrics import log
from verl.models.nf4 import inner_linears
from verl.models.routers import router_modules

if TYPE_CHECKING:
    from transformers import PreTrainedModel

KEY = "actor_rollout_ref.rollout.quantization"
BLOCK = 128
LARGEST_INT8, LARGEST_FP8 = 127.0, 448.0
SLACK = 1.0 + 1e-4
"""Of a bound on a rounding error, for the rounding of float32 before and after."""
_FP8_IN_FLOAT32 = 0x87F00000 - (1 << 32)
"""The sign bit, and the bits of float32 into which the seven others go."""


@dataclass(frozen=True)
class Format:
    """How a weight (out, in) is kept.

    Args:
        dtype: of a code.
        round: float32 weight -> codes of its shape, float32 scales.
        restore: codes and scales -> float32 weight.
        error: float32 weight and scales -> the largest error of each number if it was rounded to the nearest.
    """

    dtype: torch.dtype
    round: Callable[[Tensor], tuple[Tensor, Tensor]]
    restore: Callable[[Tensor, Tensor], Tensor]
    error: Callable[[Tensor, Tensor], Tensor]


def _round_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    scales = _scale(weight.abs().amax(1, keepdim=True), LARGEST_INT8)
    return (weight / scales).round_().to(torch.int8), scales


def _restore_int8(codes: Tensor, scales: Tensor) -> Tensor:
    return codes.to(torch.float32).mul_(scales)


def _error_int8(weight: Tensor, scales: Tensor) -> Tensor:
    return (scales / 2).expand_as(weight)


def _round_fp8(weight: Tensor) -> tuple[Tensor, Tensor]:
    largest = torch.stack([part.abs().amax(1) for part in weight.split(BLOCK, 1)], 1)  # (out, blocks of columns)
    scales = torch.stack([_scale(part.amax(0), LARGEST_FP8) for part in largest.split(BLOCK)])
    return _times(weight.clone(), 1 / scales).clamp_(-LARGEST_FP8, LARGEST_FP8).to(torch.float8_e4m3fn), scales


def _restore_fp8(codes: Tensor, scales: Tensor) -> Tensor:
    if codes.device.type != "cpu":
        return _times(codes.to(torch.float32), scales)
    # torch converts one number at a time here. The bits of e4m3 shifted to those of float32 are the number itself, its
    # subnormal ones included, but for the distance of the two exponents' biases, 127 - 7.
    wide = codes.view(torch.int8).to(torch.int32).bitwise_left_shift_(20).bitwise_and_(_FP8_IN_FLOAT32)
    return _times(wide.view(torch.float32).mul_(2.0**120), scales)


def _error_fp8(weight: Tensor, scales: Tensor) -> Tensor:
    # Three bits behind the point: half a step is 2**-4 of a number, and 2**-10 of the scale among subnormal ones.
    return torch.maximum(weight.abs() * 2.0**-4, _times(torch.ones_like(weight), scales * 2.0**-10))


def _times(weight: Tensor, scales: Tensor) -> Tensor:
    """Each block times its scale, in place."""
    rows = scales.repeat_interleave(BLOCK, 0)[: len(weight)]
    for number, part in enumerate(weight.split(BLOCK, 1)):
        part.mul_(rows[:, number : number + 1])
    return weight


def _scale(largest: Tensor, most: float) -> Tensor:
    """Of zeros alone: 1."""
    return torch.where(largest > 0, largest / most, torch.ones_like(largest))


FORMATS = {
    "int8": Format(torch.int8, _round_int8, _restore_int8, _error_int8),
    "fp8": Format(torch.float8_e4m3fn, _round_fp8, _restore_fp8, _error_fp8),
}


class QuantizedLinear(nn.Module):
    """A linear layer, x (..., in) -> (..., out), that never trains.

    Args:
        linear: gives weight (out, in) and bias, which stays as it is.
        kind: one of `FORMATS`.
    """

    codes: Tensor
    scales: Tensor

    def __init__(self, linear: nn.Linear, kind: str):
        super().__init__()
        self.out_features, self.in_features = linear.weight.shape
        self.dtype, self.kind, self._format = linear.weight.dtype, kind, FORMATS[kind]
        codes, scales = self._format.round(linear.weight.detach().float())
        self.register_buffer("codes", codes)
        self.register_buffer("scales", scales)
        self.bias = linear.bias

    @torch.no_grad()
    def take(self, name: str, weight: Tensor) -> None:
        """Round a new weight (out, in), and compare what is stored with it.

        Raises:
            RolloutError: it is not finite, or what the layer restores is not the nearest that its format has.
        """
        weight = weight.to(self.codes.device, torch.float32)
        codes, scales = self._format.round(weight)
        self.codes.copy_(codes)
        self.scales.copy_(scales)
        self.check(name, weight)

    def check(self, name: str, weight: Tensor) -> None:
        """Whether the stored weight is this float32 one (out, in), rounded.

        Raises:
            RolloutError: it is not.
        """
        errors = self._format.restore(self.codes, self.scales).sub_(weight).abs_()
        excess = float((errors / (self._format.error(weight, self.scales) * SLACK)).nan_to_num_(nan=torch.inf).amax())
        if not excess <= 1:
            raise RolloutError(
                f"the sampler's {self.kind} weight is not the one that arrived: an error is {excess:.3g} times that of "
                "rounding",
                key=name,
                allowed="at most 1",
                fix="Are the trainer's weights finite? Else this layer's memory is damaged.",
            )

    @property
    def weight(self) -> Tensor:
        """(out, in), restored, in the dtype of the one that was rounded."""
        return self._format.restore(self.codes, self.scales).to(self.dtype)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype), self.bias)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, {self.kind}"


def quantize_sampler(model: PreTrainedModel, kind: str) -> None:
    """Put quantized layers into the place of all linear layers but the head and routers, one after the other.

    Raises:
        ModelError: there are none.
    """
    routers = {id(module) for router in router_modules(model) for module in router.modules()}
    linears = [(name, module) for name, module in inner_linears(model) if id(module) not in routers]
    if not linears:
        raise ModelError(f"{type(model).__name__} has no linear layer whose weights could be kept in {kind}", key=KEY)
    before = sum(module.weight.nbytes for _, module in linears)
    for name, module in linears:
        owner, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(owner), attribute, QuantizedLinear(module, kind))
    after = sum(layer.codes.nbytes + layer.scales.nbytes for _, layer in quantized_layers(model))
    rest = sum(p.nbytes for p in model.parameters())
    log.info(
        "%d linear layers of the sampler in %s: %d bytes instead of %d; %d bytes stay as they are",
        len(linears), kind, after, before, rest,
    )  # fmt: skip


def quantized_layers(model: nn.Module) -> Iterator[tuple[str, QuantizedLinear]]:
    """Name in memory of each weight, and its layer."""
    return ((f"{name}.weight", m) for name, m in model.named_modules() if isinstance(m, QuantizedLinear))


def held_bytes(model: nn.Module) -> int:
    """Memory of all parameters and buffers; what is tied counts once, and what was freed does not."""
    tensors = (*model.parameters(), *model.buffers())
    return sum(tensor.nbytes for tensor in tensors if tensor.untyped_storage().nbytes())
