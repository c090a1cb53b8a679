"""FSDP2: weights, gradients and optimizer state are sharded tensors (`DTensor`), one unit gathered at a time."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from verl.distributed.shards import gather, gather_to_first, scatter
from verl.engines import sharding
from verl.engines.expert_parallel import ExpertRanks
from verl.engines.settings import tell_without_effect
from verl.engines.sharded_engine import ShardedEngine
from verl.engines.sharded_optimizer import build_sharded_optimizer
from verl.models.weights import named_tensors


class FSDP2Engine(ShardedEngine):
    """See `ShardedEngine`; takes expert_parallel_size, too (neighbours that share the experts of a mixture)."""

    def _build(self, model: Any, engine: Any, seed: int) -> nn.Module:
        self.num_expert_ranks = engine.expert_parallel_size
        tell_without_effect(engine, {"use_orig_params": False}, "weights always keep their form here")
        return super()._build(model, engine, seed)

    def _cut(self, model: Any) -> nn.Module:
        layout = self.layout
        # What a model returns is never changed in place here, which is all that this warning is about.
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
        policy: OffloadPolicy = OffloadPolicy()
        if layout.offload:
            policy = CPUOffloadPolicy(pin_memory=layout.device != "cpu")
        common: dict[str, Any] = {
            "mesh": layout.mesh,
            "mp_policy": MixedPrecisionPolicy(param_dtype=layout.dtype, reduce_dtype=torch.float32),
            "offload_policy": policy,
        }
        units = [unit for _, unit in sharding.unit_modules(model, layout.min_num_params)]
        self.experts = ExpertRanks.of(self.ranks, self.device, self.num_expert_ranks, layout.mesh)
        if self.experts is not None:
            for module in self.experts.cut(model):
                fully_shard(
                    module,
                    reshard_after_forward=layout.reshard_after_forward,
                    **{**common, "mesh": self.experts.mesh},
                )
        for unit in units:
            fully_shard(unit, reshard_after_forward=layout.reshard_after_forward, **common)
        # The root's weights are used last and needed first by the backward pass: they stay until then (None).
        fully_shard(model, reshard_after_forward=None if layout.reshard_after_forward else False, **common)
        if layout.prefetch:
            for this, following in itertools.pairwise(units):
                this.set_modules_to_forward_prefetch([following])  # type: ignore[operator]  # an FSDPModule by now
        return model.to_empty(device=layout.home)

    def _held(self) -> str:
        pieces = [p for p in self.model.parameters() if isinstance(p, DTensor)]
        own, whole = sum(p.to_local().nbytes for p in pieces), sum(p.nbytes for p in self.blueprint.parameters())
        gathered = sum(isinstance(module, FSDPModule) for module in self.model.modules())
        return f"{own} of {whole} bytes of weights; a forward pass gathers them in {gathered} steps"

    def _build_optimizer(self, parameters: list[nn.Parameter], optim: Any) -> torch.optim.Optimizer:
        return build_sharded_optimizer(parameters, optim, self.layout)

    # ---- passes ------------------------------------------------------------------------------------------------

    def _before_micro_batch(self, last: bool) -> None:
        if self.sync_once:
            self.model.set_requires_gradient_sync(last)
            self.model.set_is_last_backward(last)

    def _after_passes(self) -> None:
        """Free what a forward pass left gathered."""
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    # ---- weights and state -------------------------------------------------------------------------------------

    def _units(self, first_only: bool) -> Iterator[dict[str, Tensor]]:
        def unit(item: tuple[str, Tensor]) -> str:
            return sharding.unit_of(item[0], self.unit_names)

        for _, group in itertools.groupby(named_tensors(self.model).items(), key=unit):
            if first_only:
                saved = {name: self._saved(tensor) for name, tensor in group}
                yield {name: tensor for name, tensor in saved.items() if tensor is not None}
            else:
                yield {name: self._gathered(tensor) for name, tensor in group}

    def _write(self, values: Mapping[str, Tensor]) -> None:
        for name, target in named_tensors(self.model).items():
            if name in values:
                self._put(values[name], target)

    def _gathered(self, tensor: Tensor) -> Tensor:
        """Whole on every rank."""
        if self.experts is not None and self.experts.holds(tensor):
            return self.experts.gathered(cast(DTensor, tensor))
        return gather(tensor)

    def _saved(self, tensor: Tensor) -> Tensor | None:
        if self.experts is not None and self.experts.holds(tensor):
            whole = self._gathered(tensor)
            return whole.cpu() if self.is_first else None
        if isinstance(tensor, DTensor):
            return gather_to_first(tensor)
        return tensor.detach().cpu() if self.is_first else None

    def _placed(self, tensor: Tensor, parameter: nn.Parameter, device: torch.device) -> Tensor:
        if tensor.shape == self._whole_shape(parameter):
            target = torch.zeros_like(parameter, dtype=tensor.dtype, requires_grad=False)
        else:
            target = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
        self._put(tensor, target)
        return target

    def _whole_shape(self, parameter: nn.Parameter) -> torch.Size:
        if self.experts is not None and self.experts.holds(parameter):
            return torch.Size([len(parameter) * self.experts.peers.size, *parameter.shape[1:]])
        return parameter.shape

    def _put(self, whole: Tensor, target: Tensor) -> None:
        """Rank 0's values into a tensor that is cut, or that every rank has."""
        if self.experts is not None and self.experts.holds(target):
            self.experts.scatter(whole, cast(DTensor, target))
            return
        if isinstance(target, DTensor):
            scatter(whole, target)
            return
        with torch.no_grad():
            target.copy_(self.ranks.broadcast(whole.to(target) if self.is_first else torch.empty_like(target)))

    def _move_weights(self, to: str) -> None:
        self.model.to(to)
