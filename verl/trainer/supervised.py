"""The one loop of supervised training: SFT as it is; methods on pairs of answers change its batches (`pairs.py`).

The loop runs alone or, started by torchrun, on every rank: see `verl.single_controller.spmd`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from verl import device as devices
from verl.algorithms.losses import LossFn
from verl.checkpoint import (
    BackgroundCopies,
    BestCheckpoint,
    CheckpointReader,
    CheckpointWriter,
    FileRecord,
    RemoteCheckpoints,
    check_metric,
    find_or_fetch,
    noted_reading,
)
from verl.checkpoint.provenance import Provenance, check_resume
from verl.config import HFModelConfig, to_dict
from verl.config.machine.topology import backend_of
from verl.config.schema.sft import EACH_EPOCH, SupervisedConfig
from verl.data import StatefulLoader
from verl.data.progress import timed
from verl.distributed import Ranks
from verl.errors import ConfigError
from verl.journal.ending import recorded_end
from verl.metrics import notice
from verl.observability.profiler import ProfiledSteps, RoleProfiler
from verl.observability.tracking import Tracking
from verl.protocol import DataProto
from verl.protocol.tokenizer import Tokenizer
from verl.single_controller.spmd import Spmd
from verl.trainer import rng, runtime
from verl.trainer.copies import CopyCheck
from verl.trainer.signals import StopSignals
from verl.trainer.watch import Updates, Watch, signs_of_supervised
from verl.workers.part import ModelPart, PassLimits, layout, load_part, local_model, make_engine, save_part


class RowTable(Protocol):
    """A dataset: numbered rows."""

    def __len__(self) -> int: ...

    def __getitem__(self, number: int, /) -> Mapping[str, Any]: ...


GPU_TOKENS = 8192
"""Of one pass on a GPU, where the settings name no number."""


class SupervisedTrainer:
    """Epochs over a dataset with one optimizer step per batch, validation loss, checkpoints and trackers.

    Args:
        config: the typed configuration of a supervised run.
        tokenizer: written into the exported folder.
        train_dataset, val_dataset: rows that ``collate`` turns into a batch; ``val_dataset`` may be None.
        collate: rows -> tensors ``input_ids``, ``attention_mask``, ``position_ids``, ``loss_mask``, each (B, L); for
            models that take images also ``multi_modal_inputs`` (B,).
        loss_fn: what is minimised.
        ctx: this rank's view of a run on several; None is a run on one.
    """

    kind = "causal_lm"
    """Of the model: a language model, or one with a scalar head (``value``)."""
    together = 1
    """Number of consecutive rows of a batch that go to one rank and one micro-batch."""
    validates: tuple[str, ...] = ("log_probs",)
    """Outputs of the forward pass that `validate` reads, and the loss must name."""

    def __init__(
        self,
        config: SupervisedConfig,
        tokenizer: Tokenizer,
        train_dataset: RowTable,
        val_dataset: RowTable | None,
        collate: Callable[[list[Any]], Any],
        loss_fn: LossFn,
        ctx: Spmd | None = None,
    ):
        self.config, self.tokenizer, self.loss_fn = config, tokenizer, loss_fn
        self.ctx = ctx or Spmd(Ranks(), config.trainer.seed)
        data, trainer = config.data, config.trainer
        common = {"seed": trainer.seed, "num_workers": data.num_workers, "collate_fn": collate}
        self.train_loader = StatefulLoader(
            train_dataset, batch_size=data.train_batch_size, shuffle=True, drop_last=True, **common
        )
        self.val_loader = None
        if val_dataset is not None:
            if missing := set(self.validates) - set(loss_fn.outputs):
                raise ConfigError(
                    f"validation reads {', '.join(missing)} of the forward pass, which the loss does not name",
                    key=f"{type(loss_fn).__name__}.outputs",
                    got=loss_fn.outputs,
                    allowed=f"{', '.join(self.validates)} and more",
                    fix="Add it to the loss's tuple outputs, or set data.val_files=null; a class that overrides "
                    "validate sets validates.",
                )
            rows = min(data.train_batch_size, len(val_dataset))
            self.val_loader = StatefulLoader(val_dataset, batch_size=rows, shuffle=False, drop_last=False, **common)
        self.total_steps = trainer.total_training_steps or len(self.train_loader) * trainer.total_epochs
        self.save_every, self.test_every = self._steps_of(trainer.save_freq), self._steps_of(trainer.test_freq)
        self.copies = CopyCheck(trainer.copy_check_freq)
        with timed("loading the model"):
            self.part = self._make_part()
        self.profiler = RoleProfiler("model", config.profiler, self.ctx.ranks.rank)
        first, last = trainer.profile_interval
        self.profiled_steps = ProfiledSteps(list(range(first, last + 1)) if first > 0 else None)
        self.step = 0
        self.writer: CheckpointWriter | None = None
        self.provenance = Provenance.of(config)
        self.places: dict[str, str] = {}

    @property
    def engine(self) -> Any:
        """The training backend (`verl.engines.base.Engine`) behind the model."""
        return self.part.engine

    def _steps_of(self, frequency: int | str) -> int:
        return len(self.train_loader) if frequency == EACH_EPOCH else int(frequency)

    def _make_part(self) -> ModelPart:
        optim = self.config.optim
        engine = self.make_engine(
            local_model(self.config.model, "model.path"),
            optim=optim,
            kind=self.kind,
            grad_clip=optim.clip_grad,
            total_training_steps=optim.total_training_steps if optim.total_training_steps > 0 else self.total_steps,
        )
        return ModelPart(engine, train_limits=self.limits, loss_fn=self.loss_fn)

    def make_engine(self, model: HFModelConfig, **arguments: Any) -> Any:
        """A model on the run's backend and device; without ``optim`` a frozen one.

        Rows that belong together have one prompt, which is computed once where rows are packed.
        """
        c = self.config
        named = backend_of(c.engine.strategy, self.ctx.world_size)
        return make_engine(
            named,
            model=model,
            **layout(
                named,
                model,
                c.engine,
                c.engine.megatron,
                share_prompts=self.together > 1,
                torchtitan=c.engine.torchtitan,
            ),
            device=devices.resolve_device(c.trainer.device),
            seed=c.trainer.seed,
            **arguments,
        )

    @property
    def limits(self) -> PassLimits:
        """Rows or tokens of one forward pass."""
        data, tokens = self.config.data, self.config.data.max_token_len_per_gpu
        if tokens is None and devices.resolve_device(self.config.trainer.device) != "cpu":
            tokens = max(GPU_TOKENS, self.together * data.max_length)
        return PassLimits.of(data.micro_batch_size_per_gpu, None, data.use_dynamic_bsz, tokens, 1)

    def fit(self) -> None:
        """Train to the end; the last step is validated and saved where these are switched on."""
        trainer, ctx = self.config.trainer, self.ctx
        if self.save_every > 0:
            self.writer = ctx.only_main(self._make_writer)
        try:
            with StopSignals(drop_at_once=False) as stop:
                self.load_checkpoint()
                ctx.only_main(lambda: runtime.write_config(self.config))
                config, logger = to_dict(self.config), trainer.logger if ctx.is_main else []
                folder = Path(trainer.default_local_dir)
                noted = recorded_end(folder, self.total_steps) if ctx.is_main else nullcontext()
                with noted, Tracking(trainer.project_name, trainer.experiment_name, logger, config) as tracking:
                    self.places |= tracking.start(self.total_steps, self.step, self.places)
                    with runtime.page_of_run(self.config, tracking) if ctx.is_main else nullcontext():
                        self._validate_and_train(tracking, stop)
        finally:
            if self.writer is not None:
                self.writer.close()

    def _validate_and_train(self, tracking: Tracking, stop: StopSignals) -> None:
        if self.config.trainer.val_before_train and self.val_loader is not None and self.step == 0:
            with timed("validating"):
                metrics = self._validated()
            tracking.log(metrics, 0)
        self._run_steps(tracking, stop)

    def _make_writer(self) -> CheckpointWriter:
        trainer, remote = self.config.trainer, RemoteCheckpoints.of(self.config.trainer)
        copies = None if remote is None else BackgroundCopies(remote)
        keep, best = {"model": trainer.max_ckpt_to_keep}, BestCheckpoint.of(trainer)
        return CheckpointWriter(trainer.default_local_dir, keep=keep, copies=copies, best=best)

    def _run_steps(self, tracking: Tracking, stop: StopSignals) -> None:
        batches, watch, updates, before = self._batches(), Watch(), Updates(), None
        while self.step < self.total_steps:
            started = time.perf_counter()
            batch = next(batches)
            with self._profiled(self.step + 1):
                metrics = self._train(batch)
            self.step += 1
            metrics["train/time(s)"] = time.perf_counter() - started
            last = self.step == self.total_steps
            if self.val_loader is not None and self.test_every > 0 and (last or self.step % self.test_every == 0):
                metrics |= self._validated()
            updates.add("model", {name.removeprefix("train/"): value for name, value in metrics.items()})
            tracking.log(metrics, self.step)
            watch.step(signs_of_supervised(metrics, before, int(batch.tensors["response_mask"].sum())))
            before = metrics["train/loss"]
            (stops,) = self.ctx.sum(float(stop.requested))  # every rank stops after the same step
            ends = stops > 0 and not last
            if self.copies.is_due(self.step):
                self.copies.run(self.engine.compare_copies)
            if self.save_every > 0 and (last or ends or self.step % self.save_every == 0):
                if self.writer is not None and self.writer.best is not None:
                    self.writer.best.offer(self.step, metrics)
                self.save_checkpoint()
            if ends:
                raise stop.stopped(self._stop_reason(), says=self.ctx.is_main)
        watch.end()
        self.ctx.only_main(updates.check)

    def _stop_reason(self) -> str:
        trainer = self.config.trainer
        if self.save_every <= 0:
            return f"stopped at step {self.step}; nothing is saved, because trainer.save_freq is not set"
        return f"stopped after step {self.step}, which is saved in {trainer.default_local_dir}/global_step_{self.step}"

    def _train(self, batch: DataProto) -> dict[str, float]:
        """One optimizer step on this rank's rows of ``batch``; the metrics of all rows, equal on every rank."""
        measured = self.part.train(self.complete(self._share(batch))).values()
        (measured["tflop"],) = self.ctx.sum(measured["tflop"])  # counted over a rank's own rows
        metrics = {f"train/{name}": value for name, value in measured.items()}
        metrics["train/global_tokens"] = int(batch.tensors["attention_mask"].sum())
        return metrics

    @contextmanager
    def _profiled(self, step: int) -> Iterator[None]:
        name = self.profiled_steps.beginning(step)
        if name is None:
            yield
            return
        self.profiler.begin(name)
        try:
            with self.profiler.phase("train"):
                yield
        finally:
            self.profiler.end()

    def _share(self, batch: DataProto) -> DataProto:
        return self.ctx.share(batch, balance=self.config.trainer.balance_batch, together=self.together)

    def _batches(self) -> Iterator[DataProto]:
        while True:
            for rows in self.train_loader:
                yield self.make_batch(rows)

    def make_batch(self, rows: dict[str, Any]) -> DataProto:
        """What the collated rows of a dataset are for the engine."""
        return supervised_batch(rows)

    def complete(self, batch: DataProto, split: str = "train") -> DataProto:
        """This rank's rows with what the loss needs besides them; ``split`` is where they are from: train or val."""
        return batch

    def _validated(self) -> dict[str, float]:
        metrics = self.validate()
        check_metric(self.config.trainer, metrics)
        return metrics

    def validate(self) -> dict[str, float]:
        """Means per trained token over the validation rows: ``val/loss``, the negative log-likelihood, and with a
        teacher ``val/distillation/loss``.
        """
        assert self.val_loader is not None, "there is nothing to validate on"
        names, totals, count = self.loss_fn.outputs, [0.0] * len(self.loss_fn.outputs), 0
        for rows in self.val_loader:
            batch = self._share(self.make_batch(rows))
            outputs = self.part.infer(batch, names)
            totals = [total + outputs[name].sum().item() for total, name in zip(totals, names)]  # 0 outside the mask
            count += int(batch.tensors["response_mask"].sum())
        *totals, everyone = self.ctx.sum(*totals, count)
        means = {name: total / max(everyone, 1) for name, total in zip(names, totals)}
        of_teacher = {"val/distillation/loss": means["full_kl"]} if "full_kl" in means else {}
        return {"val/loss": -means["log_probs"], **of_teacher}

    def save_checkpoint(self) -> None:
        """Write ``global_step_<step>`` with the model as a Hugging Face folder in ``model/huggingface``."""
        state = {"step": self.step, "data": self.train_loader.state_dict(), "rng": rng.rng_state()}
        contents, writer = tuple(self.config.checkpoint.save_contents), self.writer

        def begin() -> str:
            assert writer is not None, "saving is off"
            return str(writer.begin(self.step, ("model",), state, self.provenance.files(self.places)))

        folder = Path(self.ctx.on_main(begin)) / "model"
        with nullcontext() if writer is None else writer.guarded():
            records = save_part(self.part, str(folder), contents, self.tokenizer)
            everyone = self.ctx.ranks.exchange({name: asdict(record) for name, record in records.items()})
        written = {name: FileRecord(**record) for answer in everyone for name, record in answer.items()}

        def complete() -> None:
            assert writer is not None, "it has begun"
            writer.complete({"model": written})

        self.ctx.only_main(complete)

    def load_checkpoint(self) -> None:
        """Continue from the checkpoint that ``trainer.resume_mode`` names, if there is one; rank 0 chooses it."""
        trainer, ctx = self.config.trainer, self.ctx
        accept = trainer.resume_changed == "accept"

        def find() -> CheckpointReader | None:
            folder = find_or_fetch(
                trainer.default_local_dir,
                trainer.resume_mode,
                trainer.resume_from_path,
                RemoteCheckpoints.of(trainer),
            )
            if self.writer is not None and self.writer.copies is not None:
                self.writer.copies.catch_up(self.writer.root)
            if folder is None:
                return None
            self.places = dict(check_resume(self.provenance, folder, accept))
            return CheckpointReader(folder)

        reader = ctx.only_main(find)
        root = Path(trainer.default_local_dir)
        with nullcontext() if reader is None else noted_reading(root, reader.folder):
            self._load(reader)

    def _load(self, reader: CheckpointReader | None) -> None:
        """Take over what rank 0 reads; ``reader`` is None on the others, and where there is nothing to read."""
        checkpoint, ctx = self.config.checkpoint, self.ctx
        state: dict[str, Any] | None = ctx.on_main(lambda: None if reader is None else reader.trainer_state())
        if state is None:
            return
        self.train_loader.load_state_dict(state["data"])
        rng.set_rng_state(state["rng"])
        self.step = int(state["step"])
        ctx.set_generator(self.step)
        contents = tuple(checkpoint.load_contents or checkpoint.save_contents)
        folder = ctx.on_main(lambda: "" if reader is None else str(reader.folder / "model"))
        # Behind the controller's generators, because it holds each rank's own; of which python's and numpy's are the
        # controller's here, and so the same on all ranks, also on more of them than before.
        load_part(self.part, folder, contents)
        rng.set_host_rng_state(state["rng"])
        if reader is not None:
            notice("trainer.resume_mode", f"continues from {reader.folder}")


def supervised_batch(rows: dict[str, Any]) -> DataProto:
    """Rows of a supervised dataset as the engines take them: every token but the first is a 'response' token.

    Shapes: ``input_ids`` (B, L) gives ``responses`` and ``response_mask`` (B, L - 1).
    """
    return DataProto.from_dict(
        tensors={
            "input_ids": rows["input_ids"],
            "attention_mask": rows["attention_mask"],
            "position_ids": rows["position_ids"],
            "responses": rows["input_ids"][:, 1:],
            "response_mask": rows["loss_mask"][:, 1:],
        },
        non_tensors=images_of(rows),
    )


def images_of(rows: dict[str, Any]) -> dict[str, Any]:
    """The column (B,) with what each row's images are for the model, where the model takes images."""
    return {name: rows[name] for name in ("multi_modal_inputs",) if name in rows}
