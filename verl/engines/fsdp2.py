"""FSDP2: weights, gradients and optimizer state cut over all ranks, one transformer layer gathered at a time."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from verl import distributed
from verl.distributed import Ranks, data_parallel_mesh
from verl.distributed.shards import gather, gather_to_first, mirror, scatter
from verl.engines import sharding
from verl.engines.optimizer import move_optimizer_state
from verl.engines.sharded_optimizer import build_sharded_optimizer
from verl.engines.torch_engine import TorchEngine
from verl.metrics import log, notice
from verl.models.weights import named_tensors, names_in_memory, names_on_disk


class FSDP2Engine(TorchEngine):
    """A model over all processes of the run (`verl.distributed.start`), each with its own rows of every batch.

    Every method is collective: all ranks call it, in the same order; `infer` and `train_batch` may be handed batches of
    different size, also empty ones. States are those of the plain engine: whole tensors under Hugging Face names, on
    rank 0 only, so that a checkpoint loads at any number of ranks and in either engine.

    Args:
        model, optim, kind, grad_clip, total_training_steps, seed: as for `PlainEngine`.
        engine: the ``fsdp_config`` section. Beside what `PlainEngine` takes: reshard_after_forward, offload_policy
            (weights, gradients and optimizer live on the host), fsdp_size (hybrid sharding),
            use_no_sync_for_gradient_accumulation (gradients are reduced once per optimizer step and whole until then).
            dtype: compute dtype of all weights, gathered in it; gradients are reduced in float32.
        device: ``cpu`` or a kind of accelerator; each process uses its own.

    Raises:
        EngineError: the processes do not meet, or ranks are called differently.
        ModelError, ConfigError: as for `PlainEngine`, on every rank.
    """

    def _join(self) -> Ranks:
        return distributed.start(device=self.device)

    def _build(self, model: Any, engine: Any, seed: int) -> nn.Module:
        self.layout = sharding.Layout(
            mesh=data_parallel_mesh(self.ranks, self.device, engine.fsdp_size),
            device=self.device,
            dtype=self.dtype,
            reshard_after_forward=engine.reshard_after_forward,
            offload=engine.offload_policy,
        )
        # What a model returns is never changed in place here, which is all that this warning is about.
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
        self.sync_once = engine.use_no_sync_for_gradient_accumulation

        self._skeleton = partial(self._load, model, engine, seed, "meta")

        def load() -> tuple[tuple[Any, Any], None]:
            whole = self._load(model, engine, seed) if self.is_first else None
            return (self._skeleton(), whole), None

        (cut, whole), _ = self.ranks.together(load)
        self.layer_names = [name for name, _ in sharding.layers(cut)]
        sharding.shard(cut, self.layout)
        sharding.fill(cut, whole, self.layout, self.ranks)
        log.info("fsdp2: %s holds %s", self.ranks, sharding.report(cut))
        return cut

    def _autocast_dtype(self) -> torch.dtype:
        return torch.float32  # the weights are gathered in the compute dtype: nothing is left for autocast

    def _build_optimizer(self, parameters: list[nn.Parameter], optim: Any) -> torch.optim.Optimizer:
        return build_sharded_optimizer(parameters, optim, self.layout)

    # ---- passes ------------------------------------------------------------------------------------------------

    def _before_micro_batch(self, last: bool) -> None:
        if self.sync_once:
            self.model.set_requires_gradient_sync(last)
            self.model.set_is_last_backward(last)

    def _after_passes(self) -> None:
        sharding.reshard(self.model)

    def _total_norm(self, grads: list[Tensor]) -> Tensor:
        """Every rank sums its pieces; with hybrid sharding each piece was counted once per copy."""
        pieces = [g.to_local() if isinstance(g, DTensor) else g for g in grads]
        own = torch.nn.utils.get_total_norm(pieces)
        copies = self.ranks.size // self.layout.mesh.size(self.layout.mesh.ndim - 1)
        return (self.ranks.sum(own.double().square()) / copies).sqrt().to(own)

    # ---- weights and state -------------------------------------------------------------------------------------

    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        """As `Engine.export_weights`, gathered one layer at a time on the device of every rank."""
        self.onload(optimizer=False)  # one layer at a time moves faster between devices than between hosts
        for unit in sharding.units(self.model, self.layer_names):
            whole = {name: gather(tensor) for name, tensor in unit.items()}
            yield from names_on_disk(self.model, whole).items()
        self.offload(params=self.idle["params"], optimizer=False)

    def load_weights(self, weights: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]) -> None:
        """As `Engine.load_weights`; rank 0's weights count, the others may pass the same ones or none."""
        items = weights.items() if isinstance(weights, Mapping) else weights
        kept = {name: tensor.cpu() if self.is_first else tensor.to("meta") for name, tensor in items}
        self._fill(mirror(kept, self.ranks))

    def _fill(self, given: dict[str, Tensor]) -> None:
        targets = named_tensors(self.model)

        def find() -> tuple[dict[str, Tensor], None]:
            convertible = self.model if set(targets) <= set(given) else self._skeleton()
            return names_in_memory(convertible, given), None

        named, _ = self.ranks.together(find)
        for name, tensor in named.items():
            self._put(tensor, targets[name])

    def _saved_weights(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for unit in sharding.units(self.model, self.layer_names):
            whole = {name: self._saved(tensor) for name, tensor in unit.items()}
            found |= names_on_disk(self.model, {name: t for name, t in whole.items() if t is not None})
        return found

    def _saved(self, tensor: Tensor) -> Tensor | None:
        if isinstance(tensor, DTensor):
            return gather_to_first(tensor)
        return tensor.detach().cpu() if self.is_first else None

    def _placed(self, tensor: Tensor, parameter: nn.Parameter, device: torch.device) -> Tensor:
        if tensor.shape == parameter.shape:
            target = torch.zeros_like(parameter, dtype=tensor.dtype, requires_grad=False)
        else:
            target = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
        self._put(tensor, target)
        return target

    def _put(self, whole: Tensor, target: Tensor) -> None:
        """Rank 0's values into a tensor that is cut, or that every rank has."""
        if isinstance(target, DTensor):
            scatter(whole, target)
            return
        with torch.no_grad():
            target.copy_(self.ranks.broadcast(whole.to(target) if self.is_first else torch.empty_like(target)))

    # ---- host and device ---------------------------------------------------------------------------------------

    def offload(self, params: bool = True, optimizer: bool = True) -> None:
        self._move({self.device: "cpu"}, "cpu", params, optimizer)

    def onload(self, params: bool = True, optimizer: bool = True) -> None:
        self._move({"cpu": self.device}, self.device, params, optimizer)

    def _move(self, moves: dict[str, str], to: str, params: bool, optimizer: bool) -> None:
        if self.device == "cpu" or self.layout.offload:
            return
        if params and next(self.model.parameters()).device.type != to:
            self.model.to(to)
        if optimizer and self.optimizer is not None:
            move_optimizer_state(self.optimizer, moves)


class FSDPEngine(FSDP2Engine):
    """``strategy=fsdp``: runs on FSDP2, which computes the same."""

    def __init__(self, *args: Any, **kwargs: Any):
        notice("strategy=fsdp", "runs on the fsdp2 engine; an engine over FSDP's first version is not built yet")
        super().__init__(*args, **kwargs)
