"""Linear layers of a model sharded over ranks: transformers says which one is cut in which direction (``tp_plan``).

The plan has a style per module name. Here each style becomes a cut of weights and what is sent at the module's border.
Training (`verl.engines`) and sampling (`verl.rollout.hf`) cut models in the same way.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from verl.distributed import Ranks
from verl.distributed.axis_sharding import AxisSharding
from verl.distributed.tensor_parallel import CopiedOnce, copied, reduced, scaled_backwards
from verl.errors import ConfigError, NotBuiltError

HEAD = "colwise_gather_output"
PARTIAL = "replicated_with_grad_allreduce"


@dataclass
class TensorSharder:
    """Leaves this rank's parts in a model and makes its modules exchange what they must.

    Args:
        model: usually without values (``meta``).
        peers: the ranks that hold whole maps together; they are handed the same rows.
        key: the setting that asked for it, for messages.
        ranks: all ranks, and ``mesh``: those that hold the same parts as this one; where weights are sharded besides.
        copied: what the maps of ``readers``, those cut by columns, get as their input.
        repeats: where there are fewer KV heads than ranks, peers hold the same one (not for training: its
            gradient would have to be summed over them).
    """

    model: Any
    peers: Ranks
    key: str
    ranks: Ranks
    mesh: DeviceMesh | None = None
    copied: CopiedOnce | None = None
    repeats: bool = False
    cuts: dict[str, AxisSharding] = field(default_factory=dict)
    owners: dict[str, nn.Module] = field(default_factory=dict)
    tied: dict[int, tuple[nn.Parameter, str]] = field(default_factory=dict)
    """A whole weight by its identity -> this rank's part of it, and the name under which it was cut first."""
    kept: list[nn.Parameter] = field(default_factory=list)
    """Whole weights, so that no other one gets the identity of one that is gone."""

    readers: list[nn.Module] = field(default_factory=list)
    """Maps that are cut by columns."""

    def run(self) -> None:
        """Cut every module that the plan names.

        Raises:
            ConfigError: the family has no plan, or its sizes do not divide.
            NotBuiltError: the plan names a style that is not known here.
        """
        plan = _plan_of(self.model)
        for name, module in list(self.model.named_modules()):
            style = plan.get(_wildcard(name))
            if style is not None:
                self.apply(name, module, style)
        if not self.cuts:
            raise ConfigError(
                f"transformers has no tensor-parallel plan for {type(self.model).__name__}",
                key=self.key,
                got=self.peers.size,
                fix="Leave it out.",
            )

    def apply(self, name: str, module: nn.Module, style: str) -> None:
        styles: dict[str, Callable[[str, nn.Module], None]] = {
            "colwise": self._columns,
            "rowwise": self._rows,
            HEAD: self._head,
            "embedding_rowwise": self._words,
            "moe_tp_experts": self._experts,
            PARTIAL: lambda _, module: self._partial(module),
        }
        if style not in styles:
            raise NotBuiltError(
                f"the tensor-parallel plan of {type(self.model).__name__} cuts {name} in a way that is not built yet",
                key=self.key,
                got=style,
                allowed=sorted(styles),
            )
        styles[style](name, module)

    def outside(self, owner: nn.Module) -> str:
        """The group of a module that belongs to no unit: that of the modules which it shares its weight with."""
        parameters = {id(p) for p in owner.parameters()}
        return next(f":{first}" for own, first in self.tied.values() if id(own) in parameters)

    # ---- styles --------------------------------------------------------------------------------------------------

    def _columns(self, name: str, module: nn.Module) -> None:
        """This rank's part of the outputs. Of an adapter the second factor is cut alike, and the first is whole."""
        pieces = self._pieces_of_heads(name, module)
        for path, owner, attribute in _weights(name, module):
            if ".lora_A." in f"{path}.":
                self._partial(owner)
            else:
                self._cut(path, owner, attribute, axis=0, pieces=pieces)
        self.readers.append(module)

    def _rows(self, name: str, module: nn.Module) -> None:
        """This rank's part of the inputs; the outputs are summed."""
        for path, owner, attribute in _weights(name, module):
            if attribute == "bias":
                raise NotBuiltError(
                    "tensor parallelism of a layer that sums over ranks and adds a bias is not built yet",
                    key=self.key,
                    got=name,
                )
            if ".lora_B." in f"{path}.":
                self._partial(owner)
            else:
                self._cut(path, owner, attribute, axis=1)
        module.register_forward_hook(lambda _, inputs, output: self._summed(output))

    def _summed(self, output: Tensor) -> Tensor:
        if self.copied is not None:
            self.copied.forget()  # this map ends what others began
        return reduced(output, self.peers)

    def _head(self, name: str, module: nn.Module) -> None:
        """This rank's part of the vocabulary; what is wanted of all logits is joined later, and they never are."""
        if module is not self.model.get_output_embeddings():
            raise NotBuiltError("this layer gathers its outputs, which is not built yet", key=self.key, got=name)
        if not isinstance(module, nn.Linear):
            raise NotBuiltError(
                "an adapter on a head that is sharded over ranks is not built yet", key=self.key, got=name
            )
        if not self._follows(module):
            return
        for path, owner, attribute in _weights(name, module):
            self._cut(path, owner, attribute, axis=0, even=False)
        module.register_forward_pre_hook(lambda _, inputs: (copied(inputs[0], self.peers), *inputs[1:]))

    def _words(self, name: str, module: nn.Module) -> None:
        """This rank's part of the vocabulary; each token's embedding comes from the rank that has it."""
        if not isinstance(module, nn.Embedding) or not self._follows(module):
            return
        self._cut(f"{name}.weight", module, "weight", axis=0, even=False)
        start, end = self.cuts[f"{name}.weight"].bounds
        if module.padding_idx is not None:  # its gradient is dropped, on the rank that has it
            module.padding_idx = module.padding_idx - start if start <= module.padding_idx < end else None
        inner = module.forward

        def forward(ids: Tensor) -> Tensor:
            elsewhere = (ids < start) | (ids >= end)
            embedded = inner((ids - start).masked_fill(elsewhere, 0))
            return reduced(embedded.masked_fill(elsewhere.unsqueeze(-1), 0.0), self.peers)

        module.forward = forward  # type: ignore[method-assign, assignment]

    def _experts(self, name: str, module: nn.Module) -> None:
        """Of every expert this rank's part of the inner width; what the experts say is summed."""
        plan = _plan_of(self.model)
        for attribute, _ in list(module.named_parameters(recurse=False)):
            how = plan.get(_wildcard(f"{name}.{attribute}"))
            axes = {"packed_colwise": (1, 2), "colwise": (1, 1), "rowwise": (2, 1)}
            if how not in axes:
                raise NotBuiltError(
                    "these experts are cut in a way that is not built yet", key=self.key, got=f"{name}: {how}"
                )
            axis, blocks = axes[how]
            self._cut(f"{name}.{attribute}", module, attribute, axis=axis, blocks=blocks)

        def before(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            return tuple(copied(x, self.peers) if x.is_floating_point() else x for x in inputs)

        module.register_forward_pre_hook(before)
        module.register_forward_hook(lambda _, inputs, output: reduced(output, self.peers))

    def _partial(self, module: nn.Module) -> None:
        """A whole weight that sees this rank's heads only: gradients of weights are averaged over all ranks, so the
        parts of its own would count 1/P each. Its input has its gradient already."""
        size = self.peers.size
        module.register_forward_pre_hook(lambda _, inputs: (scaled_backwards(inputs[0], 1 / size), *inputs[1:]))
        module.register_forward_hook(lambda _, inputs, output: scaled_backwards(output, float(size)))

    # ---- cutting -------------------------------------------------------------------------------------------------

    def _cut(
        self,
        path: str,
        owner: nn.Module,
        attribute: str,
        axis: int,
        blocks: int = 1,
        even: bool = True,
        pieces: int | None = None,
    ) -> None:
        weight = getattr(owner, attribute)
        self.owners.setdefault(path.rpartition(".")[0], owner)
        if id(weight) in self.tied:
            setattr(owner, attribute, self.tied[id(weight)][0])
            return
        length = weight.shape[axis]
        if even and length % (blocks * (pieces or self.peers.size)):
            raise ConfigError(
                f"{path} is {length // blocks} wide, which {self.peers.size} processes cannot share evenly",
                key=self.key,
                got=self.peers.size,
            )
        cut = AxisSharding(self.ranks, self.peers, self.mesh, axis, length, blocks, pieces)
        self.cuts[path] = cut
        own = cut.own(weight)
        self.kept.append(weight)
        self.tied[id(weight)] = (own, path)
        setattr(owner, attribute, own)

    def _follows(self, module: nn.Module) -> bool:
        """Whether the plan cuts every module that shares this one's weight."""
        plan, weight = _plan_of(self.model), module.weight
        names = [name for name, other in self.model.named_modules() if getattr(other, "weight", None) is weight]
        return id(weight) in self.tied or all(_wildcard(name) in plan for name in names)

    def _pieces_of_heads(self, name: str, module: nn.Module) -> int | None:
        """How many parts a map of an attention layer is cut into, where it is fewer than ranks."""
        if "attn" not in name and "attention" not in name:
            return None
        config, size = self.model.config.get_text_config(), self.peers.size
        queries = config.num_attention_heads
        shared = getattr(config, "num_key_value_heads", None) or queries
        repeated = self.repeats and size % shared == 0 and queries % size == 0
        for what, count in (("attention heads", queries), ("KV heads", shared)):
            if count % size and not (count == shared and repeated):
                fits = [d for d in range(1, queries + 1) if queries % d == 0]
                raise ConfigError(
                    f"the model's {count} {what} cannot be shared evenly by {size} processes",
                    key=self.key,
                    got=size,
                    allowed=[d for d in fits if shared % d == 0 or (self.repeats and d % shared == 0)],
                )
        dim = getattr(config, "head_dim", None) or config.hidden_size // queries
        if not shared % size or getattr(module, "weight", torch.empty(0)).shape[0] != shared * dim:
            return None
        self.model.get_submodule(name.rpartition(".")[0]).num_key_value_groups = queries // size
        return int(shared)


def _plan_of(model: Any) -> dict[str, str]:
    return dict(model.tp_plan or {})


def _wildcard(name: str) -> str:
    """``model.layers.3.mlp`` -> ``model.layers.*.mlp``, as plans name modules."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)


def _weights(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """(full name, module that holds it, its name there) of every weight within a module."""
    for path, _ in list(module.named_parameters()):
        holder, _, attribute = path.rpartition(".")
        yield f"{name}.{path}", module.get_submodule(holder), attribute
