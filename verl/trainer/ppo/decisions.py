"""What every driver decides: noted in the journal, and in a replay taken from it (`verl.journal.schedule`).

Training sees groups end in an order and at moments that nobody decides. Given these, all else follows: what is
admitted, taken and dropped. So a replay is the same driver, fed by the journal instead of by completions: it hands out
groups at the recorded moments, lets the recorded versions draw their
tokens (`verl.rollout.request_spans`), and sends weights once every token is drawn that is of earlier ones. Each further
decision is compared with the record. Where the record ends, the run continues by itself.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from verl.journal.schedule import KEY, Draws, ScheduleRecord, Script, end_entry, recorded_draws
from verl.metrics import notice
from verl.single_controller.base.interrupts import Interrupt
from verl.trainer.ppo import accounting
from verl.trainer.ppo.admission import GroupQueue, QueuedGroup
from verl.trainer.ppo.context import StepContext
from verl.trainer.ppo.groups import OF_FAILED, Done, GroupRows, without_samples

Prompts = Mapping[int, GroupRows]
Follow = Mapping[int, Mapping[str, Draws]]
"""Group -> request -> what it is to draw."""


class Driver(ABC):
    """Samples and scores the groups of a stream; a subclass says how.

    Attributes:
        failed: is set once `results` would raise; who trains meanwhile need not wait for its workers any longer.
        in_work: groups that were begun and have not ended.
        idle_seconds: in which the samplers had no group, since the start.
        takes_turns: nothing is sampled while the thread that calls is elsewhere.
    """

    in_work, idle_seconds, takes_turns = 0, 0.0, True

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
