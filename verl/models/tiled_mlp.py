"""MLPs computed for a part of the tokens at a time (``model.tiled_mlp``).

Between its matrix products an MLP is several times as wide as the model, and the backward pass wants all of that for
every token. Tokens do not meet in an MLP, so it can be computed tile by tile, keeping nothing but its input and output;
the backward pass computes each tile again. The idea is that of Arctic's long-sequence training (Bekman et al. 2025,
arXiv 2506.13996). Mixtures stay as they are, because the tokens of a step meet at their experts; their shared experts
are tiled.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from verl.errors import ConfigError
from verl.metrics import notice
from verl.models.layers import transformer_layers

KEY = "tiled_mlp"
NAMES = ("mlp", "feed_forward", "shared_expert", "shared_experts")
"""What families call them, in a layer or beside the experts of a mixture."""


class TiledForward:
    """What stands in for the forward pass of an MLP.

    Args:
        mlp: the MLP's forward pass, (..., H) -> (..., H), for each token by itself.
        num_tiles: always that many, empty ones too: where a sharded engine gathers inside of an MLP, every process must
            come as often.
    """

    def __init__(self, mlp: Callable[[Tensor], Tensor], num_tiles: int):
        self.mlp, self.num_tiles = mlp, num_tiles

    @torch.compiler.disable  # tiles have sizes of their own: compiled layers end in front of them
    def __call__(self, hidden: Tensor) -> Tensor:
        tiles = hidden.flatten(0, -2).tensor_split(self.num_tiles)
        return torch.cat([checkpoint(self.mlp, tile, use_reentrant=False) for tile in tiles]).view_as(hidden)


def tile_mlps(model: nn.Module, num_tiles: int) -> int:
    """Let every MLP of a model compute in tiles; returns how many there are.

    Raises:
        ConfigError: fewer than one tile.
    """
    if num_tiles < 1:
        raise ConfigError("an MLP has at least one tile", key=f"{KEY}.num_shards", got=num_tiles)
    modules = mlps(model)
    for module in modules:
        module.forward = TiledForward(module.forward, num_tiles)  # type: ignore[assignment]
    if not modules:
        notice(f"{KEY}.enabled", f"has no effect: {type(model).__name__} has no MLP that computes tokens one by one")
    return len(modules)


def mlps(model: nn.Module) -> list[nn.Module]:
    """The dense MLPs of all layers, by their names: one input, and no experts inside."""
    return [
        module
        for _, layer in transformer_layers(model)
        for name, module in layer.named_modules()
        if name.rpartition(".")[2] in NAMES and not _has_experts(module) and _takes_one(module)
    ]


def _has_experts(module: nn.Module) -> bool:
    return any(name.rpartition(".")[2] in ("experts", "router") for name, _ in module.named_modules())


def _takes_one(module: nn.Module) -> bool:
    needed = [p for p in inspect.signature(module.forward).parameters.values() if p.default is p.empty]
    return len(needed) == 1
