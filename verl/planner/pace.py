"""What a simulation needs of a run: how fast its samplers and trainers are, how long its responses get, what fails."""

from __future__ import annotations

import math
import random
import statistics
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path

from verl.errors import DataError, NotBuiltError
from verl.journal.gantt import AROUND, ROLES
from verl.journal.ledger_reader import History, ledger_in
from verl.journal.spans import read_spans
from verl.planner.engines import sampler_costs
from verl.planner.estimate import Estimate
from verl.planner.layout import Lengths
from verl.planner.memory import memory_of, sequence_cache
from verl.planner.seconds import generation, step_seconds

COUNT = 1000
NO_TRAINING = ("sampling", "scoring", "weight sync", "checkpoint", "validation")
"""Roles of the stages of a step; the rest of it is training."""


@dataclass(frozen=True)
class Pace:
    """How fast a run's devices are; all in seconds.

    Args:
        token, row: of a decoding step of one replica, and more for each request in it.
        train: of a token of a prompt or response, by all trainers together.
        update: of a weight sync.
        replicas, slots: of the sampler, and requests that each decodes at once.
        straggler: the first replica takes this many times longer.
    """

    token: float
    row: float
    train: float
    update: float
    replicas: int
    slots: int
    straggler: float = 1.0

    @classmethod
    def of(cls, estimate: Estimate) -> Pace:
        """From likely seconds; decoding steps are on the line through those of one group and of a full replica.

        Raises:
            NotBuiltError: the run's samplers have no costs.
        """
        run, work = estimate.run, estimate.run.work
        roles = dict(zip(run.roles, estimate.seconds, strict=True))
        plan = next((plan for plan in roles if plan.samples), None)
        if plan is None:
            key = "actor_rollout_ref.rollout.name"
            raise NotBuiltError("the planner has no costs of servers that already run", key=key)
        trainers = {trainer: seconds for trainer, seconds in roles.items() if trainer is not plan}
        training = step_seconds(list(trainers), list(trainers.values())).likely / work.tokens
        shape, data, slots = run.shapes[plan.role], plan.parallel.data, plan.batch_rows
        one = replace(plan, devices=plan.devices // data, parallel=replace(plan.parallel, data=1))
        if sampler_costs(plan.engine).reserves:
            room = memory_of(one, shape, work, estimate.cluster.device).phase("generate").kv_cache
            slots = max(1, min(slots, int(room / sequence_cache(one, shape, work.mean_length))))
        mean = max(1, round(work.response.mean))

        def step(prompts: int) -> float:
            full = replace(one, batch_rows=prompts * work.samples)
            rows = replace(work, prompts=prompts, response=Lengths(mean, mean))
            return generation(full, shape, rows, estimate.cluster).likely / mean

        groups = max(2, min(work.prompts // data, slots // work.samples))
        row = (step(groups) - step(1)) / ((groups - 1) * work.samples)
        token, update = max(0.0, step(1) - row * work.samples), roles[plan].phase("sync").likely
        return cls(token, row, training, update, data, slots)


def log_normal(response: Lengths, sigma: float) -> tuple[int, ...]:
    """Quantiles of log-normal lengths, cut at the longest, that have the mean of the run's responses."""
    normal, scale = statistics.NormalDist(), response.mean
    quantiles = [math.exp(sigma * normal.inv_cdf((place + 0.5) / COUNT)) for place in range(COUNT)]
    for _ in range(100):
        scale *= response.mean / statistics.fmean(min(response.longest, scale * quantile) for quantile in quantiles)
    return tuple(max(1, round(min(response.longest, scale * quantile))) for quantile in quantiles)


@dataclass(frozen=True)
class Conversations:
    """The responses of a run. Each is drawn by its group and sample alone: all schedules have the same work.

    Args:
        lengths: to draw from, in tokens.
        prompt: tokens of a prompt.
        turns: equal parts of a response; after each the sampler waits for a tool or, at last, for the score.
        tool, sigma: median seconds of such a wait, log-normal.
        filtered: share of the groups whose samples all score the same, which dynamic sampling drops.
    """

    lengths: tuple[int, ...]
    prompt: int = 0
    turns: int = 1
    tool: float = 0.0
    sigma: float = 0.0
    seed: int = 0
    filtered: float = 0.0

    def is_filtered(self, group: int) -> bool:
        """Whether dynamic sampling drops a group."""
        return random.Random(f"{self.seed}:{group}").random() < self.filtered

    def of(self, group: int, sample: int) -> list[tuple[int, float]]:
        """Tokens of each turn, at least one, and seconds until the next turn."""
        rng = random.Random(f"{self.seed}:{group}:{sample}")
        length = max(self.turns, rng.choice(self.lengths))
        ends = [length * turn // self.turns for turn in range(self.turns + 1)]
        waits = [self.tool * rng.lognormvariate(0.0, self.sigma) if self.tool else 0.0 for _ in range(self.turns)]
        return [(after - before, wait) for before, after, wait in zip(ends, ends[1:], waits, strict=False)]


@dataclass(frozen=True)
class MeasuredSteps:
    """Median seconds of the steps of a run whose sampling and training took turns, and the tokens of all responses."""

    sampling: float
    training: float
    update: float
    lengths: tuple[int, ...]

    @classmethod
    def of(cls, place: Path) -> MeasuredSteps:
        """From the journal in a run's folder, without the first step.

        Raises:
            DataError: there is none, it lacks spans or samples, or sampling and training overlapped.
        """
        stages: defaultdict[tuple[int, int], defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
        for span in read_spans(place):
            stages[span.process, span.step][span.stage] += span.end - span.begin
        steps = [seconds for _, seconds in sorted(stages.items()) if AROUND[0] in seconds][1:]
        records = History.of(ledger_in(place)).samples
        lengths = tuple(int(record.facts["tokens"]) for record in records if "tokens" in record.facts)
        takes_turns = not any("wait_for_samples" in seconds for seconds in stages.values())
        if not (steps and lengths and takes_turns):
            raise DataError("the journal has no seconds of sampling and of training", key="--from", got=str(place),
                            allowed="two steps or more under trainer.v1.trainer_mode=sync, with trainer.trace=true and "
                            "trainer.ledger=true")  # fmt: skip

        def took(seconds: defaultdict[str, float], *roles: str) -> float:
            return sum(seconds[stage] for role in roles for stage in ROLES[role])

        sampling = statistics.median(took(seconds, "sampling", "scoring") for seconds in steps)
        training = statistics.median(seconds[AROUND[0]] - took(seconds, *NO_TRAINING) for seconds in steps)
        update = statistics.median(took(seconds, "weight sync") for seconds in steps)
        return cls(sampling, training, update, lengths)


def share_lost(stretch: float, rate: float) -> float:
    """Share of the time that failures take, all of which repeat the work since the last checkpoint.

    With a rate of failures r, a stretch of t seconds between checkpoints takes (exp(r t) - 1) / r in the mean (Daly, "A
    higher order estimate of the optimum checkpoint interval for restart dumps", 2006, with restarts of 0 s).

    Args:
        stretch: seconds of work between two checkpoints.
        rate: failures per second.
    """
    failures = stretch * rate
    return 1 - failures / math.expm1(min(failures, 700.0)) if failures > 0 else 0.0
