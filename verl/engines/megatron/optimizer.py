"""The optimizer over this rank's weights; distributed, each data-parallel rank keeps a part of its state.

Full weights are assigned to ranks (largest first, to the rank with the least), stepped there and broadcast. So only
one rank holds the moments of a weight, and the numbers are those of every rank stepping everything.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from verl.checkpoint.state import EngineState, StateSection
from verl.config.rules.optimizers import for_megatron
from verl.config.schema.role import OptimizerConfig
from verl.distributed import Ranks
from verl.engines.megatron.gradients import Gradients
from verl.engines.megatron.matrices import build_sharded_muon
from verl.engines.megatron.parallel import ParallelGroups
from verl.engines.megatron.weights import Bound, WeightTable, part_of, part_of_halves
from verl.engines.muon import builds_muon
from verl.engines.optimizer import (
    check_class,
    entry_named,
    optimizer_state,
    state_device,
    take_group_options,
)
from verl.engines.sharded_optimizer import build_flat_optimizer
from verl.models.megatron import HALVES
from verl.protocol.sharding import ShardSpec

__all__ = ["EngineState", "ShardedState"]
ALIASES = {"adam": "AdamW", "sgd": "SGD"}
"""Megatron's names, which mean the decoupled weight decay too."""


class ShardedState:
    """The optimizer of a stage, and its state under Hugging Face names.

    Args:
        shares: whether data-parallel ranks share the state.

    Raises:
        ConfigError: an optimizer that looks at a weight as a whole (Adafactor), of which a rank has a part.
    """

    def __init__(
        self,
        table: WeightTable,
        gradients: Gradients,
        groups: ParallelGroups,
        optim: OptimizerConfig,
        device: str,
        shares: bool,
    ):
        self.table, self.gradients = table, gradients
        self.owner = dict(_owners(table.trained, groups, shares))
        mine = [b for b in table.trained if self._is_mine(b)]
        self.parameters = [gradients.masters[b.parameter] for b in mine]
        optim = for_megatron(optim)
        if builds_muon(optim):
            self.optimizer: Optimizer = build_sharded_muon(table, mine, gradients.masters, optim)
        else:  # a rank that owns no weight still has learning rates and a state to report
            self.optimizer = build_flat_optimizer(self.parameters or [nn.Parameter(torch.zeros(0))], optim, device)
        self.optimizer.register_step_post_hook(self._after_step)

    def _is_mine(self, bound: Bound) -> bool:
        ranks, owner = self.owner[bound.slot.ours]
        return ranks.rank == owner

    @torch.no_grad()
    def _after_step(self, *_: Any) -> None:
        """Collective: the ranks that share a weight, in the order of the table, which is that of all of them."""
        for bound in self.table.trained:
            ranks, owner = self.owner[bound.slot.ours]
            if ranks.size > 1 and owner >= 0:
                torch.distributed.broadcast(
                    self.gradients.masters[bound.parameter].data, group=ranks.group, group_src=owner
                )
        self.gradients.spread()

    # ---- state -------------------------------------------------------------------------------------------------

    def scalars(self) -> dict[str, Any]:
        """What of the state is no tensor."""
        return optimizer_state(self.optimizer, _Anonymous())[1]

    def boxes(self) -> Iterator[tuple[str, str, tuple[ShardSpec, Tensor]]]:
        """Of every tensor of the state what this rank holds: name of the weight, key, box."""
        for bound in self.table.trained:
            for key, entry in self.optimizer.state.get(self.gradients.masters[bound.parameter], {}).items():
                for name in bound.slot.theirs if isinstance(entry, Tensor) else ():
                    if entry.dim() == 0:
                        yield name, key, (ShardSpec.of(entry), entry)
                    else:
                        yield name, key, self.table.box(name, self.table.piece(name, lambda _, entry=entry: entry))  # type: ignore[misc]

    @torch.no_grad()
    def load(self, saved: StateSection, scalars: Mapping[str, Any], names: Mapping[str, str]) -> None:
        """Continue from a state under Hugging Face names, of which this rank reads what it keeps.

        Args:
            names: of a weight -> that under which its state is saved, where the two differ.
        """
        check_class(self.optimizer, scalars)
        by_saved = {names.get(name, name): name for name in self.table.shapes}
        keys: dict[str, list[str]] = {}
        for full_name in saved:
            name, _, key = full_name.rpartition("/")
            keys.setdefault(entry_named(by_saved, name), []).append(key)
        self.optimizer.state.clear()
        for bound in self.table.trained:
            if self._is_mine(bound):
                for key in keys.get(bound.slot.theirs[0], []):
                    self._put(bound, key, saved, names)
        take_group_options(self.optimizer, scalars)

    def _put(self, bound: Bound, key: str, saved: StateSection, names: Mapping[str, str]) -> None:
        def full(name: str) -> str:
            return f"{names.get(name, name)}/{key}"

        master = self.gradients.masters[bound.parameter]
        device, first = state_device(key, master, self.optimizer), full(bound.slot.theirs[0])
        if not saved.shape(first):
            value = saved[first].clone()
        else:
            value = torch.zeros_like(master)
            read = part_of_halves if bound.slot.form == HALVES else part_of
            self.table.put(bound, value, lambda name, *span: read(saved, full(name), *span))
        self.optimizer.state.setdefault(master, {})[key] = value.to(device)


class _Anonymous(dict):  # type: ignore[type-arg]
    """Names that nobody reads: only the rest of the state is used."""

    def __missing__(self, key: object) -> str:
        return ""


def _owners(bound: list[Bound], groups: ParallelGroups, shares: bool) -> Iterator[tuple[str, tuple[Ranks, int]]]:
    """Megatron-Core's name -> the ranks that hold the same weight, and which of them steps it.

    Without sharing every rank steps its own copy, and its number is its own.
    """
    loads = {False: [0] * groups.data.size, True: [0] * groups.expert_data.size}
    for b in sorted(bound, key=lambda b: (-b.parameter.numel(), b.slot.ours)):
        ranks = groups.expert_data if b.expert else groups.data
        if not shares or ranks.size == 1:
            yield b.slot.ours, (Ranks(), 0)
            continue
        load = loads[b.expert]
        owner = min(range(len(load)), key=load.__getitem__)
        load[owner] += b.parameter.numel()
        yield b.slot.ours, (ranks, owner)


def optimizer_section(optim: OptimizerConfig) -> OptimizerConfig:
    """The section with Megatron's names of optimizers as torch has them."""
    from verl.config import replace

    return replace(optim, optimizer=ALIASES.get(optim.optimizer, optim.optimizer))


__all__ += ["Optimizer", "optimizer_section"]
