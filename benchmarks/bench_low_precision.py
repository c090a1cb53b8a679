"""GRPO learns the quickstart's task over a base in 4 bits (QLoRA), and from samplers in 8 bits.

    PYTHONPATH=. python benchmarks/bench_low_precision.py [--only nf4 int8 fp8] [--steps 15] [--task FOLDER]
    PYTHONPATH=. python benchmarks/bench_low_precision.py --speed [--width 1024]

The quickstart's model is warmed up as `tests/e2e` does it; ``--task`` keeps it for the next call. ``float32`` is the
run without any of it, beside which the others stand:

* ``nf4``: an adapter of rank 16 is trained on a base in NormalFloat, with a KL to that base;
* ``int8``, ``fp8``: the sampler's weights are rounded at each weight sync, and importance weights of
  ``algorithm.rollout_correction`` make up for the difference.

Printed for each: held-out greedy accuracy before, every three steps and after, the mean reward of the first and of the
last step, what a run reports of its rounding, and seconds. Status 1 where a last accuracy stays below ``--least``.

``--speed``: tokens per second of the sampler with a random Qwen2 of four layers, and what its weights take.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from pathlib import Path

from tests.harness.arithmetic import Arithmetic, warmed_up
from tests.harness.models import tiny_model_dir
from tests.harness.programs import command, curve, metrics
from verl.rollout.base import Request, SamplingParams
from verl.rollout.hf.sampler import HFSampler

ACCURACY = "val-core/arithmetic/reward/mean@1"
MODEL, ROLLOUT = "actor_rollout_ref.model", "actor_rollout_ref.rollout"
CORRECTED = ("algorithm.rollout_correction.rollout_is=token", "algorithm.rollout_correction.rollout_is_threshold=2")
RUNS = {
    "float32": (),
    "nf4": (f"{MODEL}.lora_rank=16", f"{MODEL}.lora_alpha=32", f"{MODEL}.lora_base_quantization=nf4",
            "actor_rollout_ref.actor.optim.lr=5e-3", "actor_rollout_ref.actor.use_kl_loss=true"),
    "int8": (f"{ROLLOUT}.quantization=int8", *CORRECTED),
    "fp8": (f"{ROLLOUT}.quantization=fp8", *CORRECTED),
}  # fmt: skip
TOKENS = 16
REPORTED = ("training/reload_log_probs_diff_mean", "rollout/weights_mb", "mismatch/rollout_is_min")
"""Metrics of which the first and the last value are printed, where a run has them."""


def learn(task: Arithmetic, name: str, steps: int) -> list[dict]:
    """The steps of a run."""
    (task.folder / "logs" / "e2e" / f"{name}.jsonl").unlink(missing_ok=True)
    changes = ("algorithm.adv_estimator=grpo", "trainer.device=cpu", "trainer.resume_mode=disable",
               f"trainer.experiment_name={name}", f"trainer.default_local_dir={name}", "trainer.test_freq=3",
               f"trainer.total_training_steps={steps}")  # fmt: skip
    command("verl.trainer.main_ppo", *task.arguments, *changes, *RUNS[name], cwd=task.folder, timeout=1800)
    return metrics(task.folder, "e2e", name)


def report(name: str, steps: list[dict], seconds: float) -> None:
    accuracy, rewards = curve(steps, ACCURACY), curve(steps, "critic/score/mean")
    print(f"{name}: accuracy {' '.join(f'{value:.3f}' for value in accuracy)}")
    print(f"{name}: mean reward {rewards[0]:.3f} -> {rewards[-1]:.3f}; {seconds:.0f} s")
    for metric in REPORTED:
        if values := curve(steps, metric):
            print(f"{name}: {metric} {values[0]:.4g} -> {values[-1]:.4g}, at most {max(values):.4g}", flush=True)


def speed(folder: Path, width: int, rows: tuple[int, ...] = (1, 16, 64)) -> None:
    """Print tokens per second, the median of three calls, for so many rows at once, in each format."""
    model = tiny_model_dir(folder / "model", hidden=width, layers=4, heads=16, kv_heads=16)
    for kind in (None, "int8", "fp8"):
        sampler, rates = HFSampler(str(model), quantization=kind), []
        for count in rows:
            seconds = sorted(_sampled(sampler, count) for _ in range(4))  # the first lays weights out
            rates.append(f"{count} rows {count * TOKENS / statistics.median(seconds[:3]):.0f}")
        megabytes = sampler.stats()["weight_bytes"] / 1e6
        print(f"{kind or 'float32'}: tokens/s {', '.join(rates)}; weights {megabytes:.1f} MB", flush=True)


def _sampled(sampler: HFSampler, count: int) -> float:
    """Seconds for so many responses."""
    sampling = SamplingParams(max_tokens=TOKENS, ignore_eos=True)

    async def run() -> None:
        requests = (Request(f"{n}", (5, 6, 7), sampling, sample_index=n) for n in range(count))
        await asyncio.gather(*(sampler.generate(request) for request in requests))

    began = time.perf_counter()
    asyncio.run(run())
    return time.perf_counter() - began


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=list(RUNS), default=list(RUNS))
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--least", type=float, default=0.9)
    parser.add_argument("--task", type=Path)
    parser.add_argument("--speed", action="store_true")
    parser.add_argument("--width", type=int, default=1024)
    arguments = parser.parse_args(argv)
    last = []
    with tempfile.TemporaryDirectory() as folder:
        if arguments.speed:
            speed(Path(folder), arguments.width)
            return 0
        root = (arguments.task or Path(folder)).absolute()
        root.mkdir(parents=True, exist_ok=True)
        task = warmed_up(root)
        for name in arguments.only:
            began = time.monotonic()
            steps = learn(task, name, arguments.steps)
            report(name, steps, time.monotonic() - began)
            last.append(curve(steps, ACCURACY)[-1])
    return 0 if min(last) >= arguments.least else 1


if __name__ == "__main__":
    sys.exit(main())
