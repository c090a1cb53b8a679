"""The worker of one model: it builds what a `ModelRole` says, infers, trains, saves, loads, and sends its weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor

from verl.algorithms.losses import LossFn
from verl.checkpoint import FileRecord
from verl.config import FSDPEngineConfig, HFModelConfig, OptimizerConfig, ProfilerConfig
from verl.config.machine.topology import backend_of
from verl.config.schema.role import MegatronEngineConfig
from verl.config.schema.torchtitan import TorchTitanEngineConfig
from verl.data import tokenizer_of
from verl.engines.base import Engine
from verl.errors import WorkerError
from verl.metrics import MetricSet
from verl.models.lora import LoraSettings
from verl.protocol import DataProto
from verl.single_controller.base import (
    CallOptions,
    Dispatch,
    RoleKind,
    make_nd_compute_dataproto_dispatch_fn,
    make_nd_compute_metric_dispatch_fn,
    register,
)
from verl.workers.background import InBackground
from verl.workers.options import InferOptions, TrainOptions
from verl.workers.part import (
    ModelPart,
    PassLimits,
    WorkerContext,
    base_of,
    data_rank_of,
    layout,
    load_part,
    local_model,
    make_engine,
    meshes_of,
    save_part,
    saved_records,
    schedule_steps,
)
from verl.workers.profiling import ProfiledWorker, profiled
from verl.workers.sending import FeedChange, SyncResult, WeightSender

Options = TypeVar("Options", bound=CallOptions)
CONTENTS = ("model", "optimizer", "extra")


@dataclass(frozen=True)
class ModelRole:
    """A model of a run: what its worker builds, and how the dataflow calls it.

    Args:
        name: of the role; its metrics and its folder in a checkpoint bear it.
        model: the section that is loaded.
        key: the setting that names the model, for messages.
        strategy: training backend; ``auto`` leaves it to the number of workers.
        fsdp, megatron, torchtitan: how the backend holds it.
        limits: the number of ranks -> rows or tokens of one pass.
        train_limits: the same for passes that train, where they differ.
        kind: ``causal_lm``, or ``value`` for a scalar head.
        temperature: logits are divided by it before every softmax.
        optim: None for a frozen model.
        loss: makes what training minimises, in the worker's process.
        grad_clip: largest norm of its gradient.
        mini_batch_size: prompts per optimizer step, over all ranks.
        epochs, shuffle, shuffle_seed: how the loop goes through a batch.
        rows_per_step: rows per optimizer step, over all ranks; 0: all rows of a call.
        share_prompts: the prompt of several rows is computed once.
        router_replay: what the experts of a mixture are replayed from: disabled, R2 or R3.
        top_k: how many of the most likely tokens of a position it can list.
        reference_of: the role whose reference this model is; if both share a process, an adapter's base is not loaded
            twice, and its exact KL is measured against this model.
        freeze_vision_tower: everything but the tower of a model that sees is trained.
        has_tokenizer: its folder in a checkpoint gets the tokenizer.
        profiler: which calls are recorded; None: none.
        pool: the role's name in ``trainer.resource_pools``.
        role_kind: the calls that it accepts; by default trainable with an optimizer, frozen without.
    """

    name: str
    model: HFModelConfig
    key: str
    strategy: str
    fsdp: FSDPEngineConfig
    megatron: MegatronEngineConfig
    limits: Callable[[int], PassLimits]
    train_limits: Callable[[int], PassLimits] | None = None
    kind: str = "causal_lm"
    temperature: float = 1.0
    optim: OptimizerConfig | None = None
    loss: Callable[[], LossFn] | None = None
    grad_clip: float = 1.0
    mini_batch_size: int = 0
    epochs: int = 1
    shuffle: bool = False
    shuffle_seed: int = 0
    rows_per_step: int = 0
    share_prompts: bool = True
    router_replay: str = "disabled"
    top_k: int = 0
    reference_of: str = ""
    freeze_vision_tower: bool = False
    has_tokenizer: bool = False
    profiler: ProfilerConfig | None = None
    pool: str = ""
    torchtitan: TorchTitanEngineConfig | None = None
    role_kind: RoleKind | None = None


class ModelWorker(ProfiledWorker):
    """One model that infers and, with an optimizer, trains.

    Args:
        role: what it builds.
        context: device, seed and length of the run.
    """

    part: ModelPart
    _options: CallOptions | None = None

    def __init__(self, role: ModelRole, context: WorkerContext | None = None):
        super().__init__()
        self.role, self.context = role, context or WorkerContext()
        self.tokenizer: Any = None
        self.sending = InBackground("verl-weights")
        self.sender: WeightSender | None = None
        self._sent = SyncResult()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Load the model, and make the optimizer where it has one."""
        role = self.role
        model = local_model(role.model, role.key)
        if role.has_tokenizer:
            self.tokenizer = tokenizer_of(model)
        learner = self.fused_worker_dict.get(role.reference_of)
        if learner is not None and LoraSettings.of(learner.role.model) is not None:
            engine, self.sending = base_of(learner.part.engine), learner.sending
        else:
            engine = self._make_engine(model)
        ranks = data_rank_of(self, engine).size
        self.part = ModelPart(
            engine,
            train_limits=(role.train_limits or role.limits)(ranks),
            infer_limits=role.limits(ranks),
            loss_fn=None if role.loss is None else role.loss(),
            temperature=role.temperature,
            mini_batch_rows=max(1, role.rows_per_step // ranks) if role.rows_per_step else None,
            sections=[
                section
                for section in (role.fsdp, role.megatron, role.torchtitan, model, role.optim)
                if section is not None
            ],
        )
        if learner is not None:
            learner.part.engine.compare_with(engine)

    def _make_engine(self, model: HFModelConfig) -> Engine:
        role, context = self.role, self.context
        strategy = backend_of(role.strategy, self.world_size)
        return make_engine(
            strategy,
            self.info,
            context.timeout,
            model=model,
            optim=role.optim,
            kind=role.kind,
            grad_clip=role.grad_clip,
            total_training_steps=context.total_training_steps
            if role.optim is None
            else schedule_steps(role.optim, context),
            device=context.device,
            seed=context.seed,
            **({"freeze_vision_tower": True} if role.freeze_vision_tower else {}),
            **layout(
                strategy,
                role.model,
                role.fsdp,
                role.megatron,
                role.share_prompts,
                role.router_replay != "disabled",
                role.torchtitan,
                role.top_k,
            ),
        )

    def profiling(self) -> tuple[str, ProfilerConfig | None]:
        return self.role.name, self.role.profiler

    def meshes(self) -> dict[str, tuple[int, bool]]:
        part = getattr(self, "part", None)
        return {**meshes_of(self, **{"model": part, self.role.name: part}), **super().meshes()}

    # ---- computing ---------------------------------------------------------------------------------------------

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="model"))
    @profiled
    def infer(self, batch: DataProto, options: InferOptions) -> DataProto:
        """Forward passes: a batch of ``options.outputs``, each (B, T) float32."""
        self.sending.wait()
        return DataProto.from_dict(tensors=self.part.infer(batch, options.outputs))

    @register(dispatch_mode=make_nd_compute_metric_dispatch_fn(mesh_name="model"))
    @profiled
    def train(self, batch: DataProto, options: TrainOptions) -> MetricSet:
        """One optimizer step per mini-batch; metrics are those of the loss, plus ``grad_norm`` and ``lr``."""
        self.sending.wait()
        return self.part.train(batch, options.more_updates, options.is_mini_batch)

    @contextmanager
    def with_options(self, options: CallOptions) -> Iterator[None]:
        """What `options_of` gives inside a method of upstream's name, which takes a batch alone."""
        self._options = options
        try:
            yield
        finally:
            self._options = None

    def options_of(self, kind: type[Options]) -> Options:
        """The options of the loop's call; the defaults if the method is called directly."""
        return self._options if isinstance(self._options, kind) else kind()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def set_loss_fn(self, loss_fn: LossFn) -> None:
        """Replace the loss that training minimises."""
        self.part.loss_fn = loss_fn

    # ---- weights -----------------------------------------------------------------------------------------------

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def send_weights(self, version: int) -> SyncResult:
        """Send this model's weights as ``version`` to the replicas that this rank feeds."""
        self.sending.wait()
        self._send(version)
        return self._sent

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def begin_weight_update(self, version: int) -> None:
        """As `send_weights`, in the background; later calls to this model wait for its end.

        A single worker uses a thread, so that other roles in its process continue. One of several sends in this call:
        its collectives must not interleave with those of another role.
        """
        self.sending.wait()
        if self.world_size == 1:
            self.sending.begin(lambda: self._send(version))
        else:
            self._send(version)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def end_weight_update(self) -> SyncResult:
        """Wait for the update that `begin_weight_update` began; its error is raised here, or in the result."""
        self.sending.wait()
        return self._sent

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def feed(self, senders: list[WeightSender]) -> None:
        """Send weights to replicas of another pool; ``senders`` has one entry per rank."""
        self.sender = senders[self.rank]

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def change_feeds(self, changes: list[FeedChange]) -> SyncResult:
        """Feed other replicas of another pool from here on; ``changes`` has one entry per rank."""
        self.sending.wait()
        assert self.sender is not None, "replicas of a separate pool are replaced, after `feed`"
        return self.sender.change(changes[self.rank])

    def _send(self, version: int) -> None:
        sender = self.sender or self.colocated("rollout").sender
        self._sent = sender.send(self.part.engine, version)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def update_from(self, role: str) -> None:
        """Take over the weights of the model that plays ``role`` in this process."""
        source = self.colocated(role)
        source.sending.wait()
        self.sending.wait()
        self.part.engine.copy_weights(source.part.engine)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def get_weights(self) -> dict[str, Tensor]:
        """The weights under Hugging Face names."""
        self.sending.wait()
        return dict(self.part.engine.export_weights())

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def set_weights(self, weights: dict[str, Tensor]) -> None:
        """Take over weights under Hugging Face names (reference refresh, moving averages)."""
        self.sending.wait()
        self.part.engine.load_weights(weights)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def to(self, device: str) -> None:
        """``cpu`` offloads model and optimizer, anything else loads them."""
        self.sending.wait()
        if device == "cpu":
            self.part.engine.offload()
        else:
            self.part.engine.onload()

    def colocated(self, role: str) -> Any:
        """The worker that plays ``role`` in this process.

        Raises:
            WorkerError: the role is in another process.
        """
        worker = self.fused_worker_dict.get(role)
        if worker is None:
            roles = sorted(self.fused_worker_dict)
            raise WorkerError(f"{self.role.name!r} needs the role {role!r} in its own process", got=roles)
        return worker

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def compare_copies(self) -> int:
        """See `Engine.compare_copies`."""
        self.sending.wait()
        return self.part.engine.compare_copies()

    # ---- checkpoints -------------------------------------------------------------------------------------------

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_checkpoint(
        self, local_path: str, contents: tuple[str, ...] = CONTENTS, background: bool = False
    ) -> dict[str, FileRecord]:
        """Write this rank's part of the model's state into ``local_path``; returns the records of its files.

        With ``background`` it returns after copying the state, and `checkpoint_records` has the records later.
        """
        self.sending.wait()
        return save_part(self.part, local_path, contents, self.tokenizer, background)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def checkpoint_records(self, wait: bool = False) -> Mapping[str, FileRecord] | None:
        """The records of a save in the background, or None while it is being written."""
        return saved_records(self.part, wait)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, local_path: str, contents: tuple[str, ...] = CONTENTS) -> None:
        """Continue from what `save_checkpoint` wrote; a sampler gets the weights at the next `send_weights`."""
        self.sending.wait()
        load_part(self.part, local_path, contents)


TrainingWorker = ModelWorker
"""Upstream's name."""
