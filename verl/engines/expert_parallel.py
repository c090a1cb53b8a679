"""Experts of a mixture sharded over ranks: which modules hold them, and how their weights go in and out.

Transformers keeps the experts of a layer in one module, with all of them along the first axis of each weight. Each of P
peer ranks keeps E/P of them; ranks that hold the same ones shard these among themselves.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from verl.distributed import Ranks
from verl.distributed.axis_sharding import AxisSharding
from verl.distributed.experts import ExpertExchange
from verl.distributed.mesh import new_mesh
from verl.errors import ConfigError

KEY = "expert_parallel_size"


@dataclass(frozen=True)
class ExpertRanks:
    """Who holds which experts.

    Args:
        ranks: all.
        peers: those that hold all experts together, in the order of the experts.
        mesh: of the ranks that hold the same experts as this one.
    """

    ranks: Ranks
    peers: Ranks
    mesh: DeviceMesh

    @classmethod
    def of(cls, ranks: Ranks, device: str, size: int, data_mesh: DeviceMesh) -> ExpertRanks | None:
        """None where every rank has all experts.

        Raises:
            ConfigError: ``size`` does not divide the number of ranks, or they are sharded in groups.
        """
        if size <= 1:
            return None
        if ranks.size % size:
            allowed = [d for d in range(1, ranks.size + 1) if ranks.size % d == 0]
            raise ConfigError(
                f"{ranks.size} processes cannot share the experts evenly", key=KEY, got=size, allowed=allowed
            )
        if data_mesh.ndim > 1:
            fix = "Leave fsdp_size out."
            raise ConfigError("experts cannot be shared beside hybrid sharding", key=KEY, got=size, fix=fix)
        mesh = new_mesh(device, (ranks.size // size, size), ("same_experts", "experts"))
        same, experts = mesh.mesh_dim_names or ()
        return cls(ranks, Ranks(ranks.rank % size, size, mesh.get_group(experts)), mesh[same])

    def cut(self, model: nn.Module) -> tuple[dict[str, AxisSharding], dict[str, nn.Module]]:
        """Leave this rank's experts in a model without values.

        Returns:
            Which weights were cut, by name; the modules that hold them, by name, to be sharded over ``mesh``.

        Raises:
            ConfigError: the model has no experts, or they do not divide.
        """
        experts = expert_modules(model)
        if not experts:
            fix = "Leave it out."
            raise ConfigError(f"{type(model).__name__} has no experts", key=KEY, got=self.peers.size, fix=fix)
        cuts: dict[str, AxisSharding] = {}
        for prefix, module in experts.items():
            count = len(next(module.parameters()))
            if count % self.peers.size:
                allowed = [d for d in range(1, count + 1) if count % d == 0]
                message = f"the model's {count} experts cannot be shared evenly"
                raise ConfigError(message, key=KEY, got=self.peers.size, allowed=allowed)
            per_rank = count // self.peers.size
            for name, weight in module.named_parameters(recurse=False):
                cut = AxisSharding(self.ranks, self.peers, self.mesh, count)
                setattr(module, name, cut.local_part(weight))
                cuts[f"{prefix}.{name}"] = cut
            module.num_experts = per_rank  # type: ignore[assignment]
            module.forward = ExpertExchange(module.forward, per_rank, self.peers)  # type: ignore[assignment]
        return cuts, experts


def expert_modules(model: nn.Module) -> dict[str, nn.Module]:
    """The modules that hold the experts of a layer, by name: every weight of theirs has one row per expert."""
    modules = {}
    for prefix, module in model.named_modules():
        count, weights = getattr(module, "num_experts", None), list(module.parameters())
        if isinstance(count, int) and weights and all(w.dim() == 3 and len(w) == count for w in weights):
            modules[prefix] = module
    return modules
