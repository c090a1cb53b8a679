"""What the benchmarks share: a clock for whole trainers, limits of the machine, figures that programs read."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]

TINY_RUN = (
    "algorithm.adv_estimator=grpo",
    "data.train_files=train.parquet",
    "data.train_batch_size=2",
    "data.max_prompt_length=64",
    "data.max_response_length=5",
    "actor_rollout_ref.model.path=model",
    "actor_rollout_ref.rollout.n=2",
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    "reward.custom_reward_function.path=scorer.py",
    "trainer.max_actor_ckpt_to_keep=2",
    "trainer.default_local_dir=run",
    "trainer.logger=[file]",
    "trainer.device=cpu",
)
"""Settings of a run whose steps take milliseconds, but for what it scores and saves."""

MARKS = """
import json, resource, sys, time, warnings
import psutil
warnings.filterwarnings("ignore")
marks, losses = [], []

def mark():
    # What children have used, in ticks of 10 ms; those that ended count with this process.
    times = [child.cpu_times() for child in psutil.Process().children(recursive=True)]
    reaped = resource.getrusage(resource.RUSAGE_CHILDREN)
    beside = sum(t.user + t.system for t in times) + reaped.ru_utime + reaped.ru_stime
    marks.append((time.perf_counter(), time.process_time(), beside))

def tell():
    peak = next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM"))
    print("FOUND " + json.dumps({"marks": marks, "losses": losses, "peak_mib": int(peak) / 1024}))
"""
"""In front of a script that is timed: it calls ``mark()`` before the first step and after each, then ``tell()``."""

TRL_CLOCK = (
    MARKS
    + """
from transformers import TrainerCallback

class Clock(TrainerCallback):
    def on_step_end(self, *a, **k):
        mark()

    def on_log(self, args, state, control, logs=None, **k):
        if "loss" in logs:
            losses.append(float(logs["loss"]))
"""
)
"""The same for TRL's trainers, which take ``Clock()`` among their callbacks."""


@dataclass(frozen=True)
class Run:
    """Seconds of each step of a script.

    Args:
        wall, own, beside: by the clock, of the script's processor time, and of its children's.
        losses: of each step, where the script tells them.
        peak_mib: resident set of the script itself at its highest.
    """

    wall: list[float]
    own: list[float]
    beside: list[float]
    losses: list[float]
    peak_mib: float

    @classmethod
    def of(cls, told: Mapping[str, Any]) -> Run:
        wall, own, beside = ([b - a for a, b in pairwise(times)] for times in zip(*told["marks"]))
        return cls(wall, own, beside, told["losses"], told["peak_mib"])

    @property
    def cpu(self) -> list[float]:
        """Of the processor in all."""
        return [own + beside for own, beside in zip(self.own, self.beside)]

    def medians(self, warmup: int) -> tuple[float, float]:
        """Wall and CPU seconds per step, the first ones left out; children's ticks are too coarse for a median."""
        children = statistics.mean(self.beside[warmup:])
        return statistics.median(self.wall[warmup:]), statistics.median(self.own[warmup:]) + children


def against_trl(ours: list[Run], trl: list[Run], warmup: int) -> dict[str, float | str]:
    """Medians over rounds that took turns, and how often the peer's time ours is; ``trl`` may be empty."""
    row: dict[str, float | str] = {}
    times = {"ours": [run.medians(warmup) for run in ours], "TRL": [run.medians(warmup) for run in trl]}
    for name, runs in (("ours", ours), ("TRL", trl)):
        if runs:
            row[f"{name}, s"], row[f"{name}, CPU s"] = map(statistics.median, zip(*times[name]))
            row[f"{name}, peak MiB"] = max(run.peak_mib for run in runs)
    for which, name in enumerate(("TRL / ours by the clock", "TRL / ours by CPU time")):
        ratios = [p[which] / m[which] for m, p in zip(times["ours"], times["TRL"])]
        if ratios:
            row[name] = statistics.median(ratios)
            row[f"{name}, per round"] = ", ".join(f"{ratio:.2f}" for ratio in ratios)
    return row


def run_script(python: str, script: str, words: Iterable[str], folder: Path, ours: bool) -> Run:
    """Run a script that `tell`s in a process of its own; ``ours`` lets it import this repository."""
    (folder / "child.py").write_text(script)
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    environment |= {"HF_HUB_OFFLINE": "1", "VERL_FILE_LOGGER_ROOT": str(folder / "logs")}
    environment |= {"PYTHONPATH": str(ROOT)} if ours else {}
    command = [python, str(folder / "child.py"), *words]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr[-3000:])
    line = next(line for line in done.stdout.splitlines() if line.startswith("FOUND "))
    return Run.of(json.loads(line.removeprefix("FOUND ")))


class Figures:
    """Rows of named numbers, for `table.py` and other programs.

    Example:
        >>> figures = Figures()
        >>> figures.add("10M", {"tokens per CPU-second": 2000.0})
    """

    def __init__(self) -> None:
        self.rows: list[tuple[str, dict[str, float | str]]] = []

    def add(self, row: str, numbers: Mapping[str, float | str]) -> None:
        self.rows.append((row, dict(numbers)))

    def write(self, path: Path | None) -> None:
        """As JSON, a list of [row, {name: number}]; nothing without a path."""
        if path is not None:
            path.write_text(json.dumps(self.rows, indent=1) + "\n")


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", type=Path, help="write the figures to this file, too")


def peak_mib() -> float:
    """The highest resident set of this process; unlike ``ru_maxrss`` it does not begin with that of the parent."""
    status = Path("/proc/self/status").read_text()
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM"))) / 1024


def best_seconds(work: Callable[[], object], rounds: int = 5) -> float:
    """CPU seconds of a call at its fastest, after one that warms up."""
    work()
    found = []
    for _ in range(rounds):
        start = time.thread_time()
        work()
        found.append(time.thread_time() - start)
    return min(found)


def linear_seconds(model: Any, rows: int) -> float:
    """CPU seconds per token that a model's linear layers alone take, forward, with ``rows`` tokens at once."""
    import torch

    total = 0.0
    with torch.inference_mode():
        for module in model.modules():
            if isinstance(module, torch.nn.Linear):
                x = torch.randn(rows, module.in_features, dtype=module.weight.dtype)
                total += best_seconds(lambda: module(x)) / rows  # noqa: B023
    return total


def machine_limits() -> dict[str, float]:
    """GFLOP/s of a matrix product and GB/s of a copy into memory that was touched before, on one thread."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    limits = {}
    for dtype in (torch.float32, torch.bfloat16):
        a, b = torch.randn(1024, 1024).to(dtype), torch.randn(1024, 1024).to(dtype)
        seconds = best_seconds(lambda: a @ b)  # noqa: B023
        limits[f"{str(dtype).removeprefix('torch.')} GFLOP/s"] = 2 * 1024**3 / seconds / 1e9
    source = torch.ones(1 << 28, dtype=torch.uint8)
    target = torch.zeros_like(source)
    limits["copy GB/s"] = source.nbytes / best_seconds(lambda: target.copy_(source)) / 1e9
    torch.set_num_threads(threads)
    return limits


def own_memory() -> int:
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("RssAnon"))


def peak_and_seconds(work: Callable[[], object]) -> tuple[int, float]:
    """Peak of this process's own memory above its start, in bytes, and wall-clock seconds."""
    start, done, peak = own_memory(), threading.Event(), [0]

    def watch() -> None:
        while not done.wait(0.001):
            peak[0] = max(peak[0], own_memory() - start)

    watcher = threading.Thread(target=watch)
    watcher.start()
    begun = time.perf_counter()
    work()
    spent = time.perf_counter() - begun
    done.set()
    watcher.join()
    return peak[0], spent
