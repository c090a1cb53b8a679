"""Samples and scores the groups of a stream: `Inline` while training waits, `Concurrent` while the trainers train.

`Inline` samples the groups that begin together as one batch, in the thread that calls it: in one process, or with
samplers that share the trainers' processes. `Concurrent` samples group by group.

In which order and when groups end depends on the machine; what is admitted, taken and dropped follows from that. Every
driver records it in the journal (`verl.journal.schedule`). In a replay the same driver reads the journal instead of
waiting for completions: it returns groups at the recorded moments, lets the recorded versions draw their tokens
(`verl.rollout.request_spans`), and sends weights once all tokens of earlier versions are drawn. It compares every other
decision with the record. Where the record ends, the run continues without it.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from concurrent import futures
from contextlib import nullcontext, suppress
from dataclasses import replace
from typing import Any

import numpy as np

from verl.agent_loop.failed import RunStops
from verl.agent_loop.unfinished import EARLIER, ENOUGH, LEFT
from verl.errors import RewardError, RolloutError
from verl.journal.schedule import KEY, Draws, ScheduleRecord, Script, end_entry, recorded_draws
from verl.metrics import notice
from verl.protocol import DataProto
from verl.protocol.columns import object_array
from verl.rewards.failures import NothingScored
from verl.rollout.request_spans import RequestSpans
from verl.single_controller.base.interrupts import Interrupt
from verl.trainer.placement import topology_of
from verl.trainer.ppo import accounting, experts, stages
from verl.trainer.ppo.admission import GroupQueue, QueuedGroup
from verl.trainer.ppo.context import StepContext
from verl.trainer.ppo.groups import (
    OF_FAILED,
    UNFINISHED,
    Done,
    GroupRows,
    count_lost,
    gen_batches,
    joined,
    judged,
    without_samples,
)
from verl.trainer.ppo.replay import RolloutReplay
from verl.trainer.ppo.step import collect
from verl.workers.roles import Roles
from verl.workers.sampling import FOLLOW, SERVED, SamplingWorker

Prompts = Mapping[int, GroupRows]
Follow = Mapping[int, Mapping[str, Draws]]
"""Group -> request -> what it is to draw."""
Ended = tuple[Done, StepContext, BaseException | None]
LOOK_SECONDS = 0.2
"""How often a thread that waits for groups looks whether the run is to stop."""
FAILURES = 8
"""Groups in a row that may fail before the run ends with the last one's error."""
CLOSE_SECONDS = 5.0
TURN_SECONDS = 0.001
"""That the loop of groups gets, where it runs in the thread that waits."""


class Driver(ABC):
    """Samples and scores the groups of a stream; a subclass says how.

    Attributes:
        failed: is set once `results` would raise; who trains meanwhile need not wait for its workers any longer.
        in_work: groups that were begun and have not ended.
        idle_seconds: in which the samplers had no group, since the start.
        takes_turns: nothing is sampled while the thread that calls is elsewhere.
    """

    in_work: int = 0
    idle_seconds: float = 0.0
    takes_turns: bool = True

    def __init__(self, record: ScheduleRecord | None = None):
        self.record = record
        self.script: Script | None = None if record is None else record.script
        self.failed = Interrupt()
        self._held: dict[int, Done] = {}
        """Groups that have ended before their moment."""
        self._later: dict[int, GroupRows] = {}
        """Groups whose end the record has not."""
        self._spans: dict[int, Mapping[str, Draws]] = {}
        self._calls = 0

    # ---- how ---------------------------------------------------------------------------------------------------

    @abstractmethod
    def sample(self, prompts: Prompts, ctx: StepContext, follow: Follow | None, enough: int | None) -> None:
        """Begin groups.

        Args:
            prompts: by number; perhaps none.
            follow: what the requests of each are to draw.
            enough: complete groups that end a batch, while the others stay in work; None: all are waited for.
        """

    @abstractmethod
    def ended(self, ctx: StepContext, wait: bool, may_stop: bool) -> list[Done]:
        """Groups that ended since the last call; arguments as of `results`."""

    def until_drawn(self, counts: Mapping[str, int], ctx: StepContext) -> list[Done]:
        """Return once each of these requests has drawn its count of tokens, with the groups that ended meanwhile."""
        return []

    def close(self) -> None:
        """End what is in flight; here nothing is."""
        return

    # ---- what the stream calls -----------------------------------------------------------------------------------

    @property
    def follows(self) -> Script | None:
        """The script, before its end."""
        return self.script if self.script is not None and not self.script.is_over else None

    @property
    def in_flight(self) -> int:
        """Groups whose end is waited for where an update waits for all."""
        script = self.follows
        return len(self._held) + self.in_work if script is None else script.ending_before_weights()

    def admits(self, room: int, ctx: StepContext) -> int:
        """How many groups begin now, at most ``room``."""
        self._leave_script(ctx)
        script = self.follows
        if script is None:
            return room
        return len(script.next["groups"]) if script.next["event"] == "admit" else 0

    def begin(self, prompts: Prompts, ctx: StepContext, enough: int | None = None) -> None:
        """Begin groups; ``enough`` as of `sample`."""
        if self.record is None:
            self.sample(prompts, ctx, None, enough)
        elif prompts:
            uids = [str(prompt.alone().non_tensor_batch["uid"][0]) for prompt in prompts.values()]
            self._note("admit", step=ctx.step, groups=list(prompts), uids=uids)
            self._start(prompts, ctx, gone=0)

    def begin_again(self, groups: Prompts, queue: GroupQueue, ctx: StepContext) -> None:
        """What a checkpoint had in flight: drawn as before where there is a script, else from the prompts."""
        if self.follows is None and groups:
            for number in groups:
                queue.begin_again(number)
            self._note("again", step=ctx.step, groups=list(groups))
        self._start(groups, ctx, gone=ctx.step)

    def open_step(self, queue: GroupQueue, ctx: StepContext) -> None:
        """The recorded run may have been resumed here."""
        script = self.follows
        if script is not None and script.next["event"] == "again":
            for number in script.next["groups"]:
                queue.begin_again(number)
            self._note("again", step=ctx.step, groups=list(script.next["groups"]))

    def results(self, ctx: StepContext, wait: bool, may_stop: bool = True) -> list[Done]:
        """Groups that ended since the last call, or here in the recorded run; their metrics go into ``ctx``.

        Args:
            wait: until there is one.
            may_stop: do not wait where the run is to stop.
        """
        self._leave_script(ctx)
        script = self.follows
        done = self._live(ctx, wait, may_stop) if script is None else self._recorded(script, ctx, wait, may_stop)
        if not done:
            self._calls += 1
        elif self.record is not None:
            facts = [
                end_entry(group.number, group.why, group.served, group.rows.alone, self.record.boundary)
                for group in done
            ]
            self._note("ended", step=ctx.step, calls=self._calls, groups=facts)
        return done

    def dropped(self, late: list[QueuedGroup], ctx: StepContext) -> None:
        """Groups were discarded."""
        if late:
            self._note("drop", step=ctx.step, groups=[entry.number for entry in late])

    def took(self, taken: list[QueuedGroup], ctx: StepContext) -> None:
        """These groups are trained on next."""
        self._note("take", step=ctx.step, groups=[entry.number for entry in taken])

    def before_weights(self, ctx: StepContext) -> None:
        """Return once the tokens that are of earlier versions than ``ctx.step`` are drawn."""
        self._calls = 0
        counts = {
            name: sum(count for version, count in spans.counts if version < ctx.step)
            for number, of_group in self._spans.items()
            if number not in self._held
            for name, spans in of_group.items()
        }
        if self.follows is not None and any(counts.values()):
            self._hold(self.until_drawn(counts, ctx))

    def _note(self, event: str, **facts: Any) -> None:
        if self.record is not None:
            self.record.add(event, **facts)
        self._calls = 0

    def _start(self, prompts: Prompts, ctx: StepContext, gone: int) -> None:
        """Begin groups; of versions before ``gone`` nobody has the weights."""
        script, begun = self.follows, dict(prompts)
        for number in prompts if script is not None else ():
            end = script.end_of(number)  # type: ignore[union-attr]  # there is one
            if end is None:
                self._later[number] = begun.pop(number)
            elif end["why"] in OF_FAILED:
                self._held[number] = done = without_samples(number, begun.pop(number), str(end["why"]), ctx)
                accounting.ask(done.rows.alone(), ctx)
            else:
                self._spans[number] = recorded_draws(end, gone)
        self.sample(begun, ctx, self._spans if script is not None else None, None)

    def _leave_script(self, ctx: StepContext) -> None:
        """From the end of the record on, the run continues by itself."""
        script = self.script
        if script is None or not script.is_over:
            return
        self.script = None
        why = f"the record ends after {script.at} decisions, in step {ctx.step}; from here on the run decides itself"
        notice(KEY, why)
        later, self._later = self._later, {}
        self.sample(later, ctx, None, None)

    def _live(self, ctx: StepContext, wait: bool, may_stop: bool) -> list[Done]:
        held, self._held = list(self._held.values()), {}
        return held or self.ended(ctx, wait, may_stop)

    def _recorded(self, script: Script, ctx: StepContext, wait: bool, may_stop: bool) -> list[Done]:
        """The groups that ended here in the recorded run."""
        if self.failed.is_set:
            self._hold(self.ended(ctx, wait=False, may_stop=True))  # it raises the error
        recorded = script.next
        if recorded["event"] != "ended" or recorded["calls"] != self._calls:
            if wait and not (may_stop and ctx.run.stop.requested):
                raise script.differs({"event": "wait", "step": ctx.step, "calls": self._calls})
            return []
        numbers = [group["group"] for group in recorded["groups"]]
        while not all(number in self._held for number in numbers):
            if may_stop and ctx.run.stop.requested:
                return []
            waits = self.in_work > 0
            self._hold(self.ended(ctx, waits, may_stop))
            if not waits:
                break
        missing = [number for number in numbers if number not in self._held]
        if missing:
            raise script.differs({"event": "wait", "step": ctx.step, "not begun": missing})
        return [self._held.pop(number) for number in numbers]

    def _hold(self, done: list[Done]) -> None:
        for group in done:
            self._held[group.number] = group
            self._spans.pop(group.number, None)


class Inline(Driver):
    """Samples all groups that are begun together as one batch, in the thread that calls.

    Args:
        by_batch: a step's batch of prompts: its samples keep the width that the sampler gave them, and a batch of which
            nothing could be scored ends the run.
        files: of ``skip.rollout``, which samples are taken from.
    """

    def __init__(
        self,
        roles: Roles,
        record: ScheduleRecord | None = None,
        by_batch: bool = False,
        files: RolloutReplay | None = None,
    ):
        super().__init__(record)
        self.roles, self.by_batch, self.files = roles, by_batch, files
        self._done: list[Done] = []
        self._failed_in_a_row = 0

    def sample(self, prompts: Prompts, ctx: StepContext, follow: Follow | None, enough: int | None) -> None:
        if not prompts:
            return
        batch, numbers = joined(list(prompts.values())), list(prompts)

        def generate(batch: DataProto, roles: Roles, ctx: StepContext) -> DataProto:
            if enough is None:
                return generated(batch, roles, ctx, self.files)
            samples, left = generated_partly(batch, roles, ctx, enough)
            self._done += [Done(numbers.pop(place), one, why=UNFINISHED) for place, one in reversed(left)]
            return samples

        try:
            samples = collect(batch, self.roles, ctx, generate)
        except NothingScored as error:
            if self.by_batch:
                raise
            return self._left_out(prompts, ctx, error)
        self._failed_in_a_row = 0
        accounting.scored(samples, ctx)
        self._done += judged(numbers, samples, ctx, trims=not self.by_batch)

    def _left_out(self, prompts: Prompts, ctx: StepContext, error: NothingScored) -> None:
        """Groups none of whose samples could be scored; raises where they are many."""
        self._failed_in_a_row += len(prompts)
        _check_few(self._failed_in_a_row, error)
        self._done += [without_samples(number, prompt, "unscorable", ctx) for number, prompt in prompts.items()]

    def ended(self, ctx: StepContext, wait: bool, may_stop: bool) -> list[Done]:
        done, self._done = self._done, []
        return done


def generated(prompts: DataProto, roles: Roles, ctx: StepContext, files: RolloutReplay | None) -> DataProto:
    """The samples of all groups, from the sampler or from files."""
    rows, number = stages.repeated(prompts, ctx), gen_batches(ctx)
    samples = None if files is None else files.find(rows, ctx.step, number)
    accounting.ask(rows if samples is None else samples, ctx)
    if files is not None:
        ctx.metrics.add("rollout/replayed", float(samples is not None), "last")
    if samples is None:
        samples = stages.generate(rows, roles, ctx)
        if files is not None:
            files.keep(samples, ctx.step, number)
    return _entered_in_ledger(samples, ctx)


def generated_partly(
    prompts: DataProto, roles: Roles, ctx: StepContext, enough: int
) -> tuple[DataProto, list[tuple[int, GroupRows]]]:
    """The samples of the groups that were complete once ``enough`` were, and the others.

    Args:
        prompts: with `EARLIER` where some were in work before: what each of their samples has, a list.

    Returns:
        The samples; the place of each group that stays in work, and its prompt with what its samples have now.
    """
    each, none = ctx.run.samples_per_prompt, np.full(len(prompts), None, dtype=object)
    earlier = prompts.non_tensor_batch.pop(EARLIER, none)
    is_new = np.repeat([states is None for states in earlier], each)
    rows = stages.repeated(prompts, ctx)
    accounting.ask(rows.select_idxs(is_new), ctx)
    rows.meta_info[ENOUGH] = enough
    rows.non_tensor_batch[EARLIER] = object_array([state for states in earlier for state in states or [None] * each])
    samples = stages.generate(rows, roles, ctx)
    samples.non_tensor_batch.pop(EARLIER)
    states = samples.non_tensor_batch.pop(LEFT)
    is_left = np.array([state is not None for state in states], dtype=bool)
    left = []
    for place in np.flatnonzero(is_left[::each]).tolist():
        prompt = prompts.slice(place, place + 1)
        prompt.non_tensor_batch[EARLIER] = object_array([list(states[place * each : (place + 1) * each])])
        left.append((place, GroupRows.of(prompt)))
    return _entered_in_ledger(samples.select_idxs(~is_left), ctx), left


def _entered_in_ledger(samples: DataProto, ctx: StepContext) -> DataProto:
    accounting.sampled(samples, ctx)
    experts.measure(samples, ctx)
    return samples


class Concurrent(Driver):
    """Samples and scores groups one by one, in a thread, while the thread that calls trains.

    Consumes: groups that are begun. Waits for: a free one of ``limit`` places, the sampler, the reward function (one
    group at a time). Unblocked by: their answers; `close` ends all. The training thread takes results from a queue; it
    shares nothing else.

    Args:
        limit: groups that are sampled at once.
    """

    takes_turns = False

    def __init__(self, roles: Roles, limit: int, record: ScheduleRecord | None = None):
        super().__init__(record)
        self.roles, self._handle = roles, roles["rollout"].group.handle(0)
        self._done: queue.SimpleQueue[Ended] = queue.SimpleQueue()
        self._scorer = futures.ThreadPoolExecutor(1, thread_name_prefix="verl-score")
        self._loop = asyncio.new_event_loop()
        # Taken by each group's coroutine in this loop's thread, in order of admission; released with its answer.
        self._slots = asyncio.Semaphore(limit)
        self._thread = threading.Thread(target=self._loop.run_forever, name="verl-groups", daemon=True)
        if not self.takes_turns:
            self._thread.start()
        self._idle, self._since, self._failed_in_a_row = 0.0, time.monotonic(), 0

    @property
    def idle_seconds(self) -> float:  # type: ignore[override]  # of a clock here
        return self._idle + (0.0 if self.in_work else time.monotonic() - self._since)

    def sample(self, prompts: Prompts, ctx: StepContext, follow: Follow | None, enough: int | None) -> None:
        if prompts and not self.in_work:
            self._idle += time.monotonic() - self._since
        for number, prompt in prompts.items():
            self.in_work += 1
            group_ctx = ctx.run.open(ctx.step)
            rows = stages.repeated(prompt.alone(), group_ctx)
            accounting.ask(rows, group_ctx)
            spans = None if follow is None else follow[number]
            asyncio.run_coroutine_threadsafe(self._group(number, rows, group_ctx, spans), self._loop)

    def ended(self, ctx: StepContext, wait: bool, may_stop: bool) -> list[Done]:
        done: list[Done] = []
        if wait and self.in_work:
            with ctx.timed("wait_for_samples"):
                while not done and self._done.empty() and not (may_stop and ctx.run.stop.requested):
                    done += [self._entered(*ended, ctx) for ended in self._look()]
        while not self._done.empty():
            done.append(self._entered(*self._done.get(), ctx))
        return done

    def _look(self) -> list[Ended]:
        """Wait for a result, for a while."""
        with suppress(queue.Empty):
            return [self._done.get(timeout=LOOK_SECONDS)]
        return []

    def until_drawn(self, counts: Mapping[str, int], ctx: StepContext) -> list[Done]:
        done, call = list[Done](), self._handle.call(RequestSpans.until_drawn, dict(counts))
        drawn = asyncio.run_coroutine_threadsafe(call, self._loop)
        while not self._wait(drawn):
            done += self.ended(ctx, wait=False, may_stop=True)  # raises what ended a group
        drawn.result()
        return done

    def _wait(self, work: futures.Future[Any]) -> bool:
        """Whether it has ended, after a while."""
        return bool(futures.wait([work], LOOK_SECONDS).done)

    def _entered(self, done: Done, group_ctx: StepContext, error: BaseException | None, ctx: StepContext) -> Done:
        """The result, after its metrics were added.

        Raises:
            BaseException: ``error``, unless it is of this group alone.
        """
        self.in_work -= 1
        if not self.in_work:
            self._since = time.monotonic()
        ctx.metrics.merge(group_ctx.metrics)
        self._failed_in_a_row = self._failed_in_a_row + 1 if error is not None else 0
        if error is not None:
            if not _is_of_group(error):
                raise error
            _check_few(self._failed_in_a_row, error)
            count_lost(done, ctx)
        return done

    async def _group(self, number: int, rows: DataProto, ctx: StepContext, spans: Mapping[str, Draws] | None) -> None:
        sent = rows.select()
        if spans is not None:
            sent.meta_info = {**sent.meta_info, FOLLOW: dict(spans)}
        try:
            async with self._slots if spans is None else nullcontext():  # those that wait for weights keep no place
                with ctx.run.spans.on_lane("gen", ctx.step, f"group {number}"):
                    made = await self._handle.call(SamplingWorker.sample_groups, sent)
                served = made.meta_info.pop(SERVED, {})
                samples = stages.with_answers(rows, made, ctx.metrics)
                done = replace(await self._score(number, samples, ctx), served=served)
        except BaseException as error:  # carried over to the thread that trains
            why = "unscorable" if isinstance(error, NothingScored) else "failed"
            self._done.put((Done(number, GroupRows.of(rows), why=why), ctx, error))
            if not _is_of_group(error):
                self.failed.set()
        else:
            self._done.put((done, ctx, None))

    async def _score(self, number: int, samples: DataProto, ctx: StepContext) -> Done:
        return await self._loop.run_in_executor(self._scorer, self._scored, number, samples, ctx)

    def _scored(self, number: int, samples: DataProto, ctx: StepContext) -> Done:
        _entered_in_ledger(samples, ctx)
        with ctx.run.spans.on_lane("reward", ctx.step, f"group {number}"):
            stages.score(samples, self.roles, ctx)
        accounting.scored(samples, ctx)
        return judged([number], samples, ctx)[0]

    def close(self) -> None:
        if self._thread.is_alive():
            futures.wait([asyncio.run_coroutine_threadsafe(_end_others(), self._loop)], CLOSE_SECONDS)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(CLOSE_SECONDS)
        if not self._thread.is_alive():
            self._loop.close()
        self._scorer.shutdown(wait=False, cancel_futures=True)


class Driven(Concurrent):
    """The same in the thread that calls, and only while that waits: for a replay in one process."""

    takes_turns = True

    def __init__(self, roles: Roles, record: ScheduleRecord | None):
        super().__init__(roles, 1 << 16, record)

    def _look(self) -> list[Ended]:
        self._loop.run_until_complete(asyncio.sleep(TURN_SECONDS))
        return []

    def _wait(self, work: futures.Future[Any]) -> bool:
        self._look()
        return work.done()

    async def _score(self, number: int, samples: DataProto, ctx: StepContext) -> Done:
        return self._scored(number, samples, ctx)

    def close(self) -> None:
        if not self._loop.is_closed():
            self._loop.run_until_complete(_end_others())
            self._loop.close()
        self._scorer.shutdown(wait=False, cancel_futures=True)


def driver_of(roles: Roles, ctx: StepContext, by_batch: bool) -> Driver:
    """Where a run samples its groups: what it has follows from where its roles are, or from the record it follows."""
    if by_batch:
        return Inline(
            roles, by_batch=True, files=RolloutReplay.of(ctx.config) if ctx.config.skip.rollout.enable else None
        )
    script, record = ctx.run.script, ctx.run.record
    if script is not None and not script.about["beside"]:
        return Inline(roles, record)
    if roles["rollout"].group.shares_processes(roles["actor"].group):
        return Inline(roles, record) if script is None else Driven(roles, record)
    if ctx.run.needs_reward_baselines:
        why = "the greedy answers of its baseline are sampled with their batch, so sampling and training take turns"
        notice("algorithm.adv_estimator", why)
        return Inline(roles, record)
    each = ctx.config.async_training.concurrent_samples_per_replica
    return Concurrent(roles, each * len(topology_of(ctx.config).replicas), record)


def _is_of_group(error: BaseException) -> bool:
    """Whether it may be the group's alone; what its agent loops say must stop the run is not."""
    return isinstance(error, RolloutError | NothingScored) and not isinstance(error, RunStops)


def _check_few(in_a_row: int, error: BaseException) -> None:
    """Say that groups are left out, or end the run.

    Raises:
        BaseException: too many groups failed in a row to blame the groups.
    """
    if not isinstance(error, NothingScored):
        if in_a_row >= FAILURES:
            raise error
        return
    if in_a_row >= FAILURES:
        text = f"no sample of {in_a_row} groups in a row got a score: {error.message}"
        raise RewardError(text, fix=error.fix) from error
    notice(
        "reward, groups",
        f"a group is left out, as no sample of it got a score: {error.message}. Further ones are only counted as "
        f"reward/unscorable, and {FAILURES} in a row end the run.",
    )


async def _end_others() -> None:
    """Cancel what runs in this loop, and let it clean up: a call of a worker is cancelled there, too.

    Connections to samplers' hosts end with the asynchronous generators that hold them (`verl.serving.client`).
    """
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    await asyncio.get_running_loop().shutdown_asyncgens()
