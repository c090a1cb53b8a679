"""The state of an optimizer over pieces of flat weights, as whole tensors under the weights' names, and back.

Such a state is laid out as the weights are, so it is lent to their places and read or written there by name. What is
no tensor of that form (a count of steps) is the same for all weights of a unit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from verl.distributed import Ranks
from verl.engines.optimizer import check_class, known, optimizer_state, state_device, take_group_options

Read = Callable[[], Iterator[dict[str, Tensor]]]
Write = Callable[[Mapping[str, Tensor]], None]


class FlatState:
    """The state of ``optimizer``; every method is collective.

    Args:
        shapes: name -> shape of every weight that is trained.
    """

    def __init__(self, optimizer: Optimizer, shapes: Mapping[str, torch.Size], ranks: Ranks):
        self.optimizer, self.shapes, self.ranks = optimizer, shapes, ranks
        self.parameters = [p for group in optimizer.param_groups for p in group["params"]]

    def save(self, read: Read) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """As `optimizer_state`, the tensors on rank 0.

        Args:
            read: the whole weights by name, some at a time, on rank 0.
        """
        _, scalars = optimizer_state(self.optimizer, {p: str(n) for n, p in enumerate(self.parameters)})
        own, values = dict[str, Any](), dict[str, Any]()
        for number, parameter in enumerate(self.parameters):
            entries = {key: t for key, t in self.optimizer.state.get(parameter, {}).items() if isinstance(t, Tensor)}
            own |= {key: _fact(t) for key, t in entries.items() if t.shape != parameter.shape}
            own |= {key: None for key, t in entries.items() if t.shape == parameter.shape}
            values |= scalars["values"].get(str(number), {})
        facts = self.ranks.exchange([own, values])
        own, values = next((fact for fact in facts if fact[0] or fact[1]), [{}, {}])
        scalars["values"] = dict.fromkeys(self.shapes, values) if values else {}
        tensors: dict[str, Tensor] = {}
        for key, fact in own.items():
            if fact is not None and self.ranks.is_first:
                tensors |= {f"{name}/{key}": _tensor(fact) for name in self.shapes}
            elif fact is None:
                with self._lent(key):
                    found = {name: tensor for unit in read() for name, tensor in unit.items() if name in self.shapes}
                tensors |= {f"{name}/{key}": tensor for name, tensor in found.items()}
        return tensors, scalars

    def load(self, tensors: Mapping[str, Tensor], scalars: Mapping[str, Any], write: Write) -> None:
        """Continue from what `save`, or `optimizer_state` of another engine, gave.

        Args:
            tensors: values on rank 0, names and shapes on all.
            write: puts whole tensors, which rank 0 has, into the weights' places.

        Raises:
            CheckpointError: it is the state of another optimizer, or of other weights.
        """
        check_class(self.optimizer, scalars)
        by_key: dict[str, dict[str, Tensor]] = {}
        for full_name, tensor in tensors.items():
            name, _, key = full_name.rpartition("/")
            known(self.shapes, name)
            by_key.setdefault(key, {})[name] = tensor
        state: dict[nn.Parameter, dict[str, Any]] = {p: {} for p in self.parameters if p.numel()}
        for key, named in by_key.items():
            if all(tensor.shape == self.shapes[name] for name, tensor in named.items()):
                self._take(key, named, state, write)
            else:
                self._take_one(key, named, state)
        values: dict[str, Any] = next(iter(scalars["values"].values()), {})
        self.optimizer.state.clear()
        for parameter, entries in state.items():
            if entries or values:
                self.optimizer.state[parameter] = {**entries, **values}
        take_group_options(self.optimizer, scalars)

    def _take(
        self, key: str, named: dict[str, Tensor], state: dict[nn.Parameter, dict[str, Any]], write: Write
    ) -> None:
        dtype = next(iter(named.values())).dtype
        absent = {name: torch.zeros(shape, dtype=dtype) for name, shape in self.shapes.items() if name not in named}
        with self._lent(None):
            write({**absent, **named})
            for parameter, entries in state.items():
                entries[key] = parameter.detach().clone()

    def _take_one(self, key: str, named: dict[str, Tensor], state: dict[nn.Parameter, dict[str, Any]]) -> None:
        """One value for all: weights that were trained less often than others count as the rest."""
        first = self.ranks.is_first
        fact = self.ranks.from_first(max((_fact(t) for t in named.values()), key=lambda f: f[0]) if first else None)
        for parameter, entries in state.items():
            entries[key] = _tensor(fact).to(state_device(key, parameter, self.optimizer))

    @contextmanager
    @torch.no_grad()
    def _lent(self, key: str | None) -> Iterator[None]:
        """The weights' places hold the optimizer's tensors of this name within the block."""
        kept = [p.detach().clone() for p in self.parameters]
        try:
            for parameter in self.parameters if key is not None else ():
                entry = self.optimizer.state.get(parameter, {}).get(key)
                parameter.zero_() if entry is None else parameter.copy_(entry)
            yield
        finally:
            for parameter, value in zip(self.parameters, kept):
                parameter.copy_(value)


def _fact(tensor: Tensor) -> list[Any]:
    return [tensor.item(), str(tensor.dtype).removeprefix("torch.")]


def _tensor(fact: list[Any]) -> Tensor:
    return torch.tensor(fact[0], dtype=getattr(torch, fact[1]))
