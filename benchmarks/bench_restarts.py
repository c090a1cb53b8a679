"""Useful share of a run's time (ETTR) whose processes are killed again and again.

    PYTHONPATH=. python benchmarks/bench_restarts.py [--role trainer] [--mtbf 60] [--steps 150] [--seed 0]

A tiny model trains; its reward takes the rest of a second, so that a step lasts about one. A process of the role gets
SIGKILL at times drawn in advance, MTBF seconds apart on average:

- ``trainer``: the process that trains, of a run in one; the run starts again (``trainer.max_restarts``).
- ``reward``: one of four processes that score; what it had is scored again.
- ``sampler``, ``agent``: on Ray, one of two replicas, which is replaced (``rollout.max_replacements``), or one of two
  processes that play agent loops.

Printed: useful seconds divided by the clock's, the kills, and seconds from a kill to the end of the next step. Of the
trainer the steps that are in the metrics at the end are useful, and the clock counts from the start. Of the others a
step is as useful as the median one, and the clock counts from the end of the first step: a start is no repair.
Needs Linux and psutil.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
from figures import TINY_RUN

from tests.harness.models import tiny_model_dir
from tests.harness.rows import write_prompts

SCORER = """
import time
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    time.sleep(0.8)
    return len(set(solution_str)) / 10
"""


ON_RAY = (
    "trainer.runtime=ray",
    "trainer.n_gpus_per_node=1",
    "actor_rollout_ref.hybrid_engine=false",
    "actor_rollout_ref.rollout.nnodes=1",
    "actor_rollout_ref.rollout.n_gpus_per_node=2",
    "actor_rollout_ref.rollout.agent.num_workers=2",
    "actor_rollout_ref.rollout.checkpoint_engine.backend=shared_memory",
    "actor_rollout_ref.rollout.max_replacements=1000",
)


@dataclass(frozen=True)
class Role:
    """Processes that are killed.

    Args:
        mark: stands in their command line; empty: the children of the process that starts attempts.
        words: of the run.
    """

    mark: str = ""
    words: tuple[str, ...] = ()

    def victims(self, run: int) -> list[psutil.Process]:
        """Those that a kill hits: the attempt and its orphans, or one that has the mark, if there is any."""
        if not self.mark:
            return psutil.Process(run).children()
        return [process for process in psutil.Process(run).children(recursive=True) if self.mark in _words(process)]


ROLES = {
    "trainer": Role(),
    "reward": Role("verl.rewards.worker"),
    "sampler": Role("ray::ReplicaWorker", ON_RAY),
    "agent": Role("ray::RolloutWorker", ON_RAY),
}


def _words(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def command(steps: int, role: Role) -> list[str]:
    """A run that saves after each step; all rewards of a step are computed at once."""
    words = [
        *TINY_RUN,
        *role.words,
        "reward.num_workers=4",
        "trainer.save_freq=1",
        "trainer.max_restarts=1000",
        f"trainer.total_training_steps={steps}",
    ]
    return [sys.executable, "-m", "verl.trainer.main_ppo", *words]


def finished(folder: Path) -> dict[int, float]:
    """Seconds of each step in the metrics, by number; a line that is being written does not count yet."""
    lines = [line for place in (folder / "logs").rglob("*[0-9a-z].jsonl") if ".replaced" not in place.name
             for line in place.read_bytes().rpartition(b"\n")[0].splitlines()]  # fmt: skip
    steps = (json.loads(line) for line in lines)
    return {step["step"]: step["data"]["timing_s/step"] for step in steps if "timing_s/step" in step["data"]}


def killed_run(folder: Path, name: str, mtbf: float, steps: int, seed: int) -> None:
    """Run to the end under kills, and print what came of it."""
    draw, environment = random.Random(seed), {**os.environ, "VERL_FILE_LOGGER_ROOT": str(folder / "logs")}
    role, began, back, kills = ROLES[name], time.monotonic(), list[float](), 0
    with open(folder / "output.txt", "wb") as output:
        run = subprocess.Popen(command(steps, role), cwd=folder, env=environment, stdout=output, stderr=output)
    counted_from = began if name == "trainer" else None  # else the end of the first step
    next_kill, hit = began + draw.expovariate(1 / mtbf), None
    while run.poll() is None:
        now, steps_now = time.monotonic(), len(finished(folder))
        if counted_from is None and steps_now:
            counted_from, next_kill = now, now + draw.expovariate(1 / mtbf)
        if hit is not None and steps_now > hit[1]:
            back.append(now - hit[0])
            hit = None
        if now >= next_kill and counted_from is not None:
            victims = role.victims(run.pid)
            for process in draw.sample(victims, 1) if role.mark and victims else victims:
                with suppress(psutil.NoSuchProcess):
                    process.send_signal(signal.SIGKILL)
            kills, hit = kills + bool(victims), hit or ((now, steps_now) if victims else None)
            next_kill += draw.expovariate(1 / mtbf)
        time.sleep(0.05)
    end, seconds = time.monotonic(), list(finished(folder).values())
    if run.returncode or counted_from is None:
        raise SystemExit(f"status {run.returncode}\n{(folder / 'output.txt').read_text()[-3000:]}")
    useful = sum(seconds) if name == "trainer" else statistics.median(seconds) * (len(seconds) - 1)
    lines = [
        f"{name}, MTBF {mtbf:.0f} s: {len(seconds)} steps of {statistics.median(seconds):.2f} s",
        f"{kills} kills, ETTR {useful / (end - counted_from):.1%} of {end - counted_from:.0f} s",
        f"next step {statistics.median(back or [0.0]):.1f} s after a kill, at most {max(back, default=0.0):.1f}",
    ]
    print(", ".join(lines))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--role", choices=ROLES, default="trainer")
    parser.add_argument("--mtbf", type=float, default=60.0)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        tiny_model_dir(place / "model", hidden=16, layers=1, heads=2, kv_heads=1)
        write_prompts(place / "train.parquet", 64)
        (place / "scorer.py").write_text(SCORER)
        killed_run(place, arguments.role, arguments.mtbf, arguments.steps, arguments.seed)
    return 0


if __name__ == "__main__":
    sys.exit(main())
