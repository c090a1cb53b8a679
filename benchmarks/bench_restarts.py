"""Useful share of a run's time (ETTR) that is killed again and again, with ``trainer.max_restarts``.

    PYTHONPATH=. python benchmarks/bench_restarts.py [--mtbf 60] [--steps 150] [--seed 0]

A tiny model trains in one process; its reward takes the rest of a second, so that a step lasts about one. The process
that trains gets SIGKILL at times drawn in advance, MTBF apart on average. Printed: useful seconds (the sum over the
steps that are in the metrics at the end) divided by the clock's, the kills, and seconds from a kill to the end of the
next step.
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
from pathlib import Path

import psutil

from tests.harness.models import tiny_model_dir
from tests.harness.rows import write_prompts

SCORER = """
import time
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    time.sleep(0.8)
    return len(set(solution_str)) / 10
"""


def command(steps: int) -> list[str]:
    """A run that saves after each step; all rewards of a step are computed at once."""
    words = [
        "algorithm.adv_estimator=grpo",
        "data.train_files=train.parquet",
        "data.train_batch_size=2",
        "data.max_prompt_length=64",
        "data.max_response_length=5",
        "actor_rollout_ref.model.path=model",
        "actor_rollout_ref.rollout.n=2",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "reward.custom_reward_function.path=scorer.py",
        "reward.num_workers=4",
        "trainer.save_freq=1",
        "trainer.max_actor_ckpt_to_keep=2",
        "trainer.default_local_dir=run",
        "trainer.logger=[file]",
        "trainer.device=cpu",
        "trainer.max_restarts=1000",
        f"trainer.total_training_steps={steps}",
    ]
    return [sys.executable, "-m", "verl.trainer.main_ppo", *words]


def finished(folder: Path) -> dict[int, float]:
    """Seconds of each step in the metrics, by number."""
    lines = [line for place in (folder / "logs").rglob("*[0-9a-z].jsonl") if ".replaced" not in place.name
             for line in place.read_text().splitlines()]  # fmt: skip
    steps = (json.loads(line) for line in lines)
    return {step["step"]: step["data"]["timing_s/step"] for step in steps if "timing_s/step" in step["data"]}


def killed_run(folder: Path, mtbf: float, steps: int, seed: int) -> None:
    """Run to the end under kills, and print what came of it."""
    draw, environment = random.Random(seed), {**os.environ, "VERL_FILE_LOGGER_ROOT": str(folder / "logs")}
    began, back, kills = time.monotonic(), [], 0
    with open(folder / "output.txt", "wb") as output:
        run = subprocess.Popen(command(steps), cwd=folder, env=environment, stdout=output, stderr=output)
    next_kill, hit = began + draw.expovariate(1 / mtbf), None
    while run.poll() is None:
        now, steps_now = time.monotonic(), len(finished(folder))
        if hit is not None and steps_now > hit[1]:
            back.append(now - hit[0])
            hit = None
        if now >= next_kill:
            for process in psutil.Process(run.pid).children():  # the attempt, and orphans of it
                process.send_signal(signal.SIGKILL)
            kills, hit, next_kill = kills + 1, hit or (now, steps_now), next_kill + draw.expovariate(1 / mtbf)
        time.sleep(0.05)
    wall, seconds = time.monotonic() - began, finished(folder).values()
    lines = [
        f"MTBF {mtbf:.0f} s: status {run.returncode}, {len(seconds)} steps of {statistics.mean(seconds):.2f} s",
        f"{kills} kills, ETTR {sum(seconds) / wall:.1%} of {wall:.0f} s",
        f"next step {statistics.median(back or [0.0]):.1f} s after a kill, at most {max(back, default=0.0):.1f}",
    ]
    print(", ".join(lines))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--mtbf", type=float, default=60.0)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        tiny_model_dir(place / "model", hidden=16, layers=1, heads=2, kv_heads=1)
        write_prompts(place / "train.parquet", 64)
        (place / "scorer.py").write_text(SCORER)
        killed_run(place, arguments.mtbf, arguments.steps, arguments.seed)
    return 0


if __name__ == "__main__":
    sys.exit(main())
