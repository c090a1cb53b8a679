"""The TorchTitan backend: its models, sharded by FSDP2 and by tensor, expert, context and pipeline parallelism.

Rows, micro-batches, losses, clipping, checkpoints and the export of weights are those of the FSDP2 engine, whose
sharded tensors (`DTensor`) TorchTitan's models have too; here are the model, its meshes, its stages, and what ranks
with the same rows share.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from verl.algorithms.aggregation import LossNorm
from verl.algorithms.losses import LossFn, loss_of_rows
from verl.checkpoint.state import StateSection
from verl.config.schema.node import key_of
from verl.config.schema.role import FSDPEngineConfig, MegatronEngineConfig
from verl.config.schema.torchtitan import TorchTitanEngineConfig, features_not_built
from verl.distributed import Ranks
from verl.distributed.metrics import merge_metrics
from verl.distributed.shards import gather, local_box
from verl.engines import memory, sharding
from verl.engines.base import DataRank, Engine
from verl.engines.forward import TokenForward, zeros_of
from verl.engines.fsdp2 import FSDP2Engine
from verl.engines.optimizer import entry_named
from verl.engines.rows import MicroBatch
from verl.engines.settings import recompute_activations
from verl.engines.torch_engine import RankWork
from verl.engines.torchtitan.configuration import titan_family
from verl.engines.torchtitan.forward import TitanForward
from verl.engines.torchtitan.model import build_stage
from verl.engines.torchtitan.parallel import TitanSizes
from verl.engines.torchtitan.pipeline import Pipeline
from verl.engines.torchtitan.routers import TitanRouters
from verl.errors import NotBuiltError
from verl.metrics import MetricSet
from verl.models.weights import named_tensors
from verl.protocol.sharding import ShardSpec


class TorchTitanEngine(FSDP2Engine):
    """A Llama or Qwen3 over pipeline x data x context x tensor (x expert) parallel processes, in TorchTitan's modules.

    Args:
        model, optim, kind, grad_clip, total_training_steps, device, seed: as for `FSDP2Engine`.
        engine: the ``torchtitan`` section.

    Raises:
        ConfigError: TorchTitan is not installed; sizes that do not divide processes, heads, layers or experts.
        NotBuiltError: a family, a kind of parallelism or of model that this engine has not yet.
    """

    scales_loss = False
    sequence_key = "context_parallel_size"
    forward: TitanForward

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.routers = TitanRouters(self.model)

    @classmethod
    def section(
        cls, fsdp: FSDPEngineConfig, megatron: MegatronEngineConfig, torchtitan: TorchTitanEngineConfig | None = None
    ) -> TorchTitanEngineConfig:
        assert torchtitan is not None, "the role has no section of this engine"
        return torchtitan

    def _introduce(self, model: Any, engine: Any, kind: str, grad_clip: float | None, device: str) -> None:
        super()._introduce(model, engine, kind, grad_clip, device)
        self.recompute = recompute_activations(model.enable_gradient_checkpointing, device)
        refused = {} if kind == "causal_lm" else {"path": "a value model"}
        for name, what in (refused | features_not_built(model)).items():
            raise NotBuiltError(
                f"{what} is not built yet on TorchTitan's models",
                key=key_of(model, name),
                fix="Leave it out, or set strategy=fsdp2.",
            )

    # ---- building ----------------------------------------------------------------------------------------------

    def _peers(self, engine: Any) -> Ranks:
        self.sizes = TitanSizes.of(engine, self.ranks, self.device)
        self.num_sequence_ranks = self.sizes.context
        self.sequence = self.sizes.sequence(self.ranks)
        self.stages, self.stages_back = self.sizes.stages(self.ranks)
        return self.sizes.peers(self.ranks)

    def _lay_out(self, engine: Any) -> None:
        self.reshard, self.compiles = engine.reshard_after_forward, bool(engine.use_torch_compile)
        self.engine_section = engine
        self.layout = sharding.ShardingLayout(self.sizes.mesh, self.device, self.dtype)
        self.experts, self.sync_once = None, False

    def _cut(self, model: Any) -> nn.Module:
        config = model.config
        titan_family(config)
        self.sizes.check(config, self.engine_section)
        self.cuts = {}
        rotary = type(model.model.rotary_emb)(config)  # with values, unlike the model on meta
        built = build_stage(
            model,
            rotary,
            self.sizes,
            self.stages.rank,
            self.device,
            self.dtype,
            self.layout.home,
            reshard=self.reshard,
            offload=self.layout.offload,
            recompute=self.recompute,
            compiles=self.compiles,
        )
        self.pipeline = Pipeline(self.stages, self.stages_back, config.hidden_size, self.dtype, self.device)
        here = self.stages.exchange(list(named_tensors(built)))
        self.stage_of = {name: stage for stage, names in enumerate(here) for name in names}
        return built

    def _wants_compiling(self, engine: Any) -> bool:
        return False  # TorchTitan compiles them, before they are sharded

    def _make_forward(self, *args: Any, **kwargs: Any) -> TokenForward:
        return TitanForward(self.sequence, *args, **kwargs)

    def _held(self) -> str:
        pieces = [p for p in self.model.parameters() if isinstance(p, DTensor)]
        local_bytes = sum(p.to_local().nbytes for p in pieces)
        return f"{local_bytes} of {sum(p.nbytes for p in self.blueprint.parameters())} bytes of weights"

    # ---- passes ------------------------------------------------------------------------------------------------

    @property
    def data_rank(self) -> DataRank | None:
        if self.num_peers == 1:
            return None
        place = self.ranks.rank % (self.ranks.size // self.sizes.pipeline)
        return DataRank(place // (self.sizes.context * self.sizes.tensor), self.sizes.data, self.peers.rank == 0)

    def _passes(
        self, work: RankWork, outputs: Sequence[str], temperature: float
    ) -> Iterable[tuple[Tensor, dict[str, Tensor]]]:
        micro_batches, most = list(work.micro_batches(self.device)), self.forward.listed_per_token
        results: list[dict[str, Tensor]] = [
            {name: zeros_of(name, (len(m.index), m.num_responses), m.candidates, most, self.device) for name in outputs}
            for m in micro_batches
        ]

        def forward(number: int, hidden: Tensor | None) -> Tensor:
            micro = micro_batches[number]
            with memory.explained(micro):
                if not self.pipeline.is_last:
                    return self.forward.stage(micro, hidden)
                with self.forward.behind(hidden):
                    results[number] = self.forward(micro, outputs, temperature)
            return torch.zeros(())

        self.pipeline.forward([self.forward.shape(micro) for micro in micro_batches], forward)
        for micro, computed in zip(micro_batches, results):  # of the last stage; the others add zeros
            yield micro.index, {name: self.stages.sum(values) for name, values in computed.items()}

    def _accumulate(
        self, work: RankWork, tensors: Any, loss_fn: LossFn, temperature: float, norm: LossNorm
    ) -> tuple[float, MetricSet, list[int]]:
        metrics, broken, losses = MetricSet(), [], []
        micro_batches = list(work.micro_batches(self.device))

        def loss_of(micro: MicroBatch, outputs: dict[str, Tensor]) -> Tensor:
            if not len(micro.index):
                return torch.stack([values.sum() for values in outputs.values()]).sum()  # zero, with a graph
            loss, measured = loss_of_rows(loss_fn, outputs, tensors[micro.index].to(self.device), norm)
            metrics.merge(measured)
            losses.append(float(loss.detach()))
            if not math.isfinite(losses[-1]):
                broken.extend(micro.index.tolist())
            return loss

        def forward(number: int, hidden: Tensor | None) -> Tensor:
            micro = micro_batches[number]
            with memory.explained(micro):
                if not self.pipeline.is_last:
                    return self.forward.stage(micro, hidden)
                with self.forward.behind(hidden):
                    outputs = self.forward(micro, loss_fn.outputs, temperature)
            # A loss is scaled for the mean over data-parallel ranks, and TorchTitan sums gradients over these and over
            # the ranks that share tokens, which all have it.
            return loss_of(micro, outputs) / (self.sizes.data * self.sizes.context)

        self.pipeline.train([self.forward.shape(micro) for micro in micro_batches], forward)
        return sum(losses), metrics, broken

    def _total_norm(self, grads: list[Tensor]) -> Tensor:
        """Every rank sums its pieces; a piece that several ranks have alike counts once."""
        local = sum((_piece(g).double().square().sum() / _copies(g) for g in grads), torch.zeros(()).double())
        return self.ranks.sum(local).sqrt().float().to(self.device)

    def _merged(self, total: float, metrics: MetricSet) -> tuple[float, MetricSet]:
        """The numbers of the ranks that computed a loss: one per data-parallel rank."""
        return merge_metrics(total, metrics, self.ranks, counted=self.sizes.speakers(self.ranks))

    # ---- weights and state -------------------------------------------------------------------------------------

    def _units(self, only: Container[str] | None = None) -> Iterator[dict[str, Tensor]]:
        names = [name for name in named_tensors(self.blueprint) if only is None or name in only]
        tensors = named_tensors(self.model)
        for _, group in itertools.groupby(names, key=partial(sharding.unit_of, prefixes=self.unit_names)):
            yield {name: self._everywhere(tensors.get(name), name) for name in group}

    def _everywhere(self, tensor: Tensor | None, name: str) -> Tensor:
        """A full weight, or what is laid out like it, on every stage. Collective.

        Args:
            tensor: this rank's piece; None on the stages that do not have it.
        """
        if tensor is not None:
            full = gather(tensor)
        else:
            blank = named_tensors(self.blueprint)[name]
            full = torch.empty(blank.shape, dtype=blank.dtype, device=self.device)
        if self.stages.size > 1:
            full = full.contiguous()
            dist.broadcast(full, group=self.stages.group, group_src=self.stage_of[name])
        return full

    def _box(self, tensor: Tensor, name: str) -> tuple[ShardSpec, Tensor]:
        return local_box(tensor)

    def _write(self, values: Mapping[str, Tensor]) -> None:
        """Rank 0's values go to every rank, one weight at a time, and each keeps its box, if it has one."""
        targets = named_tensors(self.model)
        for name, full in values.items():
            on_device = full.to(self.device) if self.is_first else torch.empty_like(full, device=self.device)
            on_device = self.ranks.broadcast(on_device)
            if name in targets:
                spec, local = local_box(targets[name])
                with torch.no_grad():
                    local.copy_(on_device[spec.slices])

    def _paired_pieces(self, source: Engine) -> list[tuple[Tensor, Tensor]] | None:
        return super()._paired_pieces(source) if isinstance(source, TorchTitanEngine) else None

    def _optimizer_boxes(self) -> tuple[dict[str, tuple[ShardSpec, Tensor]], dict[str, Any]]:
        boxes, scalars = super()._optimizer_boxes()
        for values in self.stages.exchange(scalars["values"]):
            scalars["values"] = {**scalars["values"], **values}
        return boxes, scalars

    def _load_optimizer_state(self, saved: StateSection, scalars: Mapping[str, Any]) -> None:
        """Each stage takes what belongs to its weights."""
        for full in saved:
            entry_named(self.stage_of, full.rpartition("/")[0])
        local = set(self._parameter_names().values())
        here = {name: values for name, values in scalars["values"].items() if entry_named(self.stage_of, name) >= 0}
        super()._load_optimizer_state(
            saved.only(full for full in saved if full.rpartition("/")[0] in local),
            {**scalars, "values": {name: values for name, values in here.items() if name in local}},
        )


def _piece(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _copies(tensor: Tensor) -> int:
    """Ranks that have the same piece."""
    assert isinstance(tensor, DTensor), "every weight of a TorchTitan model is sharded"
    count = 1
    for number, placement in enumerate(tensor.placements):
        if isinstance(placement, Replicate):
            count *= tensor.device_mesh.size(number)
    return count
