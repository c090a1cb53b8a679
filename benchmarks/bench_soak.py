"""What a run holds over many steps: memory, descriptors, threads, shared memory; each shall stay as it is.

    PYTHONPATH=. python benchmarks/bench_soak.py [--steps 10000] [--mode sync] [--plot soak.png]

A tiny model trains by GRPO with all that an ordinary run has: checkpoints, validation, journal, files of samples,
scorers in processes. From outside, every hundredth of the run, the process tree is measured. Printed: what it holds,
the slope of its memory over the steps after the first fifth, in which caches fill up, and the time of a step. Memory is
the proportional set size: a page that processes share counts once. The status is 1 where memory grows by more than
`MOST_GROWTH` or the rest grows at all from the second fifth to the last. Files in shared memory are the machine's:
nothing else should run. Needs Linux and psutil.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import astuple, dataclass, fields
from pathlib import Path

import psutil
from figures import TINY_RUN

from tests.harness.models import tiny_model_dir
from tests.harness.rows import write_prompts

MOST_GROWTH = 1.0
"""MB of memory per 1,000 steps."""
SCORER = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return len(set(solution_str)) / 10
"""
POLL_SECONDS = 0.2


@dataclass(frozen=True)
class Held:
    """What a process tree holds after a step."""

    step: int
    seconds: float
    memory_mb: float
    descriptors: int
    threads: int
    processes: int
    shared_files: int

    @classmethod
    def now(cls, step: int, seconds: float, root: psutil.Process) -> Held | None:
        """``seconds`` after the start; None where a process ended while it was measured."""
        try:
            tree = [root, *root.children(recursive=True)]
            memory = sum(process.memory_full_info().pss for process in tree) / 2**20
            counts = (sum(process.num_fds() for process in tree), sum(process.num_threads() for process in tree))
        except (psutil.NoSuchProcess, psutil.ZombieProcess):
            return None
        return cls(step, seconds, memory, *counts, len(tree), len(list(Path("/dev/shm").iterdir())))


def command(steps: int, mode: str) -> list[str]:
    often = max(1, steps // 20)
    words = [
        *TINY_RUN,
        "data.val_files=train.parquet",
        "reward.num_workers=2",
        "trainer.rollout_data_dir=samples",
        f"trainer.save_freq={often}",
        f"trainer.test_freq={often}",
        "trainer.total_epochs=1000000",
        f"trainer.total_training_steps={steps}",
    ]
    if mode != "sync":
        words += [f"trainer.v1.trainer_mode={mode}"]
    return [sys.executable, "-m", "verl.trainer.main_ppo", *words]


class Steps:
    """Reads the number of the last step from the metrics, as they grow."""

    def __init__(self, folder: Path):
        self.folder, self.last, self._offset = folder, 0, 0

    def read(self) -> int:
        for file in self.folder.rglob("*.jsonl"):
            with file.open("rb") as lines:
                lines.seek(self._offset)
                complete = lines.read().rpartition(b"\n")[0]
            self._offset += len(complete) + bool(complete)
            for line in complete.splitlines():
                self.last = max(self.last, json.loads(line)["step"])
        return self.last


def measured(folder: Path, steps: int, mode: str) -> list[Held]:
    """Run to the end.

    Raises:
        RuntimeError: the run failed; with the end of its output.
    """
    environment = {**os.environ, "VERL_FILE_LOGGER_ROOT": str(folder / "logs")}
    with open(folder / "output.txt", "wb") as output:
        run = subprocess.Popen(command(steps, mode), cwd=folder, env=environment, stdout=output, stderr=output)
    root, progress, made, due = psutil.Process(run.pid), Steps(folder / "logs"), list[Held](), 1
    began = time.monotonic()
    while run.poll() is None:
        step = progress.read()
        held = Held.now(step, time.monotonic() - began, root) if step >= due else None
        if held is not None:
            made.append(held)
            due = step + max(1, steps // 100)
            if len(made) % 10 == 1:
                values = ", ".join(f"{field.name} {getattr(held, field.name):.5g}" for field in fields(Held))
                print(values, flush=True)
        time.sleep(POLL_SECONDS)
    if run.returncode:
        raise RuntimeError(f"the run ended with {run.returncode}:\n{(folder / 'output.txt').read_text()[-3000:]}")
    return made


def verdict(made: list[Held]) -> int:
    """Print what grew; 1 where something did."""
    last = made[-1].step
    settled = [held for held in made if held.step >= last / 5]
    growth = statistics.linear_regression([held.step for held in settled], [held.memory_mb for held in settled]).slope
    print(f"memory: {1000 * growth:+.3f} MB per 1,000 steps (allowed {MOST_GROWTH:+.1f})")
    grows = 1000 * growth > MOST_GROWTH
    early = [held for held in settled if held.step <= 2 * last / 5]
    late = [held for held in settled if held.step >= 4 * last / 5]
    paces = [1000 * (part[-1].seconds - part[0].seconds) / (part[-1].step - part[0].step) for part in (early, late)]
    print("a step: {:.1f} ms in the second fifth, {:.1f} ms in the last".format(*paces))
    for name in ("descriptors", "threads", "processes", "shared_files"):
        before, after = (max(getattr(held, name) for held in part) for part in (early, late))
        print(f"{name}: at most {before} in the second fifth, {after} in the last")
        grows = grows or after > before
    return int(grows)


def plot(made: list[Held], file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    columns = list(zip(*map(astuple, made)))
    figure, axes = pyplot.subplots(len(columns) - 1, 1, sharex=True, figsize=(8, 9), layout="constrained")
    for axis, field, values in zip(axes, fields(Held)[1:], columns[1:]):
        axis.plot(columns[0], values)
        axis.set_ylabel(field.name)
        axis.set_ylim(0, 1.2 * max(1, *values))
    axes[-1].set_xlabel("step")
    figure.savefig(file)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--mode", default="sync", choices=("sync", "one_step_off", "colocate_async", "separate_async"))
    parser.add_argument("--plot", type=Path, help="a file for the curves")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        tiny_model_dir(place / "model", hidden=16, layers=1, heads=2, kv_heads=1)
        write_prompts(place / "train.parquet", 64)
        (place / "scorer.py").write_text(SCORER)
        made = measured(place, arguments.steps, arguments.mode)
    if arguments.plot:
        plot(made, arguments.plot)
    return verdict(made)


if __name__ == "__main__":
    sys.exit(main())
