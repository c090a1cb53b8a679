"""What happens around the algorithm: dumps, checkpoints, validation, console samples; one ordered list."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from verl import registry
from verl.config import GlobalProfilerConfig, PPOTrainerConfig
from verl.data.curriculum import FLAT_ROWS
from verl.data.loader import LearnsFromSteps
from verl.data.mixture import Mixture
from verl.data.progress import timed
from verl.data.sample_texts import SampleTexts, turns_of_rows
from verl.errors import CheckpointError, ConfigError
from verl.metrics import log, notice
from verl.observability.profiler import ProfiledSteps
from verl.observability.samples import dump_generations
from verl.observability.token_dump import LEFT_OUT, TokenDump
from verl.observability.tracker import Sample
from verl.protocol import DataProto
from verl.single_controller.base import by_rank
from verl.trainer import expiry
from verl.trainer.copies import CopyCheck
from verl.trainer.ppo import accounting
from verl.trainer.ppo.checkpointing import RunCheckpoints
from verl.trainer.ppo.context import RunState, StepContext
from verl.trainer.ppo.sample_rows import last_rows
from verl.trainer.ppo.schedules import ScheduleRun
from verl.trainer.ppo.signs import signs_of
from verl.trainer.ppo.token_rows import TokenRows
from verl.trainer.ppo.validation import Validator
from verl.trainer.signals import StepDropped
from verl.trainer.watch import Watch
from verl.workers.model import ModelWorker
from verl.workers.profiling import ProfiledWorker
from verl.workers.roles import Roles

ON_SAVE = "trainer.checkpoint_callback_class"


class RunningTrainer(Protocol):
    """What a hook sees of the trainer: `RayPPOTrainer` and trainers like it."""

    config: PPOTrainerConfig
    state: RunState
    ctx: StepContext
    roles: Roles
    schedule: ScheduleRun
    checkpoints: RunCheckpoints
    validator: Validator | None
    texts: SampleTexts

    def describe_samples(self, batch: DataProto) -> dict[str, Any]:
        """Prompt, response, score and reward details of every row as text."""

    def show_samples(self, title: str, shown: list[Sample]) -> None:
        """Send a few completions to the trackers that can show text."""

    def log(self, metrics: dict[str, float], step: int) -> None:
        """Send metrics to the trackers."""

    def sample_folder(self, setting: str) -> Path | None:
        """The folder for samples that ``trainer.<setting>`` names, this run's own; None where it names none."""

    def save_checkpoint(self) -> None:
        """Write a checkpoint of this step."""

    def validate(self) -> dict[str, float]:
        """Validate with the sampler's current weights; returns the metrics."""


class Callback:
    """Hooks of a run; every one is optional. A hook may add metrics through ``trainer.ctx.metrics``.

    ``trainer.ctx`` is the context of the step that is learned from, ``trainer.state`` what outlives it.
    """

    def on_load(self, trainer: RunningTrainer) -> None:
        """A checkpoint was loaded, or there is none; the sampler has no weights yet."""

    def on_fit_begin(self, trainer: RunningTrainer) -> None:
        """Before the first step."""

    def on_step_begin(self, trainer: RunningTrainer) -> None:
        """Before prompts are taken; ``trainer.ctx.step`` is the step's number."""

    def on_step_end(self, trainer: RunningTrainer, batch: DataProto) -> None:
        """After the update; the sampler still has the old weights until all callbacks before `Publish` ran."""

    def on_fit_end(self, trainer: RunningTrainer) -> None:
        """After the last step, in every orderly end of the run."""


class CountSources(Callback):
    """``data/prompts/<source>``: the prompts of each source that a step trained on (``data.source_weights``)."""

    def __init__(self, mixture: Mixture) -> None:
        self.mixture = mixture

    def on_step_end(self, trainer: RunningTrainer, batch: DataProto) -> None:
        columns = batch.non_tensor_batch
        rows = dict(zip(columns["uid"], columns[accounting.ROW], strict=True)).values()
        for name, count in self.mixture.count(rows).items():
            trainer.ctx.metrics.add(f"data/prompts/{name}", count, "last")


class UpdateCurriculum(Callback):
    """Gives every batch that was trained on to the sampler of the prompts, before a checkpoint takes its state.

    The batch says which prompts dynamic sampling dropped before it was complete (`FLAT_ROWS`).
    """

    def __init__(self, sampler: LearnsFromSteps) -> None:
        self.sampler = sampler

    def on_step_end(self, trainer: RunningTrainer, batch: DataProto) -> None:
        with trainer.ctx.timed("update_sampler"):
            samples = last_rows(batch)
            facts = {**batch.meta_info, FLAT_ROWS: trainer.ctx.flat_rows}
            self.sampler.update(DataProto(samples.batch, samples.non_tensor_batch, facts))
        metrics = getattr(self.sampler, "metrics", None)
        if callable(metrics):
            for name, value in metrics().items():
                trainer.ctx.metrics.add(name, value, "last")


class DumpRollouts(Callback):
    """``trainer.rollout_data_dir``: files of samples per step, as JSON lines and, with their tokens, as parquet."""

    def __init__(self) -> None:
        self._tokens: TokenDump | None = None
        self._rows: TokenRows | None = None

    def on_step_end(self, trainer: RunningTrainer, batch: DataProto) -> None:
        folder, settings = trainer.sample_folder("rollout_data_dir"), trainer.config.trainer
        if folder is None:
            return
        with trainer.ctx.timed("dump_rollout_generations"):
            rows = trainer.describe_samples(batch)
            dump_generations(folder, trainer.ctx.step, **rows)
        if settings.rollout_data_tokens <= 0:
            return
        with trainer.ctx.timed("dump_rollout_tokens"):
            if self._tokens is None or self._rows is None:
                self._tokens = TokenDump(folder, settings.rollout_data_max_bytes)
                self._rows = TokenRows(trainer.config, trainer.texts)
            updated = accounting.was_updated(trainer.roles, trainer.ctx)
            self._tokens.put(trainer.ctx.step, self._rows.of(batch, rows, trainer.ctx, updated))
            trainer.ctx.metrics.add(LEFT_OUT, self._tokens.left_out, "sum")

    def on_fit_end(self, trainer: RunningTrainer) -> None:
        if self._tokens is not None:
            self._tokens.close()
            self._tokens = None


class ShowSamples(Callback):
    """A few sampled completions on the console, at the first step and then every ``test_freq`` steps."""

    def on_step_end(self, trainer: RunningTrainer, batch: DataProto) -> None:
        config, step = trainer.config.trainer, trainer.ctx.step
        count = config.log_train_generations
        if count <= 0 or (step != 1 and (config.test_freq <= 0 or step % config.test_freq)):
            return
        first = last_rows(batch).slice(0, count)
        rows = trainer.describe_samples(first)
        columns = [rows[name] for name in ("inputs", "outputs", "scores", "gts")]
        columns += [
            trainer.texts.questions(first, rows["inputs"]),
            turns_of_rows(rows["reward_extra_infos"], len(first)),
            trainer.texts.pictures(first, count),
        ]
        shown = [Sample(*row) for row in zip(*columns)]
        trainer.show_samples("sampled completions", shown)


class WatchLearning(Callback):
    """One notice where a run cannot learn: equal rewards, empty or cut-off answers, no gradient."""

    def __init__(self) -> None:
        self.watch = Watch()

    def on_step_end(self, trainer: RunningTrainer, batch: DataProto) -> None:
        self.watch.step(signs_of(batch, trainer.ctx))

    def on_fit_end(self, trainer: RunningTrainer) -> None:
        self.watch.end()


class CompareCopies(Callback):
    """Every ``trainer.copy_check_freq`` steps: do ranks that hold the same weights still hold the same bits?"""

    def __init__(self, every: int) -> None:
        self._check = CopyCheck(every)

    def on_step_end(self, trainer: RunningTrainer, batch: DataProto) -> None:
        if not self._check.is_due(trainer.ctx.step):
            return
        models = [*trainer.roles.of_kind("trainable").values(), *trainer.roles.of_kind("frozen").values()]
        with trainer.ctx.timed("compare_copies"):
            self._check.run(lambda: sum(max(by_rank(model.group, ModelWorker.compare_copies)()) for model in models))


class SaveCheckpoint(Callback):
    """Every ``trainer.save_freq`` steps, at the end of the run, and before a platform takes its machine away."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock, self._began = clock, 0.0
        self._longest = {"step": 0.0, "save": expiry.SAVE_SECONDS}

    def on_step_begin(self, trainer: RunningTrainer) -> None:
        self._began = self._clock()

    def on_step_end(self, trainer: RunningTrainer, batch: DataProto) -> None:
        settings, ctx, now = trainer.config.trainer, trainer.ctx, self._clock()
        every, spare = settings.save_freq, settings.esi_redundant_time
        self._longest["step"] = max(self._longest["step"], now - self._began)
        if every <= 0:
            return
        due = ctx.step % every == 0 or ctx.step == ctx.run.total_steps
        if not due and expiry.should_save_ckpt_esi(
            self._longest["step"], self._longest["save"], spare, clock=self._clock
        ):
            log.warning("step %d is saved: the machine is taken away before a further one would be", ctx.step)
            due = True
        if due:
            with ctx.timed("save_checkpoint"):
                trainer.save_checkpoint()
            self._longest["save"] = max(self._longest["save"], self._clock() - now)


class Publish(Callback):
    """Publishes the updated weights to the sampler."""

    def on_step_end(self, trainer: RunningTrainer, batch: DataProto) -> None:
        trainer.schedule.publish(trainer.roles, trainer.ctx)


class Validate(Callback):
    """Before training, every ``trainer.test_freq`` steps, and after the last one."""

    def on_fit_begin(self, trainer: RunningTrainer) -> None:
        settings, resumed = trainer.config.trainer, trainer.ctx.step > 0
        if trainer.validator is None or not (settings.val_before_train or settings.val_only):
            return
        if resumed and not settings.val_only:
            notice("trainer.val_before_train", "the run resumes, so the model is validated at the next test_freq only")
            return
        with trainer.ctx.run.stop.droppable(), trainer.ctx.timed("testing"), timed("validating"):
            metrics = trainer.validate()
        trainer.log(metrics, trainer.ctx.step)

    def on_step_end(self, trainer: RunningTrainer, batch: DataProto) -> None:
        every, ctx = trainer.config.trainer.test_freq, trainer.ctx
        if trainer.validator is None or every <= 0 or (ctx.step % every and ctx.step != ctx.run.total_steps):
            return
        with suppress(StepDropped), ctx.run.stop.droppable(), ctx.timed("testing"):
            for name, value in trainer.validate().items():
                ctx.metrics.add(name, value, "last")


class Profile(Callback):
    """``global_profiler.steps``: what workers compute from before sampling to after the update is recorded."""

    def __init__(self, config: GlobalProfilerConfig):
        self.steps = ProfiledSteps(config.steps, config.profile_continuous_steps)
        self.runs = False

    def on_step_begin(self, trainer: RunningTrainer) -> None:
        name = self.steps.beginning(trainer.ctx.step)
        if name is not None:
            self.runs = True
            with trainer.ctx.timed("start_profile"):
                for group in trainer.roles.groups():
                    by_rank(group, ProfiledWorker.start_profile)(name)

    def on_step_end(self, trainer: RunningTrainer, batch: DataProto) -> None:
        if self.steps.is_end(trainer.ctx.step):
            with trainer.ctx.timed("stop_profile"):
                self._stop(trainer)

    def on_fit_end(self, trainer: RunningTrainer) -> None:
        if self.runs:  # the run ended amid steps that share a recording
            self._stop(trainer)

    def _stop(self, trainer: RunningTrainer) -> None:
        self.runs = False
        for group in trainer.roles.groups():
            by_rank(group, ProfiledWorker.stop_profile)()


class CheckpointCallback:
    """Notified of a checkpoint in the controller's process, once every file of it is in place.

    Example:
        >>> class Register(CheckpointCallback):
        ...     def on_save(self, trainer, global_step, checkpoint_dir, **more):
        ...         models.register(checkpoint_dir, global_step)
    """

    def __init__(self, config: PPOTrainerConfig | None = None):
        self.config = config

    def on_save(
        self, trainer: Any, global_step: int, checkpoint_dir: str, async_save: bool = False, **more: Any
    ) -> None:
        """After a save; an exception ends the run, and the checkpoint stays.

        Args:
            trainer: the running `RayPPOTrainer`.
            checkpoint_dir: the folder ``global_step_N``; retention may delete it after later saves.
            async_save: it was written in the background. It is complete in either case.
            more: what later versions pass in addition.
        """


def build_checkpoint_callback(config: PPOTrainerConfig) -> Any:
    """The callback that the configuration names, made with ``config=config``; one that does nothing without a name.

    Raises:
        ConfigError: there is no such class, it has no method ``on_save``, or it cannot be made like that.
    """
    path = config.trainer.checkpoint_callback_class
    if not path:
        return CheckpointCallback(config)
    try:
        named = registry.load_object(path)
    except ConfigError as error:
        raise ConfigError(error.message, key=ON_SAVE, got=path, fix=error.fix) from error
    if not inspect.isclass(named) or not callable(getattr(named, "on_save", None)):
        fix = "Name a class with a method on_save, e.g. of verl.trainer.ppo.callbacks.CheckpointCallback."
        raise ConfigError("this is no class of checkpoint callbacks", key=ON_SAVE, got=path, fix=fix)
    try:
        inspect.signature(named).bind(config=config)
    except TypeError as error:
        fix = "Its __init__ takes the configuration as the parameter config."
        raise ConfigError(f"it cannot be made with config=...: {error}", key=ON_SAVE, got=path, fix=fix) from error
    make: Callable[..., Any] = named
    return make(config=config)


class TellSaved(Callback):
    """Calls the user's class after every complete checkpoint."""

    def __init__(self, config: PPOTrainerConfig):
        self._user = build_checkpoint_callback(config)

    def on_load(self, trainer: RunningTrainer) -> None:
        trainer.checkpoints.on_saved = partial(self._saved, trainer)

    def _saved(self, trainer: RunningTrainer, step: int, folder: Path, background: bool) -> None:
        try:
            self._user.on_save(trainer=trainer, global_step=step, checkpoint_dir=str(folder), async_save=background)
        except (Exception, SystemExit) as error:  # boundary: the user's code
            raise CheckpointError(
                f"on_save failed after step {step}: {type(error).__name__}: {error}",
                key=ON_SAVE,
                got=trainer.config.trainer.checkpoint_callback_class,
                fix=f"The checkpoint is complete: {folder}.",
            ) from error


def default_callbacks(config: PPOTrainerConfig) -> list[Callback]:
    """In upstream's order of a step: dump, save, publish, validate; what is damaged is neither saved nor published.

    A background weight update starts before anything is written.
    """
    rest: list[Callback] = [DumpRollouts(), ShowSamples(), WatchLearning(), SaveCheckpoint()]
    rest.insert(0 if config.trainer.async_weight_update else len(rest), Publish())
    check = [CompareCopies(config.trainer.copy_check_freq)] if config.trainer.copy_check_freq > 0 else []
    return [Profile(config.global_profiler), *check, *rest, Validate()]
