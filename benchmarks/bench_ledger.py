"""What the books of a run cost: their share of a GRPO step of a model of 0.1M parameters.

    python benchmarks/bench_ledger.py [--steps 30]

Two real runs of `bench_grpo_step.py` (16 prompts x 8 samples x 32 tokens) in one process, where nothing overlaps:
under ``fully_async`` and under ``sync``. Timed from inside, by the clock and by the CPU's time, and divided by the step
(two runs would differ by more than that): all that writes the ledger, the spans or the decisions, its digest of
every step included; the check of every trained token against the bound; and the queue with all that its groups need,
from single prompts to the batch that is trained on. A synchronous step does part of this, too: it writes ledger and
spans, and the filter and the stream make its batch. That is measured in the second run, and subtracted.
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
from verl.data.loader import PromptSource  # noqa: E402
from verl.journal.file import Journal  # noqa: E402
from verl.journal.ledger import Ledger  # noqa: E402
from verl.journal.schedule import ScheduleRecord  # noqa: E402
from verl.journal.spans import Spans  # noqa: E402
from verl.protocol import DataProto  # noqa: E402
from verl.trainer.main_ppo import TaskRunner, run_ppo  # noqa: E402
from verl.trainer.ppo import accounting, driver, record, staleness, stream  # noqa: E402
from verl.trainer.ppo.admission import GroupQueue  # noqa: E402
from verl.trainer.ppo.callbacks import Callback  # noqa: E402
from verl.trainer.ppo.groups import DrawnPrompts  # noqa: E402

GOAL = 0.02
MODES = {
    "sync": (),
    "fully_async": (
        "async_training.staleness_threshold=1", "async_training.trigger_parameter_sync_step=1",
        "algorithm.rollout_correction.bypass_mode=true",
    ),
}  # fmt: skip
EVENTS = ("ask", "sampled", "scored", "drop", "drop_rows", "batched", "chosen", "trained")
PARTS: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
"""Seconds of this step by what is timed, by the clock and by the CPU."""
COUNTED = ("queue", "bound", "recorded schedule", "ledger", "trace")
NOT_COUNTED = "loader"
RUNNING: list[tuple[str, list[float]]] = [("", [0.0, 0.0])]
"""What is timed at the moment, and the seconds of what else was timed inside it."""


def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """What it calls is part of it, unless that is timed under another name."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if name == RUNNING[-1][0]:
            return function(*args, **kwargs)
        inside = [0.0, 0.0]
        RUNNING.append((name, inside))
        begin = time.perf_counter(), time.thread_time()
        try:
            return function(*args, **kwargs)
        finally:
            seconds = time.perf_counter() - begin[0], time.thread_time() - begin[1]
            RUNNING.pop()
            for kind in (0, 1):
                PARTS[name][kind] += seconds[kind] - inside[kind]
                RUNNING[-1][1][kind] += seconds[kind]

    return call


def time_the_parts() -> None:
    """Wrap everything that is measured; without a queue the same work for the batch as a whole."""

    def wrap(part: str, owner: Any, *names: str) -> None:
        for name in names:
            setattr(owner, name, timed(part, getattr(owner, name)))

    wrap("ledger", accounting, *EVENTS)
    wrap("ledger", Ledger, "end")
    wrap("ledger", Journal, "rotate")
    wrap("trace", Spans, "_enter", "_leave", "flush")
    wrap("queue", GroupQueue, "room", "admit", "complete", "lose", "is_ready", "drop_overdue", "take", "publish")
    wrap("queue", DrawnPrompts, "take", "batch")
    wrap(NOT_COUNTED, PromptSource, "next_prompts")
    wrap("queue", driver, "judged", "joined")
    wrap("queue", DataProto, "concat")
    wrap("queue", stream, "joined", "trimmed")
    wrap("bound", staleness, "check")
    wrap("recorded schedule", ScheduleRecord, "add")
    wrap("recorded schedule", record, "note_step")


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


Rows = list[tuple[dict[str, list[float]], float, float]]


def measure(mode: str, steps: int) -> Rows:
    """The parts and the length of every step that counts, of a run in a folder of its own."""
    clock, home = Clock(), Path.cwd()

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
            f"trainer.total_training_steps={steps}", "trainer.logger=[file]", "trainer.runtime=local",
            "trainer.default_local_dir=run", "trainer.device=cpu", f"trainer.v1.trainer_mode={mode}", *MODES[mode],
        ]  # fmt: skip
        run_ppo(load_config("ppo_trainer", words), Runner)
        size = Path("run/journal.jsonl").stat().st_size / steps
        os.chdir(home)
    print(f"{mode}: {size:.0f} bytes of the journal per step")
    return clock.rows[WARMUP:]


def medians(rows: Rows, kind: int) -> tuple[dict[str, float], float]:
    """Median seconds of each part, and of a step; by the clock (0) or by the CPU (1)."""
    parts = {name: statistics.median(row[0].get(name, (0.0, 0.0))[kind] for row in rows) for name in COUNTED}
    return parts, statistics.median(row[1 + kind] for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30, help=f"the first {WARMUP} and the last are not counted")
    args = parser.parse_args()
    time_the_parts()
    rows = {mode: measure(mode, args.steps) for mode in MODES}
    for number, kind in enumerate(("clock", "CPU")):
        without, _ = medians(rows["sync"], number)
        parts, step = medians(rows["fully_async"], number)
        print(f"step of 128 samples by the {kind}: {step * 1e3:.1f} ms")
        for name, seconds in parts.items():
            print(f"  {name}: {seconds * 1e3:.3f} ms, {seconds / step:.2%}; under sync {without[name] * 1e3:.3f} ms")
        total = sum(parts.values())
        more = (total - sum(without.values())) / step
        print(f"  together: {total / step:.2%}; more than sync: {more:.2%}, goal {GOAL:.0%}"
              f"{'' if more <= GOAL else ': missed'}")  # fmt: skip
    print(f"load of the machine: {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
