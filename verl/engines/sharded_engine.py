"""The base of engines over sharded weights: everything but how a model is sharded and its shards are read."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from verl import distributed
from verl.checkpoint.state import StateSection
from verl.config.schema.node import key_of
from verl.distributed import Ranks, data_parallel_mesh
from verl.distributed.axis_sharding import AxisSharding
from verl.distributed.shards import mirror
from verl.engines import sequence_parallel, sharding
from verl.engines.base import DataRank
from verl.engines.expert_parallel import ExpertRanks
from verl.engines.forward import TokenForward
from verl.engines.optimizer import move_optimizer_state
from verl.engines.recorded_experts import local_experts
from verl.engines.saving import WeightsToWrite, weights_to_write
from verl.engines.sequence_parallel import SequenceForward, check_heads, rows_of_peers, sequence_peers
from verl.engines.torch_engine import TorchEngine
from verl.errors import ModelError, NotBuiltError
from verl.metrics import MetricSet, log, notice
from verl.models import count_parameters, lora
from verl.models.loading import HOLLOW
from verl.models.router_replay import COLUMN
from verl.models.stored import StoredWeights, stored_weights
from verl.models.weights import loose_tensors, named_tensors, names_in_memory, names_on_disk
from verl.protocol import DataProto

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class ShardedEngine(TorchEngine):
    """A model over all processes of the run (`verl.distributed.join_group`), each with its own rows of every batch.

    Every method is collective: all ranks call it, in the same order; `infer` and `train_batch` may be handed batches of
    different size, also empty ones. A state is what this rank writes of a checkpoint, which then loads at any number of
    ranks and in any engine.

    Args:
        model, optim, kind, grad_clip, total_training_steps, seed: as for `PlainEngine`.
        engine: the ``fsdp_config`` section. In addition to `PlainEngine`'s: reshard_after_forward, offload_policy
            (weights, gradients and optimizer live on the host), fsdp_size (hybrid sharding), forward_prefetch,
            wrap_policy.min_num_params, use_no_sync_for_gradient_accumulation (gradients are reduced once per optimizer
            step and whole until then), ulysses_sequence_parallel_size (that many peers share their rows),
            expert_parallel_size (that many share the experts of a mixture).
            dtype: compute dtype of all weights, gathered in it; gradients are reduced in float32.
        device: ``cpu`` or a kind of accelerator; each process uses its own.

    Raises:
        EngineError: the processes do not meet, or ranks are called differently.
        ModelError, ConfigError: as for `PlainEngine`, on every rank.
    """

    cuts: dict[str, AxisSharding]
    """How weights are sharded over peers, by name, as far as any are."""
    sequence_key: ClassVar[str] = sequence_parallel.KEY
    """The setting that says how many ranks share the tokens of a row, for messages."""

    # ---- what a backend provides -------------------------------------------------------------------------------

    @abstractmethod
    def _cut(self, model: Any) -> nn.Module:
        """Cut a model without values (``meta``) and give its pieces memory."""

    @abstractmethod
    def _take(self, stored: StoredWeights) -> None:
        """Read this rank's shards of all weights, without communication."""

    @abstractmethod
    def _write(self, values: Mapping[str, Tensor]) -> None:
        """Take over all weights, under their names in memory; values on rank 0, shapes (``meta``) elsewhere."""

    @abstractmethod
    def _units(self, only: Container[str] | None = None) -> Iterator[dict[str, Tensor]]:
        """Full weights under their names in memory, one unit at a time, on every rank's device.

        Args:
            only: these names; None: all.
        """

    @abstractmethod
    def _move_weights(self, to: str) -> None:
        """Move this rank's pieces to a kind of device."""

    @abstractmethod
    def _held(self) -> str:
        """How much of the model this rank holds, in words."""

    # ---- building ----------------------------------------------------------------------------------------------

    def _join(self) -> Ranks:
        return distributed.join_group(device=self.device)

    def _build(self, model: Any, engine: Any, seed: int) -> nn.Module:
        self.peers = self._peers(engine)
        self.num_peers = self.peers.size
        self._lay_out(engine)
        load = partial(self._load, model, engine, seed)
        (cut, self.blueprint, hollow), _ = self.ranks.together(
            lambda: ([load(device) for device in ("meta", "meta", HOLLOW)], None)
        )
        check_heads(cut.config, self.num_sequence_ranks, self.sequence_key)
        if self.experts is not None:
            refuse_adapted_tensors(cut)
        self.unit_names = [name for name, _ in sharding.unit_modules(cut, self.layout.min_num_params)]
        loose = list(loose_tensors(cut))
        self.model = self._cut(cut)
        self._read(model.path, hollow, load)
        sharding.fill_loose(loose, hollow, self.device)
        log.info("%s: %s holds %s", type(self).__name__, self.ranks, self._held())
        return self.model

    def _lay_out(self, engine: Any) -> None:
        """Decide how a model is cut, before there is one."""
        mesh = data_parallel_mesh(self.ranks, self.device, engine.fsdp_size)
        self.layout = sharding.ShardingLayout.of(engine, mesh, self.device, self.dtype)
        self.experts = ExpertRanks.of(self.ranks, self.device, engine.expert_parallel_size, mesh)
        self.sync_once = engine.use_no_sync_for_gradient_accumulation

    def _read(self, path: str, hollow: PreTrainedModel, load: Callable[[], nn.Module]) -> None:
        """Give the model its values: every rank reads its own, from files that can be read in parts.

        Args:
            hollow: a model without stored values, with what no file holds.
            load: makes the full model.
        """
        with ExitStack() as stack:

            def find() -> tuple[StoredWeights | None, str]:
                try:
                    return stack.enter_context(stored_weights(path, hollow)), ""
                except ModelError as error:
                    return None, str(error)

            stored, reasons = self.ranks.together(find)
            if stored is not None and not any(reasons):
                self.ranks.together(lambda: (self._take(stored), None))
                return
        notice(f"model {path}", f"the first process loads it whole and shards it: {max(reasons)}")
        full_model = self.ranks.only_first(load)
        source = self.blueprint if full_model is None else full_model
        self._write({name: tensor.detach() for name, tensor in named_tensors(source).items()})

    def _autocast_dtype(self) -> torch.dtype:
        return torch.float32  # the weights are gathered in the compute dtype: nothing is left for autocast

    def _wants_compiling(self, engine: Any) -> bool:
        """Only where it is set, and not where layers exchange tokens inside."""
        if engine.use_torch_compile and engine.expert_parallel_size > 1:
            notice(key_of(engine, "use_torch_compile"), "has no effect beside expert parallelism")
            return False
        return bool(engine.use_torch_compile)

    @property
    def num_parameters(self) -> int:
        return count_parameters(self.blueprint)

    def _total_norm(self, grads: list[Tensor]) -> Tensor:
        """Every rank sums its pieces; with hybrid sharding each piece was counted once per copy."""
        pieces = [g.to_local() if isinstance(g, DTensor) else g for g in grads]
        local_norm = torch.nn.utils.get_total_norm(pieces)
        return (self.ranks.sum(local_norm.double().square()) / self.layout.num_copies).sqrt().to(local_norm)

    # ---- rows that several ranks share -------------------------------------------------------------------------

    def _peers(self, engine: Any) -> Ranks:
        """The ranks that are handed the same rows as this one."""
        self.num_sequence_ranks = engine.ulysses_sequence_parallel_size
        return sequence_peers(self.ranks, self.num_sequence_ranks)

    def _make_forward(self, *args: Any, **kwargs: Any) -> TokenForward:
        if self.num_sequence_ranks > 1:
            return SequenceForward(self.peers, *args, **kwargs)
        return TokenForward(*args, **kwargs)

    def _budget(self, *args: Any, **kwargs: Any) -> int | None:
        budget = super()._budget(*args, **kwargs)
        return None if budget is None else budget * self.num_sequence_ranks  # the token budget is per rank

    @property
    def data_rank(self) -> DataRank | None:
        """Peers that compute the same rows are one data-parallel rank."""
        if self.num_peers == 1:
            return None
        return DataRank(self.ranks.rank // self.num_peers, self.ranks.size // self.num_peers, self.peers.rank == 0)

    def infer(self, batch: DataProto, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        pooled, mine = rows_of_peers(batch, self.peers)
        responses = batch.tensors["responses"].shape[1]
        made = super().infer(pooled, *args, **kwargs)
        experts = made.pop(COLUMN, None)
        local = {name: values[mine, :responses] for name, values in made.items()}
        if experts is not None:
            local[COLUMN] = local_experts(experts, pooled, batch, mine)
        return local

    def train_batch(self, batch: DataProto, *args: Any, **kwargs: Any) -> MetricSet:
        return super().train_batch(rows_of_peers(batch, self.peers)[0], *args, **kwargs)

    # ---- weights -----------------------------------------------------------------------------------------------

    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        """As `Engine.export_weights`, gathered one unit at a time on the device of every rank."""
        self.onload(optimizer=False)  # one unit at a time moves faster between devices than between hosts
        for unit in self._units():
            yield from names_on_disk(self.blueprint, unit).items()
            del unit  # before the next all-gather: at most one unit is complete at any time
        self.offload(params=self.idle["params"], optimizer=False)

    def export_adapter(self) -> Iterator[tuple[str, Tensor]]:
        names = lora.adapter_names(self.blueprint)
        self.onload(optimizer=False)
        for unit in self._units(only=names):
            yield from ((names[name], tensor) for name, tensor in unit.items())
        self.offload(params=self.idle["params"], optimizer=False)

    def load_weights(self, weights: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]) -> None:
        """As `Engine.load_weights`; rank 0's weights count, the others may pass the same ones or none."""
        items = weights.items() if isinstance(weights, Mapping) else weights
        tensors = {name: tensor.cpu() if self.is_first else tensor.to("meta") for name, tensor in items}
        self._fill(mirror(tensors, self.ranks))

    def _fill(self, weights: dict[str, Tensor]) -> None:
        named, _ = self.ranks.together(lambda: (names_in_memory(self.blueprint, weights), None))
        self._write(named)

    def _take_saved(self, saved: StateSection) -> None:
        """Read this rank's pieces of a checkpoint's weights."""
        self.ranks.together(lambda: (names_in_memory(self.blueprint, saved.blank()), None))
        adapted = lora.adapter_names(self.blueprint) if lora.has_adapter(self.blueprint) else None
        stored = StoredWeights.of(saved, self.blueprint) if adapted is None else StoredWeights.renamed(saved, adapted)
        if stored is None:
            self._fill(mirror(dict(saved) if self.is_first else {}, self.ranks))
        else:
            self._take(stored)

    def _merged_weights(self) -> WeightsToWrite:
        groups = self._units_of if self._converts else None
        return weights_to_write(self._weight_boxes(), self.ranks, self._on_disk, groups)

    @cached_property
    def _converts(self) -> bool:
        """Whether the files hold anything else than the tensors in memory."""
        blank = {name: tensor.detach() for name, tensor in named_tensors(self.blueprint).items()}
        shapes = {name: tensor.shape for name, tensor in blank.items()}
        return {name: tensor.shape for name, tensor in names_on_disk(self.blueprint, blank).items()} != shapes

    def _on_disk(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return names_on_disk(self.blueprint, weights) if self._converts else dict(weights)

    def _units_of(self, names: Sequence[str]) -> list[list[str]]:
        """Names by the unit that they belong to."""
        units: dict[str, list[str]] = {}
        for name in names:
            units.setdefault(sharding.unit_of(name, self.unit_names), []).append(name)
        return list(units.values())

    # ---- host and device ---------------------------------------------------------------------------------------

    def offload(self, params: bool = True, optimizer: bool = True) -> None:
        if self.device == "cpu":
            return
        self._move({self.device: "cpu"}, "cpu", params, optimizer)

    def onload(self, params: bool = True, optimizer: bool = True) -> None:
        if self.device == "cpu":
            return
        self._move({"cpu": self.device}, self.device, params, optimizer)

    def _move(self, moves: dict[str, str], to: str, params: bool, optimizer: bool) -> None:
        if self.layout.offload:
            return
        if params and next(self.model.parameters()).device.type != to:
            self._move_weights(to)
        if optimizer and self.optimizer is not None:
            move_optimizer_state(self.optimizer, moves)


def refuse_adapted_tensors(model: nn.Module) -> None:
    """Raise `NotBuiltError` where an adapter covers weights that are no linear module's."""
    adapted = lora.adapted_tensors(model)
    if adapted:
        raise NotBuiltError(
            f"an adapter on {adapted[0]} is not built yet where experts are shared",
            key="target_modules",
            fix="Name linear modules, such as [q_proj,k_proj,v_proj,o_proj]; or share no experts.",
        )
