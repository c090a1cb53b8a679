"""Optimizers over sharded parameters: which support them, tried on a small one before a run starts.

torch computes on a sharded tensor (FSDP2) operation by operation, and not every operation of every optimizer, nor every
fused kernel, has a rule for that. Over pieces of flat weights (Megatron) every operation works, but an optimizer that
looks at a weight as a whole would silently compute something else.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, ones
from torch.optim import Optimizer

from verl.config.schema.role import OptimizerConfig
from verl.distributed.shards import by_mesh
from verl.engines.low_bit import uncompiled_on_host
from verl.engines.optimizer import build_optimizer
from verl.engines.sharding import ShardingLayout
from verl.errors import ConfigError


def build_sharded_optimizer(
    parameters: Iterable[nn.Parameter], optim: OptimizerConfig, layout: ShardingLayout
) -> Optimizer:
    """As `build_optimizer`, fused where sharded tensors have that kernel. Collective.

    Raises:
        ConfigError: this optimizer cannot work on sharded parameters, or its state could not be saved.
    """
    trained = list(parameters)
    dims = sorted({p.dim() for p in trained})
    why = ""
    for fused in (True, False):
        why = _failure(optim, layout, dims, fused)
        if not why:
            groups = [{"params": alike} for alike in by_mesh(trained)]
            return build_optimizer(groups if len(groups) > 1 else trained, optim, layout.home, fused)
    raise _refusal(optim, why)


def build_flat_optimizer(parameters: Iterable[nn.Parameter], optim: OptimizerConfig, device: str) -> Optimizer:
    """As `build_optimizer`, over pieces of flat weights.

    Raises:
        ConfigError: this optimizer does not treat every number for itself, or its state could not be saved.
    """
    try:
        why = _looks_around(optim)
    except (NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        why = str(error).strip().splitlines()[0]
    if why:
        raise _refusal(optim, why)
    return build_optimizer(parameters, optim, device)


def _refusal(optim: OptimizerConfig, why: str) -> ConfigError:
    return ConfigError(
        f"this optimizer does not work on sharded weights: {why}",
        key="optimizer",
        got=optim.optimizer,
        fix="Adam, AdamW, SGD and most others do; strategy=plain trains with any on one device.",
    )


def _looks_around(optim: OptimizerConfig) -> str:
    """Why a matrix and the two halves of its numbers are trained differently; empty if they are not."""
    values, gradient = torch.linspace(-1, 1, 24).view(6, 4), torch.linspace(0.5, -0.25, 24).view(6, 4)
    matrix = nn.Parameter(values.clone())
    halves = [nn.Parameter(piece.clone()) for piece in values.flatten().chunk(2)]
    matrix.grad = gradient
    for piece, grad in zip(halves, gradient.flatten().chunk(2)):
        piece.grad = grad.clone()
    optimizers = [build_optimizer(ps, optim, "cpu", fused=False) for ps in ([matrix], halves)]
    for optimizer in optimizers:
        for _ in range(3):
            optimizer.step()
    if not torch.allclose(matrix.flatten(), torch.cat([piece.detach() for piece in halves]), rtol=1e-5, atol=1e-7):
        return "it looks at a weight as a whole, of which each process has a piece"
    for entry in (e for piece in halves for e in optimizers[1].state[piece].values() if isinstance(e, torch.Tensor)):
        if entry.numel() > 1 and (entry.shape != halves[0].shape or entry.dtype != halves[0].dtype):
            return "its state is not laid out as the weights are"
    return ""


def _failure(optim: OptimizerConfig, layout: ShardingLayout, dims: list[int], fused: bool) -> str:
    """Why two steps on small parameters fail; empty if they do not."""
    probes = [_probe(layout, dim) for dim in dims]
    optimizer = build_optimizer(probes, optim, layout.home, fused)
    for _ in range(2):
        for probe in probes:
            probe.grad = torch.ones_like(probe)
        try:
            with uncompiled_on_host(optimizer):
                optimizer.step()
        except (NotImplementedError, RuntimeError, TypeError) as error:
            return str(error).strip().splitlines()[0]
    for probe in probes:
        for key, entry in optimizer.state[probe].items():
            if isinstance(entry, DTensor) and entry.shape != probe.shape:
                return f"its {key!r} is not laid out as the weights are"
    return ""


def _probe(layout: ShardingLayout, dim: int) -> nn.Parameter:
    mesh = layout.mesh
    shape = (2 * mesh.size(mesh.ndim - 1), *[2] * (dim - 1))
    return nn.Parameter(ones(*shape, device_mesh=mesh, placements=[*[Replicate()] * (mesh.ndim - 1), Shard(0)]))
