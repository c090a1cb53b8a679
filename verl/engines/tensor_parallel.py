"""Tensor parallelism in an engine: the linear layers of a model are split over peers that hold the same rows.

What `verl.models.tensor_parallel` does not cut (norms, routers) is sharded over all ranks, as every weight is without
tensor parallelism.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from verl.distributed import Ranks
from verl.distributed.axis_sharding import AxisSharding
from verl.distributed.mesh import new_mesh
from verl.distributed.tensor_parallel import CopiedOnce
from verl.engines.sharding import unit_of
from verl.errors import ConfigError, NotBuiltError
from verl.models.tensor_parallel import TensorSharder

KEY = "tensor_parallel_size"


@dataclass(frozen=True)
class TensorRanks:
    """Who holds which part of the linear layers.

    Args:
        ranks: all.
        peers: those that hold whole maps together; they are handed the same rows.
        mesh: of the ranks that hold the same parts as this one.
        copied: what the maps of ``readers``, those cut by columns, get as their input.
    """

    ranks: Ranks
    peers: Ranks
    mesh: DeviceMesh
    copied: CopiedOnce
    readers: list[nn.Module] = field(default_factory=list)

    @classmethod
    def of(cls, ranks: Ranks, device: str, size: int, engine: Any) -> TensorRanks | None:
        """None where every map is whole.

        Raises:
            ConfigError: ``size`` does not divide the number of ranks, or they are sharded in groups.
            NotBuiltError: sequences or experts are shared besides.
        """
        if size <= 1:
            return None
        if ranks.size % size:
            allowed = [d for d in range(1, ranks.size + 1) if ranks.size % d == 0]
            raise ConfigError(
                f"{ranks.size} processes cannot share linear layers evenly", key=KEY, got=size, allowed=allowed
            )
        if 0 < engine.fsdp_size < ranks.size:
            fix = "Leave fsdp_size out."
            raise ConfigError("linear layers cannot be shared beside hybrid sharding", key=KEY, got=size, fix=fix)
        for other in ("ulysses_sequence_parallel_size", "expert_parallel_size"):
            if engine[other] > 1:
                fix = f"Set one of it and {other} to 1."
                raise NotBuiltError(f"tensor parallelism beside {other} is not built yet", key=KEY, got=size, fix=fix)
        mesh = new_mesh(device, (ranks.size // size, size), ("same_parts", "parts"))
        same, parts = mesh.mesh_dim_names or ()
        peers = Ranks(ranks.rank % size, size, mesh.get_group(parts))
        return cls(ranks, peers, mesh[same], CopiedOnce(peers))

    def cut(self, model: Any, unit_names: list[str]) -> tuple[dict[str, AxisSharding], list[list[nn.Module]]]:
        """Leave this rank's parts in a model without values, and make its modules exchange what they must.

        Args:
            unit_names: of the modules that are gathered as a whole.

        Returns:
            Which weights were cut, by name; the modules that hold them, those of one unit together.

        Raises:
            ConfigError: the family has no plan, or its sizes do not divide.
            NotBuiltError: the plan names a style that is not known here.
        """
        cutter = TensorSharder(model, self.peers, KEY, self.ranks, self.mesh, self.copied)
        cutter.run()
        groups: dict[str, list[nn.Module]] = {}
        for name, owner in cutter.owners.items():
            groups.setdefault(unit_of(name, unit_names) or cutter.outside(owner), []).append(owner)
        self.readers.extend(cutter.readers)
        return cutter.cuts, list(groups.values())

    def join_readers(self) -> None:
        """To be called when FSDP has its hooks: they make a tensor of its own for each module, so ours come first."""
        for module in self.readers:
            module.register_forward_pre_hook(lambda _, inputs: (self.copied(inputs[0]), *inputs[1:]), prepend=True)
