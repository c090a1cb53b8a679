"""Every asynchronous schedule on Ray learns the quickstart's task, with a pool of samplers of its own.

    PYTHONPATH=. python benchmarks/bench_learning_on_ray.py [--engine hf] [--schedules fully_async ...] [--task FOLDER]
    PYTHONPATH=. .venv-vllm/bin/python benchmarks/bench_learning_on_ray.py --engine vllm

One trainer and one sampler, each in its own pool; weights go through shared memory. Additions of two numbers, 64
prompts x 8 samples a step, trained on in two mini-batches; the model of one million parameters is warmed up first
(``--task`` keeps it for the next call). `examples/quickstart` and `tests/e2e` train on the same task. Printed, for each
schedule: held-out greedy accuracy before and after, the mean reward of the first and of the last step, the largest
staleness of a trained token, and wall-clock seconds. Status 1 where an accuracy stays below ``--least``, or a token is
staler than the schedule's bound.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from figures import Figures, add_json

from tests.harness.arithmetic import warmed_up
from tests.harness.programs import PROJECT, metrics

QUICKSTART = PROJECT / "examples" / "quickstart"
MODE, R = "trainer.v1.trainer_mode", "actor_rollout_ref.rollout"
ACCURACY = "val-core/arithmetic/reward/mean@1"
STALENESS = "training/off_policy/trajectory_staleness_worst/max"
SCHEDULES = {
    "sync": ((), 0),
    "one_step_off": ((), 1),
    "colocate_async": ((), 1),
    "separate_async": (("trainer.v1.separate_async.parameter_sync_step=2",), 1),
    "fully_async": (
        ("async_training.staleness_threshold=0.5", "async_training.trigger_parameter_sync_step=2"),
        1,
    ),
    "fully_async, partial": (
        (
            "async_training.staleness_threshold=0.5",
            "async_training.trigger_parameter_sync_step=2",
            "async_training.partial_rollout=true",
        ),
        1,
    ),
}
"""Name -> words of the command line, and the largest staleness that they allow."""
VLLM = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
"""For its build for CPUs: the engine in the sampler's process, and little memory."""
COMMON = (
    "algorithm.adv_estimator=grpo",
    "algorithm.rollout_correction.bypass_mode=true",
    f"{R}.calculate_log_probs=true",
    "data.train_batch_size=64",
    "data.max_prompt_length=32",
    "data.max_response_length=8",
    f"{R}.n=8",
    "actor_rollout_ref.actor.ppo_mini_batch_size=32",
    "actor_rollout_ref.actor.optim.lr=2e-4",
    "actor_rollout_ref.hybrid_engine=false",
    f"{R}.nnodes=1",
    f"{R}.n_gpus_per_node=1",
    f"{R}.checkpoint_engine.backend=shared_memory",
    f"reward.custom_reward_function.path={QUICKSTART}/reward.py",
    "trainer.runtime=ray",
    "trainer.device=cpu",
    "trainer.logger=[file]",
    "trainer.project_name=learning",
    "trainer.resume_mode=disable",
)


def learn(folder: Path, model: Path, schedule: str, asked: argparse.Namespace) -> dict[str, Any]:
    """One run, as a row of the table."""
    name = f"{schedule.replace(', ', '_')}_{asked.engine}"
    words = [
        *COMMON,
        f"{MODE}={schedule.partition(',')[0]}",
        *SCHEDULES[schedule][0],
        *asked.set,
        f"data.train_files={folder}/data/train.parquet",
        f"data.val_files={folder}/data/test.parquet",
        f"actor_rollout_ref.model.path={model}",
        f"{R}.name={asked.engine}",
        f"trainer.total_training_steps={asked.steps}",
        f"trainer.test_freq={asked.steps}",
        f"trainer.experiment_name={name}",
        f"trainer.default_local_dir={folder}/{name}",
    ]
    (folder / "logs" / "learning" / f"{name}.jsonl").unlink(missing_ok=True)
    began = time.monotonic()
    command = [sys.executable, "-m", "verl.trainer.main_ppo", *words]
    path = f"{folder}{os.pathsep}{PROJECT}"
    environment = {**VLLM, **os.environ, "PYTHONPATH": path, "VERL_FILE_LOGGER_ROOT": str(folder / "logs")}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{schedule} failed:\n{done.stdout[-3000:]}\n{done.stderr[-4000:]}")
    steps = metrics(folder, "learning", name)
    accuracies = [step[ACCURACY] for step in steps if ACCURACY in step]
    rewards = [step["critic/rewards/mean"] for step in steps if "critic/rewards/mean" in step]
    return {
        "accuracy before": accuracies[0],
        "after": accuracies[-1],
        "reward, first step": rewards[0],
        "last": rewards[-1],
        "staleness, max": max(step.get(STALENESS, 0.0) for step in steps),
        "seconds": time.monotonic() - began,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", default="hf", choices=["hf", "vllm"])
    parser.add_argument("--schedules", nargs="+", default=list(SCHEDULES), choices=list(SCHEDULES))
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--least", type=float, default=0.9, help="accuracy that every schedule has to reach")
    parser.add_argument("--task", type=Path, help="folder for the data and the warmed-up model, which are kept")
    parser.add_argument("--set", nargs="*", default=[], help="further words of the command line")
    add_json(parser)
    asked = parser.parse_args()
    figures, is_good = Figures(), True
    with tempfile.TemporaryDirectory() as name:
        folder = (asked.task or Path(name)).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        model = warmed_up(folder).model
        for schedule in asked.schedules:
            row = learn(folder, model, schedule, asked)
            figures.add(f"{schedule}, {asked.engine}", row)
            is_good &= row["after"] >= asked.least and row["staleness, max"] <= SCHEDULES[schedule][1]
            print(schedule.ljust(22), "  ".join(f"{key} {value:.3f}" for key, value in row.items()), flush=True)
    print(json.dumps({"engine": asked.engine, "steps": asked.steps, "cores": os.cpu_count()}))
    figures.write(asked.json)
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
