"""The optimizer over this rank's weights; distributed, each data-parallel rank keeps a part of its state.

Whole weights are assigned to ranks (largest first, to the rank with the least), stepped there and broadcast. So only
one rank holds the moments of a weight, and the numbers are those of every rank stepping everything.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from verl.checkpoint.state import EngineState
from verl.config.optimizers import for_megatron
from verl.distributed import Ranks
from verl.engines.megatron.gradients import Gradients
from verl.engines.megatron.parallel import ParallelGroups
from verl.engines.megatron.weights import Bound, WeightTable
from verl.engines.optimizer import (
    check_class,
    known,
    optimizer_state,
    state_device,
    take_group_options,
)
from verl.engines.sharded_optimizer import build_flat_optimizer

__all__ = ["EngineState", "ShardedState"]
ALIASES = {"adam": "AdamW", "sgd": "SGD"}
"""Megatron's names, which mean the decoupled weight decay too."""


class ShardedState:
    """The optimizer of a stage, and its state under Hugging Face names.

    Args:
        shares: whether data-parallel ranks share the state.

    Raises:
        ConfigError: an optimizer that looks at a weight as a whole (Adafactor, Muon), of which a rank has a part.
    """

    def __init__(
        self, table: WeightTable, gradients: Gradients, groups: ParallelGroups, optim: Any, device: str, shares: bool
    ):
        self.table, self.gradients = table, gradients
        self.owner = dict(_owners(table.trained, groups, shares))
        mine = [b for b in table.trained if self._is_mine(b)]
        self.parameters = [gradients.masters[b.parameter] for b in mine]
        # A rank that owns no weight still has learning rates and a state to report.
        self.optimizer = build_flat_optimizer(
            self.parameters or [nn.Parameter(torch.zeros(0))], for_megatron(optim), device
        )
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

    def keys(self, ranks: Ranks) -> list[tuple[str, bool]]:
        """Names of the state's tensors on all ranks, and whether each is one number per weight."""
        states = self.optimizer.state.values()
        own = {(key, v.dim() == 0) for entries in states for key, v in entries.items() if _is_tensor(v)}
        return sorted({(key, counts) for answer in ranks.exchange(sorted(own)) for key, counts in answer})

    def tensors(self, key: str) -> Iterator[tuple[Bound, Tensor]]:
        """One tensor of the state for each of this rank's weights; whoever shares it is sent it. Collective."""
        for bound in self.table.trained:
            master = self.gradients.masters[bound.parameter]
            ranks, owner = self.owner[bound.slot.ours]
            entry = self.optimizer.state.get(master, {}).get(key)
            if ranks.size > 1 and owner >= 0:
                count = torch.tensor([0 if entry is None else 1 + (entry.dim() == 0)])
                torch.distributed.broadcast(count, group=ranks.group, group_src=owner)
                if not int(count):
                    continue
                if entry is None:
                    entry = torch.zeros(()) if int(count) == 2 else torch.zeros_like(master)
                else:
                    entry = entry.clone()
                torch.distributed.broadcast(entry, group=ranks.group, group_src=owner)
            if entry is not None:
                yield bound, entry

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor], scalars: Mapping[str, Any], whole: Any) -> None:
        """Continue from a state under Hugging Face names.

        Args:
            tensors: name/key -> tensor; values on rank 0, shapes elsewhere.
            whole: gives every rank the values of one of them. Collective.
        """
        check_class(self.optimizer, scalars)
        by_name = {name: (b, i) for b in self.table.trained for i, name in enumerate(b.slot.theirs)}
        self.optimizer.state.clear()
        waiting: dict[tuple[str, str], dict[str, Tensor]] = {}
        for full_name, tensor in tensors.items():
            values = whole(tensor)
            name, _, key = full_name.rpartition("/")
            known({**self.table.shapes, **dict.fromkeys(by_name)}, name)
            if name not in by_name or not self._is_mine(by_name[name][0]):
                continue
            bound, _ = by_name[name]
            parts = waiting.setdefault((bound.slot.ours, key), {})
            parts[name] = values
            if len(parts) == len(bound.slot.theirs):
                self._put(bound, key, waiting.pop((bound.slot.ours, key)))
        take_group_options(self.optimizer, scalars)

    def _put(self, bound: Bound, key: str, parts: Mapping[str, Tensor]) -> None:
        master = self.gradients.masters[bound.parameter]
        device = state_device(key, master, self.optimizer)
        first = next(iter(parts.values()))
        if first.dim() == 0:
            value = first.clone()
        else:
            value = torch.zeros_like(master)
            self.table.put(bound, value, lambda name, axis, low, high: parts[name].narrow(axis, low, high - low))
        self.optimizer.state.setdefault(master, {})[key] = value.to(device)


class _Anonymous(dict):  # type: ignore[type-arg]
    """Names that nobody reads: only the rest of the state is asked for."""

    def __missing__(self, key: Any) -> str:
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


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def optimizer_section(optim: Any) -> Any:
    """The section with Megatron's names of optimizers as torch has them."""
    from verl.config import replace

    return replace(optim, optimizer=ALIASES.get(optim.optimizer, optim.optimizer))


__all__ += ["Optimizer", "optimizer_section"]
