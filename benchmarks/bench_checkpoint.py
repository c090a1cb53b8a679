"""What a checkpoint costs, as ratios to the physical limits measured in the same run.

Run ``python benchmarks/bench_checkpoint.py [--gigabytes 0.5] [--rounds 7] [--resumes 3]``. Three questions:

* how long training stands still for a save in the background, against a copy of the same bytes in memory;
* how many bytes per second reach the disk, checksums and all, against one synced file of the same bytes;
* how long a resumed run of the quickstart's model takes from the command to the end of its first step.

The operations of a round follow each other (limit, ours, ours, limit), so that a noisy machine hits both; medians of
the rounds' ratios are compared with the goals, and the load of the machine is printed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from verl.checkpoint import CheckpointWriter, EngineState  # noqa: E402
from verl.device import set_threads  # noqa: E402

BLOCKING_GOAL, DISK_GOAL, RESUME_GOAL = 1.5, 0.7, 10.0
LAYERS, PIECE = 24, 1 << 22
RESUME_TIMEOUT = 300.0


def make_state(gigabytes: float) -> EngineState:
    """Weights and the two moments of Adam in float32, in matrices as a transformer has them."""
    width = int((gigabytes * 1e9 / 4 / 3 / LAYERS) ** 0.5)
    tensors = {}
    for layer in range(LAYERS):
        tensors[f"model/layers.{layer}.weight"] = torch.rand(width, width)
        for moment in ("exp_avg", "exp_avg_sq"):
            tensors[f"optimizer/layers.{layer}.weight/{moment}"] = torch.rand(width, width)
    return EngineState(tensors, {"model": {}, "optimizer": {}})


def seconds(work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def write_raw(path: Path, tensors: list[Tensor]) -> None:
    """The limit of the disk: the same bytes into one file, synced."""
    with open(path, "wb", buffering=0) as file:
        for tensor in tensors:
            data = tensor.view(-1).view(torch.uint8).numpy().data
            for start in range(0, len(data), PIECE):
                file.write(data[start : start + PIECE])
        os.fsync(file.fileno())


def blocking(state: EngineState, folder: Path, rounds: int) -> tuple[list[float], list[float], list[float]]:
    """Seconds of a copy and of a save in the background as the training loop sees it; and the first save's ratio."""
    tensors = list(state.tensors.values())
    with CheckpointWriter(folder / "background", keep={"actor": 1}, background=True) as writer:
        fresh = seconds(lambda: [torch.empty_like(tensor).copy_(tensor) for tensor in tensors])
        first = seconds(lambda: writer.save(1, {"actor": state}))
        writer.wait()
        copies = [torch.empty_like(tensor).copy_(tensor) for tensor in tensors]

        def copy() -> None:
            for target, tensor in zip(copies, tensors):
                target.copy_(tensor)

        limit, ours = [], []
        for step in range(2, 2 + rounds):
            before = seconds(copy)
            spent = seconds(lambda step=step: writer.save(step, {"actor": state}))
            while writer.busy:
                time.sleep(0.05)
                spent += seconds(writer.advance)
            limit.append((before + seconds(copy)) / 2)
            ours.append(spent)
    return limit, ours, [first / fresh]


def disk(state: EngineState, folder: Path, rounds: int) -> tuple[list[float], list[float]]:
    """Seconds of one synced file, and of a whole checkpoint until it is in place."""
    tensors, limit, ours = list(state.tensors.values()), [], []
    with CheckpointWriter(folder / "foreground", keep={"actor": 1}) as writer:
        writer.save(1, {"actor": state})
        for step in range(2, 2 + rounds):
            before = seconds(lambda: write_raw(folder / "raw", tensors))
            ours.append(seconds(lambda step=step: writer.save(step, {"actor": state})))
            limit.append((before + seconds(lambda: write_raw(folder / "raw", tensors))) / 2)
    return limit, ours


def resume(folder: Path, times: int) -> tuple[list[float], list[float]]:
    """Seconds of the clock and of the processor from the command to the end of the first step after a resume.

    The model, the data and the batch are those of the quickstart.
    """
    run = [sys.executable, "-m", "verl.trainer.main_ppo"]
    environment = {
        **os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "VERL_FILE_LOGGER_PATH": str(folder / "m.jsonl"),
    }  # fmt: skip
    prepare = [
        sys.executable,
        f"{ROOT}/examples/data_preprocess/arithmetic.py",
        "--local_save_dir",
        str(folder / "data"),
    ]

    def quietly(words: list[str]) -> None:
        subprocess.run(
            words, cwd=folder, env=environment, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )

    quietly([*prepare, "--train_size", "3072", "--sft_size", "64", "--seed", "0"])
    quietly([sys.executable, str(ROOT / "examples/quickstart/model.py"), str(folder / "base")])

    def arguments(steps: int) -> list[str]:
        return [
            "algorithm.adv_estimator=grpo",
            f"data.train_files={folder}/data/train.parquet",
            "data.train_batch_size=64",
            "data.max_prompt_length=32",
            "data.max_response_length=8",
            f"actor_rollout_ref.model.path={folder}/base",
            "actor_rollout_ref.rollout.n=8",
            "actor_rollout_ref.actor.ppo_mini_batch_size=64",
            f"reward.custom_reward_function.path={ROOT}/examples/quickstart/reward.py",
            f"trainer.total_training_steps={steps}",
            "trainer.save_freq=1",
            f"trainer.default_local_dir={folder}/run",
            "trainer.logger=[file]",
        ]

    quietly([*run, *arguments(1)])
    found, processor = [], []
    for number in range(times):
        begun = time.perf_counter()
        process = subprocess.Popen([*run, *arguments(100)], cwd=folder, env=environment, stderr=subprocess.DEVNULL)
        while last_step(folder / "m.jsonl") < 2 + number:
            if time.perf_counter() - begun > RESUME_TIMEOUT or process.poll() is not None:
                raise SystemExit(f"the resumed run made no step within {RESUME_TIMEOUT} s")
            time.sleep(0.02)
        found.append(time.perf_counter() - begun)
        processor.append(processor_seconds(process.pid))
        process.terminate()
        process.wait()
        shutil.rmtree(folder / "run" / f"global_step_{3 + number}", ignore_errors=True)
    return found, processor


def processor_seconds(pid: int) -> float:
    """What a process has used so far, in user and system mode."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def last_step(path: Path) -> int:
    lines = [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
    return json.loads(lines[-1])["step"] if lines else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=0.5)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--resumes", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="on the disk that is measured; default: a temporary one")
    options = parser.parse_args()
    set_threads()
    torch.set_num_threads(1)
    folder = Path(tempfile.mkdtemp(dir=options.folder))
    missed = 0

    def line(what: str, value: str, goal: str, holds: bool) -> None:
        nonlocal missed
        missed += not holds
        print(f"{what:<58}{value:>26}  {goal:<12}{'ok' if holds else 'MISSED'}", flush=True)

    try:
        state = make_state(options.gigabytes)
        size = sum(tensor.nbytes for tensor in state.tensors.values()) / 1e9
        print(f"{size:.2f} GB in {len(state.tensors)} tensors, 1 thread; load {os.getloadavg()[0]:.1f}")
        limit, ours, first = blocking(state, folder, options.rounds)
        ratio = statistics.median(own / bound for own, bound in zip(ours, limit))
        speed = size / statistics.median(limit)
        line(
            f"save in the background: blocks / copy ({speed:.1f} GB/s)",
            f"{ratio:.2f} x",
            "<= 1.5",
            ratio <= BLOCKING_GOAL,
        )
        line("the first one / copy into fresh memory", f"{first[0]:.2f} x", "<= 1.5", first[0] <= BLOCKING_GOAL)
        limit, ours = disk(state, folder, options.rounds)
        share = statistics.median(bound / own for own, bound in zip(ours, limit))
        speed = size / statistics.median(limit)
        line(f"bytes per second / one synced file ({speed:.2f} GB/s)", f"{share:.0%}", ">= 70 %", share >= DISK_GOAL)
        found, processor = resume(folder, options.resumes)
        median = statistics.median(found)
        spread = f"{median:.1f} s, processor {statistics.median(processor):.1f} s"
        line("command to the end of the first resumed step", spread, "<= 10 s", median <= RESUME_GOAL)
        print(f"load {os.getloadavg()[0]:.1f} at the end")
    finally:
        shutil.rmtree(folder)
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
