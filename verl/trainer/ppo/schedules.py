"""The schedules: how far sampling may be ahead of training. Each is a row of data; `ScheduleRun` follows any of them.

In every row step s begins with the weights of version s - 1, and they are sent to the samplers when it is over. T is
``data.train_batch_size``, the prompts of a step.

- ``sync``: a step samples the batch that it trains on. What dynamic sampling has left over opens the next one, and with
  ``rollout.keep_unfinished`` responses continue in the next step.
- ``one_step_off``: while a batch is learned from, the next one is sampled with the weights from before that update:
  every token is exactly one version old; those of the first step are new, those of a response that continues
  (``rollout.keep_unfinished``) older. Where the samplers share the trainers'
  processes the two take turns, the sampling first: the same numbers.
- ``colocate_async`` and ``separate_async``: a queue of ``num_warmup_batches`` batches ahead, a part of one by its
  share. In ``separate_async`` a step is ``parameter_sync_step`` mini-batches. Where the sampler's log-probs are the old
  ones, each is trained on when it is complete; else the step takes its batch as one, as all mini-batches share the
  log-probs of one old policy.
- ``fully_async``: ``async_training.staleness_threshold`` is the share f of a step that may be sampled before its
  weights. A step is ``trigger_parameter_sync_step`` chunks of ``require_batches`` mini-batches, each trained on when it
  is complete. Between two updates at most (1 + f) T groups are sampled, those that wait from before included.

The clock is logical: which groups are admitted, and under which version, follows from counts. With a queue, weights are
sent once every admitted group was sampled: a token's version is the same whether groups are sampled one by one or in
turn with training; ``rollout.requests_at_update`` lets groups in flight go on instead.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import Any

from verl.config import PPOTrainerConfig
from verl.config.schema.root import candidate_prompts, prompts_at_once, sampler_is_old_policy
from verl.data.loader import PromptSource
from verl.metrics import notice
from verl.protocol import DataProto
from verl.single_controller.base import by_rank, collected
from verl.single_controller.base.interrupts import side_by_side
from verl.trainer.ppo import correction, stages, staleness
from verl.trainer.ppo.admission import GroupAdmission
from verl.trainer.ppo.context import RunState, StepContext
from verl.trainer.ppo.groups import together
from verl.trainer.ppo.step import Stage, learn
from verl.trainer.ppo.stream import GroupStream
from verl.workers.model import ModelRole, ModelWorker
from verl.workers.roles import Roles
from verl.workers.sampling import SamplingWorker
from verl.workers.sending import SyncResult

BEHIND = 1
"""Versions by which ``one_step_off`` trails."""


@dataclass(frozen=True)
class Schedule:
    """How sampling and training take turns.

    Args:
        admission: from a run's configuration, how far sampling may be ahead.
        prefix: of the metrics of its queue; empty: it has none.
        prefetches: the next batch is sampled while, or before, a step learns.
        checks: the age of every trained token is reported and held to the bound.
        prompt_limit: from a run's configuration, the prompts after which the run ends; None: no such limit.
        stages: of a recipe, between the samples and their advantages.
        models: of a recipe, from a run's configuration: models besides the library's roles, in the order in which they
            are built.

    Example:
        >>> import dataclasses
        >>> def rate(batch, roles, ctx): ...
        >>> RATED = dataclasses.replace(SYNC, stages=(rate,))    # trainer.v1.trainer_mode=my_package.my_module:RATED
    """

    admission: Callable[[PPOTrainerConfig], GroupAdmission]
    prefix: str = ""
    prefetches: bool = False
    checks: bool = True
    prompt_limit: Callable[[PPOTrainerConfig], int | None] = lambda _: None
    stages: tuple[Stage, ...] = ()
    models: Callable[[PPOTrainerConfig], list[ModelRole]] = lambda _: []

    def steps_of(self, config: PPOTrainerConfig, batches: int) -> int:
        """Steps in an epoch of ``batches`` of the loader, which may have another size than a step's."""
        admission = self.admission(config)
        if admission.by_batch and admission.trained_on is None:
            return batches
        return max(1, batches * prompts_at_once(config.data) // admission.groups)

    def length_of(self, config: PPOTrainerConfig, steps_per_epoch: int) -> int:
        """Steps of the run."""
        steps = config.trainer.total_training_steps or steps_per_epoch * config.trainer.total_epochs
        prompts = self.prompt_limit(config)
        return steps if prompts is None else min(steps, max(1, prompts // self.admission(config).groups))


def admission_of(config: PPOTrainerConfig, chunk: int, **rules: Any) -> GroupAdmission:
    """A step of chunks that each train on ``chunk`` prompts, chosen from ``data.oversample_factor`` times as many."""
    each = candidate_prompts(config.data, chunk)
    if each == chunk and config.data.oversample_factor > 1:
        why = f"has no effect: {config.data.oversample_factor} x {chunk} prompts of a chunk, rounded down, are {each}"
        notice("data.oversample_factor", why)
    number = None if config.data.oversample_factor == 1 else chunk
    return GroupAdmission(config.data.train_batch_size // chunk * each, each, trained_on=number, **rules)


def in_turn(config: PPOTrainerConfig) -> GroupAdmission:
    """The batch of the step itself."""
    rules = {"in_order": False, "overdue": "reweight", "by_batch": True, "in_work": _in_work(config)}
    return admission_of(config, config.data.train_batch_size, **rules)


def _in_work(config: PPOTrainerConfig) -> int | None:
    data, rollout = config.data, config.actor_rollout_ref.rollout
    if not rollout.keep_unfinished:
        return None
    return prompts_in_work(candidate_prompts(data, data.train_batch_size), rollout.over_sample_rate)


def prompts_in_work(trained: int, rate: float) -> int:
    """Prompts that are sampled at once, so that a share of ``rate`` may be left when ``trained`` of them are done."""
    return math.ceil(trained / (1 - Fraction(str(rate))))


def one_batch_ahead(config: PPOTrainerConfig) -> GroupAdmission:
    """The next step's batch."""
    in_work = _in_work(config)
    overdue = "drop" if in_work is None else "reweight"  # a response is as old as its steps of sampling
    rules = {"staleness": BEHIND, "in_order": False, "overdue": overdue, "by_batch": True, "in_work": in_work}
    return admission_of(config, config.data.train_batch_size, ahead=Fraction(BEHIND), **rules)


def of_warmup(config: PPOTrainerConfig) -> GroupAdmission:
    """Batches ahead on the trainers' devices."""
    return _with_warmup(config, config.data.train_batch_size, config.trainer.v1.colocate_async.num_warmup_batches)


def of_separate_warmup(config: PPOTrainerConfig) -> GroupAdmission:
    """Batches ahead on devices of the samplers."""
    streams = sampler_is_old_policy(config)
    chunk = config.actor_rollout_ref.actor.ppo_mini_batch_size if streams else config.data.train_batch_size
    return _with_warmup(config, chunk, config.trainer.v1.separate_async.num_warmup_batches)


def _with_warmup(config: PPOTrainerConfig, chunk: int, warmup: float) -> GroupAdmission:
    """``warmup`` batches ahead, by the rules of ``trainer.v1.sampler``."""
    rules = config.trainer.v1.sampler
    threshold = rules.max_off_policy_threshold
    return admission_of(
        config,
        chunk,
        ahead=Fraction(str(warmup)),
        staleness=threshold,
        in_order=rules.order == "admission",
        overdue="reweight" if threshold is None else rules.max_off_policy_strategy,
    )


def of_threshold(config: PPOTrainerConfig) -> GroupAdmission:
    """A share of a step ahead."""
    settings, rules = config.async_training, config.trainer.v1.sampler
    chunk = settings.require_batches * config.actor_rollout_ref.actor.ppo_mini_batch_size
    ahead = Fraction(str(settings.staleness_threshold))
    in_order, overdue = rules.order == "admission", rules.max_off_policy_strategy
    return admission_of(config, chunk, ahead=ahead, in_order=in_order, overdue=overdue)


SYNC = Schedule(in_turn, checks=False)
ONE_STEP_OFF = Schedule(one_batch_ahead, prefetches=True)
COLOCATE_ASYNC = Schedule(of_warmup, prefix="colocate_async")
SEPARATE_ASYNC = Schedule(of_separate_warmup, prefix="separate_async")
FULLY_ASYNC = Schedule(
    of_threshold, prefix="fully_async", prompt_limit=lambda config: config.async_training.total_rollout_steps
)


class ScheduleRun:
    """A schedule in a run: its steps, its stream of groups, and its weights on their way to the samplers.

    What takes time is in `train`, `at_once`, `measure` and `send`, which a simulation replaces.
    """

    def __init__(self, schedule: Schedule, run: RunState):
        self.schedule = schedule
        self.stream = GroupStream(schedule.admission(run.config), run, run.step, schedule.prefix)
        self._on_their_way: Any = None
        self._version = 0

    def step(self, source: PromptSource, roles: Roles, ctx: StepContext) -> DataProto:
        """One training step, chunk after chunk; returns all that it trained on."""
        self.settle(roles, ctx)
        stream = self.stream
        bound, parts = stream.admission, list[DataProto]()
        stream.open(roles, ctx)
        stream.open_step(ctx)
        for left in reversed(range(bound.groups // bound.chunk)):
            ctx.goes_on = left > 0
            # Nothing is saved between two chunks: once the first one changed the weights, the step runs to its end.
            chunk = stream.take(source, ctx, may_stop=not parts)
            if self.schedule.checks or bound.in_work is not None:
                staleness.check(chunk, ctx, bound.enforced)
            parts.append(self._learn(chunk, source, roles, ctx))
        batch = self.measure(parts, roles, ctx)
        stream.close_step(ctx)
        return batch

    def _learn(self, chunk: DataProto, source: PromptSource, roles: Roles, ctx: StepContext) -> DataProto:
        """The update, and the sampling of the next step's batch where the schedule prefetches.

        Of the two threads one has the prompt source, the stream and the reward manager, this one trackers, checkpoints
        and the KL controller.
        """
        stream = self.stream
        train = partial(self.train, chunk, roles, ctx)
        if not self.schedule.prefetches or ctx.step >= ctx.run.total_steps:
            return stream.during(train, ctx)
        ahead = ctx.run.open(ctx.step + 1)
        if roles["rollout"].group.shares_processes(roles["actor"].group):
            stream.prefetch(source, ahead, may_stop=True)
            return train()
        prefetch = partial(stream.prefetch, source, ahead, may_stop=False)
        return self.at_once(prefetch, train, ctx)

    def train(self, batch: DataProto, roles: Roles, ctx: StepContext) -> DataProto:
        """The batch, after the updates on it."""
        return learn(batch, roles, ctx, self.schedule.stages)

    def at_once(self, ahead: Callable[[], None], here: Callable[[], DataProto], ctx: StepContext) -> DataProto:
        """The result of ``here``, while ``ahead`` runs in another thread; returns when both have ended."""
        return side_by_side(ahead, here, ctx.timed("wait_for_samples"))[1]

    def measure(self, parts: list[DataProto], roles: Roles, ctx: StepContext) -> DataProto:
        """All that a step has trained on, as one batch; its metrics go into ``ctx``."""
        stages.measure_balance(parts, roles, ctx)
        if len(parts) == 1:
            return parts[0]
        batch = together(parts)
        stages.measure_chunks(batch, ctx)
        return batch

    def publish(self, roles: Roles, ctx: StepContext) -> None:
        """The sampler generates with the updated policy from here on.

        With ``trainer.async_weight_update`` the weights are on their way while the controller logs what the step
        brought; before anything is sampled they have arrived, and the numbers are the same.
        """
        stream, record = self.stream, ctx.run.record
        script = ctx.run.script
        # A replay first continues what its checkpoint had in flight. Where its record is over, that is sampled again
        # instead, once the sampler has the weights.
        if stream.is_open or (ctx.step and script is not None and not script.is_over):
            stream.open(roles, ctx)
            stream.before_update(ctx)
        if record is not None:
            record.weights(ctx.step)
        with ctx.timed("update_weights"):
            self.send(roles, ctx)

    def send(self, roles: Roles, ctx: StepContext) -> None:
        """Send the weights of step ``ctx.step``, or begin to."""
        group = roles["actor"].group
        if ctx.config.trainer.async_weight_update:
            self._on_their_way = by_rank(group, ModelWorker.begin_weight_update)(ctx.step)
            self._version = ctx.step
        else:
            _admit(roles, ctx, by_rank(group, ModelWorker.send_weights)(ctx.step), ctx.step)

    def settle(self, roles: Roles, ctx: StepContext) -> None:
        """Return once the sampler has the latest published weights; raises their transfer's error."""
        group, references, self._on_their_way = roles["actor"].group, self._on_their_way, None
        if references is not None:
            with ctx.timed("wait_for_weights"):
                group.wait(references)
                _admit(roles, ctx, by_rank(group, ModelWorker.end_weight_update)(), self._version)


def _admit(roles: Roles, ctx: StepContext, sent: list[SyncResult], version: int) -> None:
    collected(roles["rollout"].group, SamplingWorker.publish)(version, SyncResult.by_all(sent))
    correction.check_reloaded(roles, ctx, version)
