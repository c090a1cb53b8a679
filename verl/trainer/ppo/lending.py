"""The trainers' devices sample while the trainer waits.

At the beginning of a step the weights of the trainers are those that the samplers have: step s - 1 published them, and
step s has not changed them yet. So each of the trainers' processes hands its weights to a replica of its own, which
joins the samplers with the version that they have, s - 1. Nothing of the bound depends on the number of replicas or of
requests in flight, and admission counts groups, not slots: with lent devices a queue fills faster, and not further.

A replica has a copy, which training does not change. So it can join again later in the step, while the trainer waits
for its next mini-batch, or for the groups in flight before an update: with version s - 1, as the samplers then still
have it. Such a wait is as long as it has to be in any case, so nothing of it is a decision that a replay needs.

The replicas are given back before anything is trained on and before weights are sent. What they compute then goes on at
the samplers, from its prefix, with the same version.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from statistics import fmean

from verl.config import PPOTrainerConfig
from verl.config.topology import processes_of
from verl.config.trainer import HybridRolloutConfig
from verl.rollout.base import TakenBack
from verl.single_controller.base import Roles
from verl.trainer.placement import topology_of
from verl.trainer.ppo.beside import Beside
from verl.trainer.ppo.context import StepContext
from verl.trainer.ppo.queue import GroupQueue, QueueBound
from verl.workers.lent import LENT, LentWorker
from verl.workers.sending import SyncResult

WAITED, TO_SAMPLING, TO_TRAINING = "wait_for_samples", "switch_to_rollout", "switch_to_trainer"
HANDED = "weights"
"""A switch to sampling needs them once a step."""
PREFIX = "separate_async"


@dataclass
class LendingRule:
    """When devices are lent and until when: plain arithmetic.

    Args:
        settings: the section ``hybrid_rollout``.
        groups: T, of a step.
        fewest: groups without which the step cannot begin, or that are an optimizer step.
        speedup: replicas with lent ones / replicas without.

    Attributes:
        spared_later: seconds that lending spares in the waits of a step besides its first one, or would have spared, as
            of the last step; None before there was one.

    Example:
        >>> rule = LendingRule(HybridRolloutConfig(), groups=64, fewest=16, speedup=2.0)
        >>> rule.threshold, rule.until(complete=30), rule.until(complete=10)
        (26, 0, 26)
    """

    settings: HybridRolloutConfig
    groups: int
    fewest: int
    speedup: float
    seconds_per_group: float | None = None
    spared_later: float | None = None
    _waited: int = 0
    _calm: int = 0
    _costs: dict[str, deque[float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.ratio = self.settings.switch_threshold_ratio
        window = self.settings.switch_cost_window_size
        self._costs = {name: deque(maxlen=window) for name in (TO_SAMPLING, TO_TRAINING, HANDED)}

    @property
    def threshold(self) -> int:
        """Groups that are complete when devices are given back."""
        return min(max(round(self.ratio * self.groups), self.fewest), self.groups)

    @property
    def cost(self) -> float | None:
        """Seconds of a switch there and back, with its weights, as of late; None before the first one."""
        again, handed = self.cost_again, self._costs[HANDED]
        return None if again is None else again + (fmean(handed) if handed else 0.0)

    @property
    def cost_again(self) -> float | None:
        """The same where the replicas have the step's weights."""
        there, back = self._costs[TO_SAMPLING], self._costs[TO_TRAINING]
        return fmean(there) + fmean(back) if there and back else None

    def benefit(self, complete: int) -> float | None:
        """Seconds that lending spares at the beginning of a step; None: not known."""
        return self.spared(max(0, self.threshold - complete))

    def spared(self, missing: int) -> float | None:
        """Seconds that lending spares, if so many groups come as those that were waited for last; None: not known."""
        if self.seconds_per_group is None:
            return None
        return missing * self.seconds_per_group * (1 - 1 / self.speedup)

    def is_worth_weights(self) -> bool:
        """Whether the replicas get the step's weights although nothing is lent as it begins."""
        return self.spared_later is None or self.cost is None or self.spared_later > self.cost

    def is_worthwhile_later(self, missing: int) -> bool:
        """Whether devices are lent while a step that has begun waits for so many groups."""
        benefit, cost = self.spared(missing), self.cost_again
        return missing > 0 and (benefit is None or cost is None or benefit > cost)

    def until(self, complete: int) -> int:
        """For how many complete groups devices are lent; 0: they are not.

        Args:
            complete: groups that wait for training.
        """
        if complete >= self.threshold:
            return 0
        benefit, cost = self.benefit(complete), self.cost
        worthwhile = benefit is None or cost is None or benefit > cost
        return self.threshold if worthwhile else 0

    def switched(self, way: str, seconds: float) -> None:
        """A switch, `TO_SAMPLING` or `TO_TRAINING`, or the weights for it, `HANDED`, took so long."""
        self._costs[way].append(seconds)

    def waited_for(self, groups: int, seconds: float, is_lent: bool) -> None:
        """The samplers, with lent devices or alone, had so many groups in so many seconds of waiting."""
        if groups > 0:
            self.seconds_per_group = seconds / groups * (self.speedup if is_lent else 1.0)

    def end_step(self, waited: float) -> None:
        """A step is over in which the trainer waited for so many seconds while nothing was lent.

        Waiting for longer than a switch takes would have been worth lending for; the share then goes up.
        """
        rules = self.settings
        if not rules.adaptive_switch_threshold:
            return
        if waited > (self.cost or 0.0):
            self._waited, self._calm = self._waited + 1, 0
            if self._waited >= rules.switch_threshold_release_steps:
                self.ratio = min(1.0, self.ratio + rules.switch_threshold_step_up)
        else:
            self._waited, self._calm = 0, self._calm + 1
            if self._calm >= rules.switch_threshold_release_steps:
                least = min(self.settings.switch_threshold_ratio, self.fewest / self.groups)
                self.ratio = max(least, self.ratio - rules.switch_threshold_step_down)


class Lending:
    """Lends and takes back the devices of a run.

    Args:
        beside: where groups are sampled.
        roles: of the run; `LENT` are the replicas in the trainers' processes.
        bound: of the queue.
    """

    def __init__(self, beside: Beside, roles: Roles, config: PPOTrainerConfig, bound: QueueBound):
        self._beside, self._actor = beside, roles["actor"].group
        self._service, group = roles["rollout"].group.handle(0), roles[LENT].group
        topology = topology_of(config)
        size = topology.pool_of("actor").size
        leaders = range(0, size, processes_of(config.actor_rollout_ref.rollout, size))
        self._handles = {LentWorker.replica_name(rank): group.handle(rank) for rank in leaders}
        own = len(topology.replicas)
        fewest = max(bound.chunk, config.actor_rollout_ref.actor.ppo_mini_batch_size)
        rules = config.trainer.v1.separate_async.hybrid_rollout
        self.rule = LendingRule(rules, bound.groups, fewest, (own + len(leaders)) / own)
        self._has_version: int | None = None
        self._forget()

    def _forget(self) -> None:
        """A step begins."""
        self._lent_seconds, self._spared, self._times = 0.0, 0.0, 0
        self._apart = 0.0
        """Seconds of waits that say nothing of the share: those while devices were lent, and before the update."""
        self._taken = TakenBack()

    def until(self, queue: GroupQueue, ctx: StepContext) -> int:
        """For how many complete groups devices would be lent at the beginning of this step; 0: they would not."""
        self._forget()
        until = self.rule.until(queue.complete_groups)
        benefit, cost = self.rule.benefit(queue.complete_groups), self.rule.cost
        values = {"lend": float(until > 0), "threshold": float(self.rule.threshold), "ratio": self.rule.ratio}
        if benefit is not None:
            values["benefit_seconds"] = benefit
        if cost is not None:
            values["cost_seconds"] = cost
        for name, value in values.items():
            ctx.metrics.add(f"{PREFIX}/decision/{name}", value, "last")
        return until

    @contextmanager
    def beginning(self, queue: GroupQueue, ctx: StepContext, is_lent: bool) -> Iterator[None]:
        """The trainer waits inside, and where devices are lent they sample inside, and only there."""
        before = queue.complete_groups
        if is_lent or self.rule.is_worth_weights():
            self._hand_weights(ctx)
        with self._lent(ctx) if is_lent else nullcontext():
            waited = ctx.timers.seconds.get(WAITED, 0.0)
            yield
            seconds = self._note_wait(queue.complete_groups - before, waited, ctx, is_lent)
            self._apart += seconds if is_lent else 0.0

    @contextmanager
    def later(self, ctx: StepContext, groups: int | None = None) -> Iterator[None]:
        """The trainer, which has begun to train in this step, waits inside, and devices may be lent.

        Args:
            groups: so many; None: all in flight.
        """
        running, is_before_update = self._beside.running, groups is None
        groups = running if groups is None else min(groups, running)
        is_useful = groups > 0 and self._others_wait()
        is_lent = is_useful and self._has_version == ctx.step - 1 and self.rule.is_worthwhile_later(groups)
        with self._lent(ctx) if is_lent else nullcontext():
            waited = ctx.timers.seconds.get(WAITED, 0.0)
            yield
            seconds = self._note_wait(running - self._beside.running, waited, ctx, is_lent)
            self._apart += seconds if is_lent or is_before_update else 0.0
            if is_useful:
                self._spared += seconds * (self.rule.speedup - 1) / (1 if is_lent else self.rule.speedup)

    def _others_wait(self) -> bool:
        """Whether lent devices would have anything to do: requests in work stay where they are."""
        return self._beside.waiting > 0 or self._beside.ask(self._service.call("waiting")) > 0

    def _note_wait(self, groups: int, before: float, ctx: StepContext, is_lent: bool) -> float:
        """The samplers had so many groups in a wait that is over; returns its seconds."""
        seconds = ctx.timers.seconds.get(WAITED, 0.0) - before
        self.rule.waited_for(groups, seconds, is_lent)
        return seconds

    @contextmanager
    def _lent(self, ctx: StepContext) -> Iterator[None]:
        self._lend(ctx)
        begin = time.monotonic()
        try:
            with ctx.spans.apart(LENT, ctx.step, "trainers"):
                yield
        except BaseException:
            with suppress(Exception):  # boundary: the first error is raised; it may have ended the service
                self._take_back(ctx)
            raise
        self._lent_seconds += time.monotonic() - begin
        self._times += 1
        self._take_back(ctx)

    def end_step(self, ctx: StepContext) -> None:
        """Report what was lent in this step."""
        self.rule.end_step(ctx.timers.seconds.get(WAITED, 0.0) - self._apart)
        self.rule.spared_later = self._spared
        values = {
            "times": float(self._times),
            "lent_seconds": self._lent_seconds,
            "lent_tokens": float(self._taken.tokens),
            "lent_requests": float(self._taken.completed - len(self._taken.moved)),
            "moved_requests": float(len(self._taken.moved)),
        }
        for name, value in values.items():
            ctx.metrics.add(f"{PREFIX}/switch/{name}", value, "last")

    def _hand_weights(self, ctx: StepContext) -> None:
        begin = time.monotonic()
        with ctx.timed(TO_SAMPLING):
            sent = SyncResult.by_all(self._actor.send_to_lent(ctx.step - 1))
            for error in sent.failed.values():
                raise error
        self._has_version = ctx.step - 1
        self.rule.switched(HANDED, time.monotonic() - begin)

    def _lend(self, ctx: StepContext) -> None:
        begin = time.monotonic()
        with ctx.timed(TO_SAMPLING):
            for handle in self._handles.values():
                self._beside.ask(handle.call("wake"))
            self._beside.ask(self._service.call("lend", self._handles))
            self._beside.lend(len(self._handles))
        self.rule.switched(TO_SAMPLING, time.monotonic() - begin)

    def _take_back(self, ctx: StepContext) -> None:
        begin = time.monotonic()
        with ctx.timed(TO_TRAINING):
            self._beside.lend(0)
            taken = self._beside.ask(self._service.call("take_back", list(self._handles)))
            for handle in self._handles.values():
                self._beside.ask(handle.call("rest"))
        self.rule.switched(TO_TRAINING, time.monotonic() - begin)
        if ctx.run.ledger is not None:
            ctx.run.ledger.moved(ctx.step, taken.moved)
        had = self._taken
        self._taken = TakenBack(had.completed + taken.completed, had.tokens + taken.tokens, had.moved + taken.moved)
