"""One model on one worker: its engine, its batch limits and its loss.

A worker class is a list of registered methods; what they do with a model is here, once for actor, reference, critic and
for every role that a recipe adds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from dataclasses import replace as replace_fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl import distributed, env
from verl.algorithms.losses import LossFn
from verl.checkpoint import BackgroundPart, FileRecord, prepare_part, read_part, write_part
from verl.config import FSDPEngineConfig, HFModelConfig, OptimizerConfig, replace
from verl.config.machine.topology import backend_of
from verl.config.schema.node import full_keys
from verl.config.schema.role import MegatronEngineConfig
from verl.config.schema.torchtitan import TorchTitanEngineConfig
from verl.device import memory_now, torch_dtype
from verl.engines.adapters import AdapterBaseEngine
from verl.engines.base import DataRank, Engine
from verl.engines.memory import check_host
from verl.engines.seen_rows import COLUMN as PICTURES
from verl.engines.settings import PassSettings
from verl.errors import ConfigError, ModelError, WorkerError
from verl.metrics import Metric, MetricSet
from verl.observability.profiler import mini_batch_done
from verl.protocol import DataProto
from verl.protocol.tokenizer import Tokenizer
from verl.registry import ENGINES
from verl.single_controller.base.worker import Worker, WorkerInfo
from verl.storage import copy_to_local

if TYPE_CHECKING:
    pass


@dataclass(frozen=True)
class WorkerContext:
    """A worker's facts about its device and run.

    Args:
        device: ``cpu``, ``cuda`` or ``npu``.
        seed: master seed of the run.
        total_training_steps: length of the run in steps, for learning-rate schedules.
        timeout: seconds after which a peer that does not come is an error (``actor_rollout_ref.nccl_timeout``).
    """

    device: str = "cpu"
    seed: int = 1
    total_training_steps: int = 1
    timeout: float | None = None


LIMIT_KEYS = ("micro_batch_size_per_gpu", "max_token_len_per_gpu")
"""What engines call the two limits of a pass."""


@dataclass(frozen=True)
class PassLimits:
    """Rows or tokens per forward pass; with both None the engine chooses.

    Args:
        keys: the settings behind the two, for messages.
    """

    micro_batch_size: int | None = None
    max_tokens: int | None = None
    keys: tuple[str, str] = LIMIT_KEYS

    @classmethod
    def of(
        cls,
        per_gpu: int | None,
        total: int | None,
        use_dynamic: bool,
        max_tokens: int | None,
        num_ranks: int,
        keys: tuple[str, str] = LIMIT_KEYS,
    ) -> PassLimits:
        """From the configuration: the per-GPU count wins over the deprecated total, a token budget over both."""
        if use_dynamic:
            return cls(max_tokens=max_tokens, keys=keys)
        if per_gpu is None and total is not None:
            per_gpu = max(1, total // num_ranks)
        return cls(micro_batch_size=per_gpu, keys=keys)

    @contextmanager
    def named(self, *sections: Any) -> Iterator[None]:
        """An error of an engine about one of the two, or about a setting of these sections, gets the full key."""
        full = dict(zip(LIMIT_KEYS, self.keys))
        with full_keys(*sections):
            try:
                yield
            except ConfigError as error:
                if error.key not in full:
                    raise
                key = full[error.key]
                named = ConfigError(error.message, key=key, got=error.got, allowed=error.allowed, fix=error.fix)
                raise named.with_traceback(error.__traceback__) from error.__cause__


class ModelPart:
    """An engine with the settings of one role.

    Args:
        engine: the training backend that holds the model.
        train_limits / infer_limits: micro-batch limits of the two passes.
        loss_fn: what `train` minimises; None for a frozen model.
        temperature: logits are divided by it before every softmax (the sampling temperature for policies).
        mini_batch_rows: rows of one optimizer step on this rank; None: the whole batch in one step.
        sections: of the configuration that the engine is built from, for messages.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        train_limits: PassLimits | None = None,
        infer_limits: PassLimits | None = None,
        loss_fn: LossFn | None = None,
        temperature: float = 1.0,
        mini_batch_rows: int | None = None,
        sections: Sequence[Any] = (),
    ):
        self.engine, self.sections = engine, tuple(sections)
        self.train_limits = train_limits or PassLimits()
        self.infer_limits = infer_limits or self.train_limits
        self.loss_fn = loss_fn
        self.temperature = temperature
        self.mini_batch_rows = mini_batch_rows
        self.being_saved = BackgroundPart()

    def infer(self, batch: DataProto, outputs: tuple[str, ...]) -> dict[str, Any]:
        """Forward passes without gradient: name -> (B, T) float32; see `Engine.infer`."""
        limits = self.infer_limits
        with limits.named(*self.sections):
            return self.engine.infer(
                batch,
                outputs=outputs,
                temperature=self.temperature,
                micro_batch_size=limits.micro_batch_size,
                max_tokens=limits.max_tokens,
            )

    def train(self, batch: DataProto, more_updates: bool = False, is_mini_batch: bool = False) -> MetricSet:
        """One optimizer step per mini-batch of ``batch``, cut in row order unless it is one; see `TrainOptions`.

        The learning-rate schedule advances unless ``more_updates`` says that this global step continues.
        """
        if self.loss_fn is None:
            raise WorkerError("this model is frozen and has no loss", fix="Set a loss before training it.")
        metrics, limits = MetricSet(), self.train_limits
        rows = len(batch) if is_mini_batch else self.mini_batch_rows or len(batch)
        for part in batch.split(rows) if len(batch) else [batch]:  # a rank without rows enters the same collectives
            with limits.named(*self.sections):
                measured = self.engine.train_batch(
                    part,
                    self.loss_fn,
                    temperature=self.temperature,
                    micro_batch_size=limits.micro_batch_size,
                    max_tokens=limits.max_tokens,
                )
            metrics.merge(per_step(measured))
            lengths = part.tensors["attention_mask"].sum(-1).tolist()
            computed = 1.0 - measured.values().get("without_gradient", 0.0)
            seen = self.engine.tower_flops(part.non_tensor_batch.get(PICTURES, ()))
            metrics.add("tflop", (self.engine.train_flops(lengths) + seen) * computed / 1e12, "sum")
            mini_batch_done()
        if not more_updates:
            self.engine.step_scheduler()
        return metrics


def save_part(
    part: ModelPart,
    folder: str,
    contents: tuple[str, ...],
    tokenizer: Tokenizer | None = None,
    background: bool = False,
) -> dict[str, FileRecord]:
    """Write one model's sections and its Hugging Face folder; every rank writes its part and returns its records.

    With ``background`` only the copy is made before this returns; `saved_records` has the records.

    Raises:
        CopiesDifferError: ranks that hold the same hold different bits; nothing is written.
    """
    engine = part.engine
    engine.compare_copies()  # of copies one is written, and it should not be a damaged one
    state, writer = engine.state(), engine.hf_writer(tokenizer)
    engine.only_first(lambda: prepare_part(Path(folder)))

    def write() -> dict[str, FileRecord]:
        if not background:
            return write_part(Path(folder), state, contents, writer)
        part.being_saved.start(Path(folder), state, contents, writer)
        return {}

    return engine.together(write)


def saved_records(part: ModelPart, wait: bool) -> Mapping[str, FileRecord] | None:
    """This rank's records of a background save, or None while it is running."""
    return part.being_saved.wait() if wait else part.being_saved.poll()


def load_part(part: ModelPart, folder: str, contents: tuple[str, ...]) -> None:
    """Load the sections in ``contents``, of which each rank reads what it keeps; the others stay as they are."""
    part.engine.load_state(part.engine.together(lambda: read_part(Path(folder), contents)))


@contextmanager
def watched_memory(phase: str, device: str) -> Iterator[dict[str, Metric]]:
    """Memory around a phase, of the worker that has most: ``perf/memory/<phase>/before/host_gb``, ``.../after/...``.

    The mapping is full once the block has ended. Around sampling it also shows training: before is what
    training left in use, after is what is still in use when training begins.
    """
    metrics = _memory(phase, "before", device)
    yield metrics
    metrics.update(_memory(phase, "after", device))


def _memory(phase: str, moment: str, device: str) -> dict[str, Metric]:
    return {f"perf/memory/{phase}/{moment}/{key}": Metric(value, "max") for key, value in memory_now(device).items()}


def base_of(engine: Any) -> Any:
    """The frozen model that an adapter was put on: the same engine, with the adapter disabled."""
    return AdapterBaseEngine(engine)


def per_step(metrics: MetricSet) -> MetricSet:
    """Metrics of one optimizer step, ready to merge over steps and ranks.

    Inside a step a globally normalised value is a sum over micro-batches (already times the number of ranks, ALGORITHMS
    B.1); over ranks and over steps it is averaged.
    """
    return MetricSet({name: Metric(m.value) if m.reduction == "sum" else m for name, m in metrics.items()})


def local_model(model: HFModelConfig, key: str) -> HFModelConfig:
    """The model section with its path on this machine: fetched from a hub or HDFS, in shared memory if ``use_shm``."""
    local = copy_to_local(model.path, use_shm=model.use_shm, error=ModelError, key=key)
    return replace(model, path=local)


def schedule_steps(optim: OptimizerConfig, context: WorkerContext) -> int:
    """Steps of the learning-rate schedule: ``total_training_steps`` where it is set, else the run's length."""
    return optim.total_training_steps if optim.total_training_steps > 0 else context.total_training_steps


def layout(
    strategy: str,
    model: HFModelConfig,
    fsdp: FSDPEngineConfig,
    megatron: MegatronEngineConfig,
    share_prompts: bool,
    router_replay: bool = False,
    torchtitan: TorchTitanEngineConfig | None = None,
    top_k: int = 0,
) -> dict[str, Any]:
    """``engine`` and ``passes`` of `make_engine`: the section that the backend reads, and how its rows are laid out."""
    kind = ENGINES.get(strategy)
    engine: Any = getattr(kind, "section", Engine.section)(fsdp, megatron, torchtitan)
    aligns = getattr(kind, "aligns_rows", Engine.aligns_rows)
    passes = PassSettings(router_replay=router_replay)
    if aligns:
        passes = PassSettings.of(model, engine, share_prompts, router_replay)
    passes = replace_fields(passes, top_k=top_k)
    return {"engine": engine, "passes": passes}


def data_rank_of(worker: Worker, engine: Engine) -> DataRank:
    """Which part of a batch a worker gets for an engine; by default, each worker a different one."""
    return engine.data_rank or DataRank(worker.rank, worker.world_size, True)


def meshes_of(worker: Worker, **parts: ModelPart | None) -> dict[str, tuple[int, bool]]:
    """`Worker.meshes` of the models that a worker has by now, each under the name of its mesh."""
    data_ranks = {name: data_rank_of(worker, part.engine) for name, part in parts.items() if part is not None}
    return {name: (rank.rank, rank.speaks) for name, rank in data_ranks.items()}


def make_engine(
    strategy: str, place: WorkerInfo | None = None, timeout: float | None = None, **arguments: Any
) -> Engine:
    """The engine class behind a strategy name, built.

    Args:
        place: the worker's among its peers; a backend over several processes connects to them first.
        timeout: seconds after which a peer that does not come is an error (``actor_rollout_ref.nccl_timeout``).

    Raises:
        ConfigError: several workers would each train a separate copy.
        WorkerError: the workers share one process, where a backend over processes cannot work.
    """
    if place is not None and place.world_size > 1:
        _join(strategy, place, timeout, arguments["device"], trains=arguments.get("optim") is not None)
    engine, model, optim = (arguments.get(name) for name in ("engine", "model", "optim"))
    if model is not None and arguments.get("device") == "cpu":
        bytes_of_weight = torch_dtype(getattr(engine, "model_dtype", "float32")).itemsize
        ranks = 1 if place is None else place.world_size
        check_host(model, optim, bytes_of_weight, ranks, arguments.get("freeze_vision_tower", False))
    with full_keys(engine, model, optim):
        return ENGINES.get(strategy)(**arguments)


def _join(strategy: str, place: WorkerInfo, timeout: float | None, device: str, trains: bool) -> None:
    if getattr(ENGINES.get(strategy), "is_alone", Engine.is_alone):
        if trains:
            raise ConfigError(
                f"the {strategy} engine trains in one process, and there are {place.world_size} workers",
                key="actor_rollout_ref.actor.strategy",
                got=strategy,
                fix=f"Leave it out, or set it to {backend_of('auto', place.world_size)}.",
            )
        return  # a frozen model may be replicated on every worker
    if env.get_int("WORLD_SIZE", 1) != place.world_size:
        raise WorkerError(
            f"strategy={strategy} needs one process per worker, and these {place.world_size} workers share one",
            fix="Use trainer.runtime=ray, or one worker.",
        )
    distributed.join_group(place, device, timeout)
