"""Torchao's optimizers, whose moments have 8 or 4 bits per number with one float32 scale per block.

A checkpoint holds what the codes stand for, in float32 (Dettmers et al. 2022, arXiv 2110.02861; Li et al. 2023, arXiv
2309.01507), so it says nothing of how weights were cut. Torchao's own rounding of such numbers does not give them back:
a block whose largest number is negative has another scale the second time. So the scale is looked for that does.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

PACKAGE = "torchao.optim"


def is_low_bit(optimizer: Optimizer) -> bool:
    """Whether it is one of torchao's."""
    return type(optimizer).__module__.startswith(PACKAGE)


def uncompiled_on_host(optimizer: Optimizer) -> AbstractContextManager[Any]:
    """For a step: torchao compiles its arithmetic, which on a host needs a C++ compiler and is left out."""
    on_host = is_low_bit(optimizer) and all(p.device.type == "cpu" for g in optimizer.param_groups for p in g["params"])
    return torch.compiler.set_stance("force_eager") if on_host else nullcontext()


def widened(entry: Tensor) -> Tensor:
    """What a moment stands for, float32 and laid out as it is; any other tensor as it is."""
    local: Any = entry.to_local() if isinstance(entry, DTensor) else entry
    if not hasattr(local, "dequantize") or not hasattr(local, "codes"):
        return entry
    values: Tensor = local.dequantize()
    return _like(entry, values) if isinstance(entry, DTensor) else values


def narrowed(optimizer: Optimizer, parameter: Tensor, key: str, values: Tensor) -> Tensor:
    """A moment that stands for these values, as this optimizer keeps it: bit for bit those that `widened` gave."""
    if not is_low_bit(optimizer) or key == "step":
        return values
    making: Any = optimizer
    made: Tensor = making._new_buffer(parameter, key == "exp_avg")
    local, full = (t.to_local() if isinstance(t, DTensor) else t for t in (made, values))
    local.copy_(full)
    if hasattr(local, "qmap"):
        _restore(local, full)
    return made


@torch.no_grad()
def _restore(moment: Any, values: Tensor) -> None:
    """Give the blocks that rounding has changed a scale and codes that stand for their values exactly, where some do.

    The largest number of a block had the outermost code of its sign: its size over that code is the scale, up to the
    rounding of their product.
    """
    blocks = values.float().reshape(-1, moment.block_size)
    qmap = moment.qmap
    codes = _unpacked(moment).reshape(blocks.shape)
    right = (qmap[codes] * moment.scale[:, None] == blocks).all(1)
    largest = blocks.abs().amax(1)
    for outermost in {float(qmap[0].abs()), float(qmap[-1].abs())} - {0.0}:
        exact = largest / outermost
        up, down = torch.nextafter(exact, exact.new_tensor(torch.inf)), torch.nextafter(exact, exact.new_zeros(()))
        for scale in (exact, up, down):
            if bool(right.all()):
                break
            # A block of zeros is right from the start.
            nearest = _nearest(blocks / scale.clamp(min=torch.finfo(torch.float32).tiny)[:, None], qmap)
            better = ~right & (qmap[nearest] * scale[:, None] == blocks).all(1)
            codes = torch.where(better[:, None], nearest, codes)
            moment.scale[better] = scale[better]
            right |= better
    packed = codes.to(torch.uint8).flatten()
    is_packed = moment.codes.numel() < packed.numel()
    moment.codes.copy_(((packed[::2] << 4) | packed[1::2] if is_packed else packed).view(moment.codes.shape))


def _unpacked(moment: Any) -> Tensor:
    """The codes, one number each; two of 4 bits share a byte."""
    flat = moment.codes.flatten()
    if flat.numel() == moment.numel():
        return flat.long()
    return torch.stack([flat >> 4, flat & 0b1111], dim=-1).flatten().long()


def _nearest(values: Tensor, qmap: Tensor) -> Tensor:
    """The code of the nearest number of a sorted table."""
    above = torch.searchsorted(qmap, values.contiguous()).clamp(1, len(qmap) - 1)
    return torch.where(values - qmap[above - 1] < qmap[above] - values, above - 1, above)


def _like(entry: DTensor, local: Tensor) -> DTensor:
    return DTensor.from_local(
        local, entry.device_mesh, entry.placements, run_check=False, shape=entry.shape, stride=entry.stride()
    )
