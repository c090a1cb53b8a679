"""What the books of a run cost: their share of a GRPO step of a model of 0.1M parameters.

    python benchmarks/bench_ledger.py [--mode fully_async] [--steps 30]

A real run of `bench_grpo_step.py` (16 prompts x 8 samples x 32 tokens) in one process, where nothing overlaps. Timed
from inside, by the clock and by the CPU's time, and divided by the step (two runs would differ by more than that): all
that writes the ledger, the trace or the recorded schedule, the queue with what its groups need beside a batch, and the
check of every trained token against the bound. Under ``sync`` there is no queue.
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench_grpo_step import WARMUP, make_inputs

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from verl.config import load_config  # noqa: E402
from verl.observability.ledger import Ledger  # noqa: E402
from verl.observability.schedule import ScheduleRecord  # noqa: E402
from verl.observability.spans import Spans  # noqa: E402
from verl.trainer.main_ppo import TaskRunner, run_ppo  # noqa: E402
from verl.trainer.ppo import accounting, beside, staleness  # noqa: E402
from verl.trainer.ppo.callbacks import Callback  # noqa: E402
from verl.trainer.ppo.queue import GroupQueue  # noqa: E402
from verl.trainer.ppo.schedules import queued  # noqa: E402

GOAL = 0.02
MODES = {
    "sync": (),
    "fully_async": (
        "async_training.staleness_threshold=1", "async_training.trigger_parameter_sync_step=1",
        "algorithm.rollout_correction.bypass_mode=true",
    ),
}  # fmt: skip
EVENTS = ("ask", "sampled", "scored", "drop_rest", "batched", "chosen", "trained")
PARTS: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
"""Seconds of this step by what is timed, by the clock and by the CPU."""


RUNNING: set[str] = set()
"""What is timed at the moment; what it calls is part of it."""


def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if name in RUNNING:
            return function(*args, **kwargs)
        RUNNING.add(name)
        clock, processor = time.perf_counter(), time.thread_time()
        try:
            return function(*args, **kwargs)
        finally:
            PARTS[name][0] += time.perf_counter() - clock
            PARTS[name][1] += time.thread_time() - processor
            RUNNING.discard(name)

    return call


def time_the_parts() -> None:
    """Wrap everything that is measured."""
    for name in EVENTS:
        setattr(accounting, name, timed("ledger", getattr(accounting, name)))
    Ledger.end = timed("ledger", Ledger.end)  # type: ignore[method-assign]
    for name in ("_enter", "_leave", "flush"):
        setattr(Spans, name, timed("trace", getattr(Spans, name)))
    for name in ("room", "admit", "complete", "lose", "is_ready", "drop_overdue", "take", "publish"):
        setattr(GroupQueue, name, timed("queue", getattr(GroupQueue, name)))
    beside.judged = timed("queue", beside.judged)  # type: ignore[attr-defined]
    queued.together = timed("queue", queued.together)  # type: ignore[attr-defined]
    staleness.check = timed("bound", staleness.check)
    ScheduleRecord.add = timed("recorded schedule", ScheduleRecord.add)  # type: ignore[method-assign]


class Clock(Callback):
    """The parts and the length of every step, from its beginning to that of the next one."""

    def __init__(self) -> None:
        self.rows: list[tuple[dict[str, list[float]], float, float]] = []
        self._last: tuple[float, float] | None = None

    def on_step_begin(self, trainer: Any) -> None:
        now = time.perf_counter(), time.process_time()
        if self._last is not None:
            parts = {name: list(seconds) for name, seconds in PARTS.items()}
            self.rows.append((parts, now[0] - self._last[0], now[1] - self._last[1]))
        PARTS.clear()
        self._last = now


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30, help=f"the first {WARMUP} and the last are not counted")
    parser.add_argument("--mode", default="fully_async", choices=list(MODES))
    args = parser.parse_args()
    time_the_parts()
    clock = Clock()

    class Runner(TaskRunner):
        def make_trainer(self, config: Any, tokenizer: Any, processor: Any) -> Any:
            trainer = super().make_trainer(config, tokenizer, processor)
            trainer.callbacks.append(clock)
            return trainer

    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        model, prompts, _ = make_inputs(Path(folder), "0.1M")
        words = [
            "algorithm.adv_estimator=grpo", f"data.train_files={prompts}", "data.train_batch_size=16",
            "data.max_prompt_length=64", "data.max_response_length=32", f"actor_rollout_ref.model.path={model}",
            "actor_rollout_ref.rollout.n=8", "actor_rollout_ref.rollout.ignore_eos=true",
            "actor_rollout_ref.actor.ppo_mini_batch_size=16", "reward.custom_reward_function.path=reward.py",
            f"trainer.total_training_steps={args.steps}", "trainer.logger=[file]", "trainer.runtime=local",
            "trainer.default_local_dir=run", "trainer.device=cpu", f"trainer.v1.trainer_mode={args.mode}",
            *MODES[args.mode],
        ]  # fmt: skip
        run_ppo(load_config("ppo_trainer", words), Runner)
        sizes = {name: Path("run", name).stat().st_size / args.steps for name in ("ledger.jsonl", "trace.jsonl")}
    rows = clock.rows[WARMUP:]
    for number, kind in enumerate(("clock", "CPU")):
        step = statistics.median(row[1 + number] for row in rows)
        print(f"step of 128 samples by the {kind}: {step * 1e3:.1f} ms")
        total = 0.0
        for part in sorted({name for row in rows for name in row[0]}):
            seconds = statistics.median(row[0].get(part, (0.0, 0.0))[number] for row in rows)
            total += seconds
            print(f"  {part}: {seconds * 1e3:.3f} ms, {seconds / step:.2%}")
        print(f"  together: {total / step:.2%}, goal {GOAL:.0%}{'' if total / step <= GOAL else ': missed'}")
    print("bytes per step: " + ", ".join(f"{name} {size:.0f}" for name, size in sizes.items()))
    print(f"load of the machine: {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
