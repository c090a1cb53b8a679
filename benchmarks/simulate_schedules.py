"""Simulated, not measured: how the schedules compare on more devices than there are here.

    python benchmarks/simulate_schedules.py [--devices 2 8 32 128] [--staleness 1 4] [--steps 6] [--measured FILE]
                                            [--slots 256] [--schedules NAME ...]

The admission rule and the queue (`verl.trainer.ppo.admission`) and the router with its line of waiting requests
(`verl.rollout.service`) are the program's. The rest is a model, and the clock is simulated:

- half of the devices sample, half train; a step has ``--prompts`` prompts per trainer, so that a larger machine has a
  larger batch with a longer tail;
- a sampler computes all its requests together: a token of each takes ``--token-ms`` and ``--row-ms`` more per request;
- a conversation has ``--turns`` answers of log-normal length (median ``--length`` tokens, sigma ``--length-sigma``),
  each followed by an environment that takes log-normal seconds (``--env``, ``--env-sigma``);
- a trainer takes ``--train-ms`` per token, all trainers share a chunk's tokens equally; an update of the weights takes
  ``--update-s``, while which samplers and trainers stand still.

Lengths and environments are drawn by row and turn, so that every schedule has the same work. Printed as a Markdown
table: how many times less wall clock a trained sample takes than under ``sync``, over ``--steps`` steps between those
in which the queue fills and those in which nothing is sampled ahead any more (and over more of them where there are few
devices, as little work varies more).

``--measured FILE`` compares the model with what `bench_schedules.py --json FILE` measured on one trainer and one
sampler: its workload, the seconds per row so that the synchronous step waits as long as the measured one, its computing
as the trainer's; all other rows are predictions.
"""

from __future__ import annotations

import argparse
import asyncio
import heapq
import json
import random
import statistics
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import count, pairwise
from pathlib import Path

from bench_routing import Simulated, SimulatedClock
from figures import ROOT, Figures, add_json

sys.path.insert(0, str(ROOT))
from verl.rollout.base import Completion, Request, SamplingParams
from verl.rollout.service import SamplerService
from verl.trainer.ppo.admission import GroupAdmission, GroupQueue

CHUNKS = 4
LONGEST = 16
"""Times the median, of an answer."""


@dataclass(frozen=True)
class Schedule:
    """What a step takes at once, and what new weights do.

    Args:
        chunks: a step is trained on in so many parts.
        is_ahead: sampling may be ahead, by the staleness that is asked for.
        most: the largest staleness that the schedule has.
        waits: new weights wait for all groups in flight; else these pause and go on.
    """

    chunks: int = 1
    is_ahead: bool = True
    most: int = 1000
    waits: bool = True
    in_order: bool = True


SCHEDULES = {
    "sync": Schedule(is_ahead=False),
    "one_step_off": Schedule(most=1),
    "colocate_async": Schedule(),
    "separate_async": Schedule(CHUNKS),
    "fully_async": Schedule(CHUNKS, waits=False),
    "fully_async, completion": Schedule(CHUNKS, waits=False, in_order=False),
}


@dataclass(frozen=True)
class Job:
    """The work, and what it takes; seconds.

    Args:
        samplers, trainers: devices.
        prompts: of a step.
        token, row: of a token that a sampler computes for all its requests, and more for each request.
        train: of a token, by one trainer.
        overhead: of a chunk, whatever its size.
        update: of new weights.
        slots: requests that a sampler computes at once.
        steps: that count.
    """

    samplers: int
    trainers: int
    prompts: int
    samples: int
    turns: int
    length: float
    length_sigma: float
    env: float
    env_sigma: float
    token: float
    row: float
    train: float
    update: float
    slots: int
    steps: int
    seed: int = 0
    overhead: float = 0.0

    def conversation(self, group: int, sample: int) -> list[tuple[int, float]]:
        """Tokens and environment's seconds of each turn."""
        rng = random.Random(f"{self.seed}:{group}:{sample}")
        return [
            (
                max(1, int(self.length * min(LONGEST, rng.lognormvariate(0.0, self.length_sigma)))),
                self.env * rng.lognormvariate(0.0, self.env_sigma),
            )
            for _ in range(self.turns)
        ]


class Engine(Simulated):
    """Computes a token of all its requests at a time."""

    def __init__(self, job: Job):
        self._job, self._loop = job, asyncio.get_running_loop()
        self._running: list[tuple[float, int, asyncio.Future[int], str, int]] = []
        """Which token of the engine is the last of a request; its tokens, when it ends; its name, and its budget."""
        self._numbers = count()
        self._token, self._since, self._timer = 0.0, self._loop.time(), None
        self.is_paused = False

    async def generate(self, request: Request) -> Completion:
        self._advance()
        done: asyncio.Future[int] = self._loop.create_future()
        left = (request.sampling.max_tokens or 1) - len(request.generated_prefix)
        heapq.heappush(self._running, (self._token + left, next(self._numbers), done, request.id, left))
        self._plan()
        drawn = await done
        return Completion(request.id, (0,) * drawn, (), "stop" if drawn == left else "abort", ())

    async def abort(self, request_ids: Iterable[str] | None = None) -> int:
        self._advance()
        wanted = None if request_ids is None else set(request_ids)
        chosen = [entry for entry in self._running if wanted is None or entry[3] in wanted]
        self._running = [entry for entry in self._running if entry not in chosen]
        heapq.heapify(self._running)
        for end, _, done, _, left in chosen:
            done.set_result(max(0, min(left - 1, int(left - (end - self._token)))))
        self._plan()
        return len(chosen)

    def pause(self, is_paused: bool) -> None:
        self._advance()
        self.is_paused = is_paused
        self._plan()

    @property
    def _seconds(self) -> float:
        return self._job.token + self._job.row * len(self._running)

    def _advance(self) -> None:
        now = self._loop.time()
        if self._running and not self.is_paused:
            self._token += (now - self._since) / self._seconds
        self._since = now

    def _plan(self) -> None:
        """Wake up when the next request ends, if none begins before."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._running and not self.is_paused:
            left = max(0.0, self._running[0][0] - self._token)
            self._timer = self._loop.call_later(left * self._seconds, self._end)

    def _end(self) -> None:
        self._advance()
        while self._running and self._running[0][0] <= self._token + 1e-6:
            _, _, done, _, left = heapq.heappop(self._running)
            done.set_result(left)
        self._plan()


class Run:
    """A run of a schedule in simulated time.

    Consumes: groups that ended. Waits for: the next chunk, and before weights for the groups in flight. Unblocked by:
    the end of a group.
    """

    def __init__(self, job: Job, schedule: Schedule, staleness: int):
        ahead = staleness if schedule.is_ahead else 0
        chunk, late = job.prompts // schedule.chunks, "drop"
        bound = GroupAdmission(job.prompts, chunk, Fraction(ahead), None, schedule.in_order, late)
        self.job, self.schedule, self.queue = job, schedule, GroupQueue(bound)
        self.engines = [Engine(job) for _ in range(job.samplers)]
        names = {str(number): engine for number, engine in enumerate(self.engines)}
        clock = asyncio.get_running_loop().time
        self.service = SamplerService(names, slots=job.slots, clock=clock, is_elastic=True)  # slots hold for one, too
        self.ended, self.in_flight, self.idle = asyncio.Event(), 0, 0.0
        self.tokens: dict[int, int] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def seconds_of_steps(self) -> list[float]:
        """Of every step."""
        loop, marks = asyncio.get_running_loop(), [0.0]
        for step in range(self.job.steps):
            await self._train()
            if step + 1 < self.job.steps:
                await self._publish(step + 1)
            marks.append(loop.time())
        for task in self._tasks:
            task.cancel()
        return [end - begin for begin, end in pairwise(marks)]

    async def _train(self) -> None:
        for _ in range(self.schedule.chunks):
            while True:
                self._admit()
                if self.queue.drop_overdue():
                    continue
                if self.queue.is_ready():
                    break
                await self._next_end()
            tokens = sum(self.tokens.pop(entry.number) for entry in self.queue.take())
            await asyncio.sleep(self.job.overhead + tokens * self.job.train / self.job.trainers)

    async def _publish(self, version: int) -> None:
        while self.schedule.waits and self.in_flight:
            await self._next_end()
        for engine in self.engines:
            engine.pause(True)
        await asyncio.sleep(self.job.update)
        for engine in self.engines:
            engine.version = version
            engine.pause(False)
        self.queue.publish(version)

    async def _next_end(self) -> None:
        begun = asyncio.get_running_loop().time()
        self.ended.clear()
        await self.ended.wait()
        self.idle += asyncio.get_running_loop().time() - begun

    def _admit(self) -> None:
        left = self.job.steps * self.job.prompts - self.queue.trained - len(self.queue)
        for _ in range(min(self.queue.room(), left)):
            self.in_flight += 1
            task = asyncio.create_task(self._group(self.queue.admit(None)))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _group(self, number: int) -> None:
        tokens = await asyncio.gather(*(self._conversation(number, sample) for sample in range(self.job.samples)))
        self.in_flight -= 1
        if self.queue.complete(number, True):
            self.tokens[number] = sum(tokens)
        self.ended.set()

    async def _conversation(self, number: int, sample: int) -> int:
        name, total = f"{number}-{sample}", 0
        for turn, (length, environment) in enumerate(self.job.conversation(number, sample)):
            asked = SamplingParams(max_tokens=length)
            await self.service.generate(
                Request(f"{name}-{turn}", (1,), asked, uid=str(number), sample_index=sample, session=name)
            )
            await asyncio.sleep(environment)
            total += length
        return total


def simulated(job: Job, name: str, staleness: int) -> dict[str, float]:
    """Seconds of a mean step in which as much is sampled as trained on, and what was dropped."""
    edge = 1 + staleness

    async def run() -> dict[str, float]:
        one = Run(replace(job, steps=job.steps + 2 * edge), SCHEDULES[name], staleness)
        steps = await one.seconds_of_steps()
        admitted = one.queue.counts["admitted"]
        inner = steps[edge:-edge]
        return {
            "step, s": statistics.mean(inner),
            "idle, s": one.idle / len(steps),
            "dropped": one.queue.counts["dropped"] / admitted,
        }

    loop = SimulatedClock()
    try:
        return loop.run_until_complete(run())
    finally:
        loop.close()


def scaled(asked: argparse.Namespace, devices: int) -> Job:
    half = devices // 2
    return Job(
        samplers=half,
        trainers=half,
        prompts=half * asked.prompts,
        samples=asked.samples,
        turns=asked.turns,
        length=asked.length,
        length_sigma=asked.length_sigma,
        env=asked.env,
        env_sigma=asked.env_sigma,
        token=asked.token_ms * 1e-3,
        row=asked.row_ms * 1e-3,
        train=asked.train_ms * 1e-3,
        update=asked.update_s,
        slots=asked.slots,
        steps=asked.steps * max(1, 16 // devices),
    )


def scaling(asked: argparse.Namespace, figures: Figures) -> str:
    """The table: a row for each schedule and staleness, a column for each number of devices."""
    jobs = {devices: scaled(asked, devices) for devices in asked.devices}
    base = {devices: simulated(job, "sync", 0) for devices, job in jobs.items()}
    steps = " | ".join(f"{base[devices]['step, s']:.1f} s" for devices in jobs)
    lines = [
        "| simulated | staleness, at most | " + " | ".join(f"{devices} devices" for devices in jobs) + " |",
        "| --- | ---: |" + " ---: |" * len(jobs),
        f"| sync, seconds of a step | 0 | {steps} |",
    ]
    for staleness in asked.staleness:
        for name, schedule in SCHEDULES.items():
            if name not in asked.schedules or not schedule.is_ahead or staleness > schedule.most:
                continue
            rows = {devices: simulated(job, name, staleness) for devices, job in jobs.items()}
            times = {devices: base[devices]["step, s"] / row["step, s"] for devices, row in rows.items()}
            lines.append(f"| {name} | {staleness} | " + " | ".join(f"{value:.2f} x" for value in times.values()) + " |")
            dropped = {f"{devices} devices, dropped": row["dropped"] for devices, row in rows.items()}
            figures.add(
                f"{name}, {staleness} stale", {f"{key} devices": value for key, value in times.items()} | dropped
            )
    worst = max(value for _, row in figures.rows for key, value in row.items() if key.endswith("dropped"))
    return "\n".join([*lines, "", f"Groups dropped as too stale, at most: {worst:.1%}."])


def fitted(job: Job, wanted: float) -> Job:
    """The seconds per row with which a synchronous step takes so long; by bisection."""
    low, high = 0.0, 0.1
    for _ in range(14):
        middle = (low + high) / 2
        is_slow = simulated(replace(job, row=middle), "sync", 0)["step, s"] > wanted
        low, high = (low, middle) if is_slow else (middle, high)
    return replace(job, row=(low + high) / 2)


def compared(measured: Mapping[str, Mapping[str, float]], figures: Figures) -> str:
    """Model and measurement of one trainer and one sampler, with the workload of `bench_schedules.py`."""
    sync = measured["sync"]
    waiting, computing = sync["sampling, s"], sync["step, s"] - sync["sampling, s"]
    prompts, samples, turns, length = 64, 4, 4, 32
    tokens = prompts * samples * turns * length
    job = Job(1, 1, prompts, samples, turns, length, 0.0, 0.2, 1.0, token=1e-3, row=0.0, train=computing / tokens,
              update=0.0, slots=2 * prompts * samples, steps=12)  # fmt: skip
    job = fitted(job, sync["step, s"])
    lines = [
        "| | measured step, s | simulated step, s | measured, x less than sync | simulated, x |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    base = simulated(job, "sync", 0)["step, s"]
    for name in SCHEDULES:
        if name not in measured:
            continue
        was, now = measured[name]["step, s"], simulated(job, name, 1)["step, s"]
        figures.add(name, {"measured": sync["step, s"] / was, "simulated": base / now})
        lines.append(f"| {name} | {was:.2f} | {now:.2f} | {sync['step, s'] / was:.2f} | {base / now:.2f} |")
    says = f"Fitted: {job.row * 1e3:.3f} ms per row, for {waiting:.2f} s of waiting in a synchronous step."
    return "\n".join([*lines, "", says])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, nargs="+", default=[2, 8, 32, 128])
    parser.add_argument("--staleness", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--measured", type=Path)
    parser.add_argument("--schedules", nargs="+", default=list(SCHEDULES), choices=list(SCHEDULES))
    whole = {"prompts": 16, "samples": 4, "turns": 4, "steps": 6, "slots": 256}
    real = {"length": 128.0, "length-sigma": 0.7, "env": 0.2, "env-sigma": 1.0, "token-ms": 10.0, "row-ms": 0.05,
            "train-ms": 0.15, "update-s": 0.5}  # fmt: skip
    for name, value in {**whole, **real}.items():
        parser.add_argument(f"--{name}", type=type(value), default=value)
    add_json(parser)
    asked = parser.parse_args()
    if asked.prompts % CHUNKS or min(asked.devices) < 2 or any(devices % 2 for devices in asked.devices):
        parser.error(f"--prompts must be a multiple of {CHUNKS}, --devices even numbers")
    figures, begun = Figures(), time.monotonic()
    if asked.measured is None:
        print(scaling(asked, figures))
    else:
        print(compared(dict(json.loads(asked.measured.read_text())), figures))
    print(f"{time.monotonic() - begun:.0f} s in all, by a simulated clock")
    figures.write(asked.json)


if __name__ == "__main__":
    main()
