"""Optimizers over sharded parameters: which of them can, found out on a small one before a run starts.

torch computes on a sharded tensor operation by operation, and not every operation of every optimizer, nor every fused
kernel, has a rule for that.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, ones
from torch.optim import Optimizer

from verl.engines.optimizer import build_optimizer
from verl.engines.sharding import Layout
from verl.errors import ConfigError


def build_sharded_optimizer(parameters: Iterable[nn.Parameter], optim: Any, layout: Layout) -> Optimizer:
    """As `build_optimizer`, fused where sharded tensors have that kernel. Collective.

    Raises:
        ConfigError: this optimizer cannot work on sharded parameters, or its state could not be saved.
    """
    own = list(parameters)
    dims = sorted({p.dim() for p in own})
    why = ""
    for fused in (True, False):
        why = _failure(optim, layout, dims, fused)
        if not why:
            return build_optimizer(own, optim, layout.home, fused)
    raise ConfigError(
        f"this optimizer does not work on sharded weights: {why}",
        key="optim.optimizer",
        got=optim.optimizer,
        fix="Adam, AdamW, SGD and most others do; strategy=plain trains with any on one device.",
    )


def _failure(optim: Any, layout: Layout, dims: list[int], fused: bool) -> str:
    """Why two steps on small parameters fail; empty if they do not."""
    probes = [_probe(layout, dim) for dim in dims]
    optimizer = build_optimizer(probes, optim, layout.home, fused)
    for _ in range(2):
        for probe in probes:
            probe.grad = torch.ones_like(probe)
        try:
            optimizer.step()
        except (NotImplementedError, RuntimeError, TypeError) as error:
            return str(error).strip().splitlines()[0]
    for probe in probes:
        for key, entry in optimizer.state[probe].items():
            if isinstance(entry, DTensor) and entry.shape != probe.shape:
                return f"its {key!r} is not laid out as the weights are"
    return ""


def _probe(layout: Layout, dim: int) -> nn.Parameter:
    mesh = layout.mesh
    shape = (2 * mesh.size(mesh.ndim - 1), *[2] * (dim - 1))
    return nn.Parameter(ones(*shape, device_mesh=mesh, placements=[*[Replicate()] * (mesh.ndim - 1), Shard(0)]))
