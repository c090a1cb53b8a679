"""Schedules on a simulated clock: `ScheduleRun`, `GroupStream` and its queue are those of a run.

Simulated are the replicas of the sampler, which decode a token of all their requests at a time, the waits of
conversations, and the trainers. The replicas stand still during a weight sync, then go on with new weights.
"""

from __future__ import annotations

import asyncio
import heapq
import math
import selectors
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import count
from statistics import fmean
from types import SimpleNamespace
from typing import cast

import torch

from verl.config import PPOTrainerConfig
from verl.config.machine.topology import schedule_of
from verl.config.schema.root import prompts_at_once
from verl.data.loader import PromptSource
from verl.errors import ConfigError, NotBuiltError
from verl.journal.gantt import of_steps
from verl.journal.spans import Span
from verl.planner.pace import Conversations, MeasuredSteps, Pace
from verl.protocol import DataProto
from verl.trainer.placement import topology_of
from verl.trainer.ppo.context import RunState, StepContext
from verl.trainer.ppo.driver import Driver, Follow, Prompts
from verl.trainer.ppo.groups import Done, GroupRows, together
from verl.trainer.ppo.schedules import ScheduleRun
from verl.trainer.ppo.staleness import VERSIONS
from verl.workers.roles import Roles

TOKENS = "simulated_tokens"
WIDTHS = {"prompts": 1, "responses": 2, "attention_mask": 3, VERSIONS: 2, TOKENS: 1}
"""Columns of samples; `TOKENS` has those of a prompt and its response."""


class _Jumping(selectors.DefaultSelector):
    """Waits for nothing: its clock jumps to the next timer."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise RuntimeError("no timer is left that would wake a task")
        self.now += timeout
        return super().select(0)


class SimulatedClock(asyncio.SelectorEventLoop):
    """An event loop in which only timers take time."""

    def __init__(self) -> None:
        self.clock = _Jumping()
        super().__init__(self.clock)

    def time(self) -> float:
        """Seconds since the start."""
        return self.clock.now


class SimulatedReplica:
    """Decodes a token of all its requests at a time.

    Attributes:
        running: a heap of its requests, by the token of the replica after which they end.
        busy, occupied: seconds in which it decoded; the same times its requests.
    """

    def __init__(self, token: float, row: float, loop: SimulatedClock):
        self.running: list[tuple[float, int, asyncio.Future[None]]] = []
        self.version, self.is_paused, self.busy, self.occupied = 0, False, 0.0, 0.0
        self._token, self._row, self._loop, self._numbers = token, row, loop, count()
        self._tokens, self._since, self._timer = 0.0, loop.time(), loop.call_later(0.0, self.advance)

    async def decode(self, tokens: int) -> int:
        """The version of the first token, after the last one."""
        self.advance()
        version, end = self.version, self._loop.create_future()
        heapq.heappush(self.running, (self._tokens + tokens, next(self._numbers), end))
        self.advance()
        await end
        return version

    def advance(self, is_due: bool = False) -> None:
        """Decode until now; the next call is when a request ends (``is_due``), or earlier where something changes."""
        seconds, self._since = self._loop.time() - self._since, self._loop.time()
        if self.running and not self.is_paused:
            self.busy, self.occupied = self.busy + seconds, self.occupied + seconds * len(self.running)
            self._tokens += seconds / (self._token + self._row * len(self.running))
        if is_due:  # whatever is lost in rounding
            self._tokens = max(self._tokens, self.running[0][0])
        while self.running and self.running[0][0] <= self._tokens + 1e-6:
            heapq.heappop(self.running)[2].set_result(None)
        self._timer.cancel()
        if self.running and not self.is_paused:
            left = (self.running[0][0] - self._tokens) * (self._token + self._row * len(self.running))
            self._timer = self._loop.call_later(left, self.advance, True)


class SimulatedDriver(Driver):
    """Samples groups on simulated replicas, in turn with the trainers as `Inline`, or meanwhile as `Concurrent`.

    Args:
        limit: groups that are sampled at once, unless it takes turns.
    """

    def __init__(self, pace: Pace, work: Conversations, limit: int, takes_turns: bool, loop: SimulatedClock):
        super().__init__()
        self.takes_turns, self._work, self._loop = takes_turns, work, loop
        factors = [pace.straggler, *[1.0] * (pace.replicas - 1)]
        self.replicas = [SimulatedReplica(pace.token * factor, pace.row * factor, loop) for factor in factors]
        # Taken by each group's coroutine, in order of admission; released when its last conversation ends.
        self._places = asyncio.Semaphore(1 << 30 if takes_turns else limit)
        # Taken by each conversation of a group that has a place, turn by turn, first come first served.
        self._slots = asyncio.Semaphore(pace.replicas * pace.slots)
        self._ended, self._done = asyncio.Event(), list[Done]()
        self._tasks, self.spans = set[asyncio.Task[None]](), list[Span]()

    def sample(self, prompts: Prompts, ctx: StepContext, follow: Follow | None, enough: int | None) -> None:
        if not prompts:
            return
        each = ctx.run.samples_per_prompt
        shapes = {name: (each * len(prompts), width) for name, width in WIDTHS.items()}
        rows = DataProto.from_dict({name: torch.ones(shape, dtype=torch.int32) for name, shape in shapes.items()})
        for place, number in enumerate(prompts):
            group = self._group(number, GroupRows(rows, place * each, (place + 1) * each), ctx.step)
            self._tasks.add(self._loop.create_task(group))
        self.in_work += len(prompts)
        if self.takes_turns:
            self._loop.run_until_complete(asyncio.wait(self._tasks))
            if ctx.run.needs_reward_baselines:
                self._loop.run_until_complete(self._greedy(prompts, each, ctx.step))

    def ended(self, ctx: StepContext, wait: bool, may_stop: bool) -> list[Done]:
        while wait and self.in_work and not self._done:
            self._ended.clear()
            self._loop.run_until_complete(self._ended.wait())
        done, self._done = self._done, []
        self.in_work -= len(done)
        for task in [task for task in self._tasks if task.done()]:
            self._tasks.remove(task)
            task.result()
        return done

    async def _group(self, number: int, rows: GroupRows, step: int) -> None:
        async with self._places:
            begin = self._loop.time()
            results = await asyncio.gather(*(self._conversation(number, sample) for sample in range(len(rows))))
        values = torch.tensor(results, dtype=torch.int32)
        for name, columns in ((VERSIONS, values[:, :2]), (TOKENS, values[:, 2:])):
            rows.batch.tensors[name][rows.start : rows.stop] = columns
        self.spans.append(Span("gen", step, f"group {number}", begin, self._loop.time()))
        why = "filtered" if self._work.is_filtered(number) else ""
        self._done.append(Done(number, rows, int(values[:, 0].min()), why))
        self._ended.set()

    async def _greedy(self, prompts: Iterable[int], sample: int, step: int) -> None:
        """The responses of the baselines, one for each prompt, after its samples."""
        begin = self._loop.time()
        await asyncio.gather(*(self._conversation(number, sample) for number in prompts))
        self.spans.append(Span("gen_max", step, "MainThread", begin, self._loop.time()))

    async def _conversation(self, number: int, sample: int) -> tuple[int, int, int]:
        """Oldest and newest version, and tokens."""
        tokens, versions = self._work.prompt, set[int]()
        for length, wait in self._work.of(number, sample):
            async with self._slots:
                versions.add(await min(self.replicas, key=lambda one: len(one.running)).decode(length))
            await asyncio.sleep(wait)
            tokens += length
        return min(versions), max(versions), tokens


@dataclass(frozen=True)
class SimulatedSchedule:
    """What a schedule takes in the mean of its inner steps.

    Args:
        seconds: ``step``, ``trainer_idle``, ``sampler_idle`` (of the mean replica), ``training``, ``sync``.
        tokens: of prompts and responses that are trained on.
        occupancy: share of the sampler's slots that have a request.
        staleness: age of a sample's oldest token in versions -> trained samples.
        dropped, filtered: shares of all admitted groups: too stale, without signal.
        spans: of the inner steps.
    """

    name: str
    seconds: dict[str, float]
    tokens: float
    occupancy: float
    staleness: dict[int, int]
    dropped: float
    filtered: float
    spans: tuple[Span, ...]


class SimulatedRun(ScheduleRun):
    """The schedule of a configuration, whose workers take the seconds of a pace.

    Args:
        inner: steps between those in which the queue fills and those in which nothing is sampled ahead any more.
    """

    def __init__(self, config: PPOTrainerConfig, pace: Pace, work: Conversations, inner: int, loop: SimulatedClock):
        schedule = schedule_of(config)
        self._edge, self._inner = 1 + math.ceil(schedule.admission(config).ahead), inner
        self._run = RunState(config, dict, inner + 2 * self._edge)
        super().__init__(schedule, self._run)
        self._pace, self._loop, self._sums, self._ages = pace, loop, defaultdict[str, float](float), Counter[int]()
        topology = topology_of(config)
        shares = topology.part("actor").pool == topology.pool_of("rollout").name
        role = SimpleNamespace(group=SimpleNamespace(shares_processes=lambda _: shares))
        self._roles = cast(Roles, {"actor": role, "rollout": role})
        takes_turns = self.stream.admission.by_batch or shares or self._run.needs_reward_baselines
        limit = config.async_training.concurrent_samples_per_replica * pace.replicas
        self._driver = SimulatedDriver(pace, work, limit, takes_turns, loop)

    def simulate(self) -> SimulatedSchedule:
        """All steps."""
        run, replicas, inner = self._run, self._pace.replicas, self._inner
        rows = [""] * prompts_at_once(run.config.data)
        prompts = SimpleNamespace(next_prompts=lambda: DataProto.from_dict(non_tensors={"uid": rows}))
        self.stream.open(self._roles, run.open(0), self._driver)
        self.publish(self._roles, run.open(0))
        marks = list[dict[str, float]]()
        for step in range(1, run.total_steps + 1):
            run.step, begin, ctx = step, self._loop.time(), run.open(step)
            self.step(cast(PromptSource, prompts), self._roles, ctx)
            self.publish(self._roles, ctx)
            self._span("step", step, begin)
            marks.append(self._totals())
        before, after = marks[self._edge - 1], marks[self._edge + inner - 1]
        mean = {name: (total - before[name]) / inner for name, total in after.items()}
        step_seconds, counts = mean["step"], self.stream.queue.counts
        dropped, filtered = (counts[why] / counts["admitted"] for why in ("dropped", "filtered"))
        seconds = {name: mean[name] for name in ("step", "training", "sync")}
        idle = {"trainer_idle": mean["training"] + mean["sync"], "sampler_idle": mean["busy"] / replicas}
        seconds |= {name: max(0.0, step_seconds - busy) for name, busy in idle.items()}  # below zero by rounding
        occupancy = mean["occupied"] / (step_seconds * replicas * self._pace.slots)
        spans = of_steps(self._driver.spans, self._edge + 1, self._edge + inner)
        return SimulatedSchedule(run.config.trainer.v1.trainer_mode, seconds, mean["tokens"], occupancy,
                                 dict(sorted(self._ages.items())), dropped, filtered, tuple(spans))  # fmt: skip

    def train(self, batch: DataProto, roles: Roles, ctx: StepContext) -> DataProto:
        tokens, begin = int(batch.tensors[TOKENS].sum()), self._loop.time()
        self._loop.run_until_complete(asyncio.sleep(tokens * self._pace.train))
        self._sums["tokens"] += tokens
        self._sums["training"] += self._span("update_actor", ctx.step, begin)
        if self._edge < ctx.step <= self._edge + self._inner:
            self._ages.update((ctx.step - 1 - batch.tensors[VERSIONS][:, 0]).tolist())
        return batch

    def at_once(self, ahead: Callable[[], None], here: Callable[[], DataProto], ctx: StepContext) -> DataProto:
        begin = self._loop.time()
        ahead()
        end, self._loop.clock.now = self._loop.time(), begin  # nothing that ``ahead`` began is left
        batch = here()
        self._loop.clock.now = max(end, self._loop.time())
        return batch

    def measure(self, parts: list[DataProto], roles: Roles, ctx: StepContext) -> DataProto:
        return together(parts)

    def send(self, roles: Roles, ctx: StepContext) -> None:
        begin = self._loop.time()
        self._pause(True, ctx.step)  # what arrives meanwhile begins with the new weights
        self._loop.run_until_complete(asyncio.sleep(self._pace.update))
        self._pause(False, ctx.step)
        self._sums["sync"] += self._span("update_weights", ctx.step, begin)

    def _pause(self, is_paused: bool, version: int) -> None:
        for replica in self._driver.replicas:
            replica.advance()
            replica.is_paused, replica.version = is_paused, version
            replica.advance()

    def _span(self, stage: str, step: int, begin: float) -> float:
        """Record a stage that ends now; its seconds."""
        self._driver.spans.append(Span(stage, step, "MainThread", begin, self._loop.time()))
        return self._loop.time() - begin

    def _totals(self) -> dict[str, float]:
        """What everything has taken until now."""
        totals = {**self._sums, "step": self._loop.time(), "busy": 0.0, "occupied": 0.0}
        for replica in self._driver.replicas:
            replica.advance()
            totals["busy"] += replica.busy
            totals["occupied"] += replica.occupied
        return totals


def simulated(config: PPOTrainerConfig, pace: Pace, work: Conversations, inner: int) -> SimulatedSchedule:
    """The schedule of a configuration, as `SimulatedRun`; the same arguments give the same result.

    Raises:
        NotBuiltError: rewards choose groups, or responses stay unfinished.
        ConfigError: groups are filtered where nothing filters them.
    """
    if work.filtered and not config.algorithm.filter_groups.enable:
        raise ConfigError("nothing drops groups without signal", key="--filtered", got=work.filtered,
                          fix="Set algorithm.filter_groups.enable=true, or leave it out.")  # fmt: skip
    used = {
        "data.oversample_factor": config.data.oversample_factor > 1,
        "actor_rollout_ref.rollout.over_sample_rate": config.actor_rollout_ref.rollout.over_sample_rate > 0,
    }
    if (key := next((key for key, is_used in used.items() if is_used), None)) is not None:
        raise NotBuiltError("simulate has no rewards or unfinished responses", key=key, fix="Change it.")
    loop = SimulatedClock()
    try:
        return SimulatedRun(config, pace, work, inner, loop).simulate()
    finally:
        loop.close()


def fitted(config: PPOTrainerConfig, pace: Pace, work: Conversations, inner: int, steps: MeasuredSteps) -> Pace:
    """The pace of a measured run: its training and sync, and replicas with which sampling takes as long as it did.

    Args:
        config: of the run, whose sampling and training take turns.

    Raises:
        ConfigError: no speed of the replicas gives these seconds.
    """
    tokens = config.data.train_batch_size * config.actor_rollout_ref.rollout.n * (work.prompt + fmean(work.lengths))
    pace = replace(pace, train=steps.training / tokens, update=steps.update)

    def pace_of(factor: float) -> Pace:
        return replace(pace, token=pace.token * factor, row=pace.row * factor)

    def sampling(factor: float) -> float:
        return simulated(config, pace_of(factor), work, inner).seconds["trainer_idle"]

    waits, factor = sampling(1e-6), 1.0
    for _ in range(20 if waits < steps.sampling else 0):
        seconds = sampling(factor)
        if abs(seconds - steps.sampling) <= 0.002 * steps.sampling:
            return pace_of(factor)
        factor *= (steps.sampling - waits) / max(1e-9, seconds - waits)
    raise ConfigError("no speed of the sampler gives the run's seconds of sampling", key="--from",
                      got=f"{waits:.3g} s in waits alone", allowed=f"less than {steps.sampling:.3g} s",
                      fix="Give --turns and --tool as the run had them.")  # fmt: skip
