"""What the rollout correction costs, as a share of a GRPO step of the 10M-parameter model of `bench_grpo_step.py`.

    python benchmarks/bench_rollout_correction.py [--step-seconds 4.2] [--rounds 200]

First the functions alone, on a batch of that step's shape (128 responses x 32 tokens) and on larger ones; then, without
``--step-seconds``, the step itself with the correction on: `main_ppo` reports ``timing_s/rollout_correction`` beside
``timing_s/step``. The pass that recomputes log-probs (``timing_s/old_log_prob``) is not part of the correction, but a
run with one update per batch does it only because the correction is on, so it is shown beside it.
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
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.bench_grpo_step import NEW_TOKENS, PROMPTS, SAMPLES, make_inputs
from verl.algorithms.rollout_correction import Correction, correction_of, importance_sampling_of
from verl.config import RolloutCorrectionConfig
from verl.config.schema.algorithm import importance_sampling

SHAPES = ((PROMPTS * SAMPLES, NEW_TOKENS), (1024, 1024))
STEPS, WARMUP = 4, 1


def batch(rows: int, width: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probs of two close policies and a mask with ragged rows."""
    g = torch.Generator().manual_seed(0)
    old = -3 * torch.rand(rows, width, generator=g)
    rollout = old + 0.05 * torch.randn(rows, width, generator=g)
    lengths = torch.randint(width // 2, width + 1, (rows, 1), generator=g)
    return old, rollout, (torch.arange(width) < lengths).long()


def seconds(call, rounds: int) -> float:
    """Median CPU seconds of a call on one thread, after a warm-up: other processes do not show in them."""
    call()
    taken = []
    for _ in range(rounds):
        start = time.process_time()
        call()
        taken.append(time.process_time() - start)
    return statistics.median(taken)


def forms(tensors) -> dict:
    """Every form of the correction as a call."""
    newer = {
        "rollout_correction, metrics only": RolloutCorrectionConfig.disabled(),
        "rollout_correction, sequence weights + rejection": RolloutCorrectionConfig.decoupled_seq_is_rs(),
        "rollout_correction, token weights + k3 rejection": RolloutCorrectionConfig.decoupled_k3_rs_token_tis(),
    }
    calls = {
        f"rollout_is, {level}, {mode}": lambda how=importance_sampling(2.0, level=level, mode=mode): (
            importance_sampling_of(*tensors, how)
        )
        for level in ("token", "sequence", "geometric")
        for mode in ("truncate", "mask")
    }
    return calls | {
        name: lambda how=Correction.of(config): correction_of(*tensors, how) for name, config in newer.items()
    }


def run_step(folder: Path) -> dict[str, float]:
    """Median seconds of the stages of a real step with the correction on."""
    model, prompts, _ = make_inputs(folder, "10M")
    command = [
        sys.executable, "-m", "verl.trainer.main_ppo", "algorithm.adv_estimator=grpo", f"data.train_files={prompts}",
        f"data.train_batch_size={PROMPTS}", "data.max_prompt_length=64", f"data.max_response_length={NEW_TOKENS}",
        "data.shuffle=false", f"actor_rollout_ref.model.path={model}", f"actor_rollout_ref.rollout.n={SAMPLES}",
        "actor_rollout_ref.rollout.ignore_eos=true", f"actor_rollout_ref.actor.ppo_mini_batch_size={PROMPTS}",
        "algorithm.rollout_is_threshold=2.0", "algorithm.rollout_is=true", "algorithm.rollout_is_mode=mask",
        f"reward.custom_reward_function.path={folder / 'reward.py'}", f"trainer.total_training_steps={STEPS}",
        "trainer.logger=[file]", "trainer.project_name=bench", "trainer.experiment_name=correction",
        f"trainer.default_local_dir={folder / 'run'}", "trainer.resume_mode=disable",
    ]  # fmt: skip
    root = Path(__file__).resolve().parents[1]
    environment = {**os.environ, "VERL_FILE_LOGGER_ROOT": str(folder / "logs"), "PYTHONPATH": str(root)}
    subprocess.run(command, cwd=folder, env=environment, check=True, stdout=subprocess.DEVNULL)
    lines = (folder / "logs" / "bench" / "correction.jsonl").read_text().splitlines()
    steps = [json.loads(line)["data"] for line in lines][WARMUP:]
    names = ("step", "rollout_correction", "old_log_prob", "gen", "update_actor")
    return {name: statistics.median(step[f"timing_s/{name}"] for step in steps) for name in names}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--step-seconds", type=float, help="seconds of a step; without it one is run")
    parser.add_argument("--rounds", type=int, default=100)
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    step = arguments.step_seconds
    if step is None:
        with tempfile.TemporaryDirectory() as temporary:
            found = run_step(Path(temporary))
        step = found["step"]
        print("seconds of a step:", {name: round(value, 4) for name, value in found.items()})
        print(f"rollout correction inside it: {100 * found['rollout_correction'] / step:.3f} % of the step")
    print(f"{'form':<50}" + "".join(f"{f'{rows} x {width}':>16}" for rows, width in SHAPES) + f"{'of a step':>12}")
    table: dict[str, list[float]] = {}
    for rows, width in SHAPES:
        rounds = max(3, arguments.rounds * 4096 // (rows * width))
        for name, call in forms(batch(rows, width)).items():
            table.setdefault(name, []).append(seconds(call, rounds))
    for name, taken in table.items():
        cells = "".join(f"{1000 * value:>13.2f} ms" for value in taken)
        print(f"{name:<50}{cells}{100 * taken[0] / step:>10.3f} %")


if __name__ == "__main__":
    main()
