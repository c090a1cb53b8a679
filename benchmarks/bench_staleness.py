"""How well each schedule learns the quickstart's task, and what staleness costs with and without a correction.

    python benchmarks/bench_staleness.py [--steps 24] [--seeds 0 1 2] [--jobs 1] [--out outputs/staleness]

Warms the quickstart's model up once, as `examples/quickstart/run.py` does, then trains it from reward under every
schedule, in one local process each, with equal samples: 64 prompts x 8 samples per step, four mini-batches. Printed as
a Markdown table: staleness, held-out greedy accuracy after the last step by seed, its difference from ``sync`` with the
95 % interval of Student's t (the mean over the seeds of own minus sync's, as a seed fixes the order of the prompts and
the random numbers of both), the mean of the last three validations of all seeds, and the step from which on it is at
least 90 %. Below it how large a difference so few seeds can miss. The curves go to ``OUT/staleness.svg``: means
over the seeds, and the range between the worst and the best. A run that is there already is not repeated.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from concurrent import futures
from dataclasses import dataclass
from pathlib import Path

from figures import ROOT, Figures, add_json

sys.path[:0] = [str(ROOT), str(ROOT / "examples")]
from quickstart.run import ACCURACY_WANTED, command_lines  # noqa: E402

from verl.observability.plots import read_metrics, series  # noqa: E402

MODE, WARMUP = "trainer.v1.trainer_mode", "trainer.v1.colocate_async.num_warmup_batches"
BYPASS, WEIGHTS = "algorithm.rollout_correction.bypass_mode=true", "algorithm.rollout_correction.rollout_is=token"
SYNC, FOUR = (f"{MODE}=sync",), (f"{MODE}=colocate_async", f"{WARMUP}=4", "trainer.v1.sampler.order=admission")
FULLY = ("async_training.staleness_threshold=1", "async_training.trigger_parameter_sync_step=4")
RUNS = {
    "sync": SYNC,
    "one_step_off": (f"{MODE}=one_step_off", BYPASS),
    "colocate_async": (f"{MODE}=colocate_async", BYPASS),
    "separate_async": (f"{MODE}=separate_async", BYPASS),
    "fully_async": (f"{MODE}=fully_async", BYPASS, *FULLY),
    "4 stale, clipped to the sampler": (*FOUR, BYPASS),
    "4 stale, clipped closer": (*FOUR, BYPASS, "actor_rollout_ref.actor.clip_ratio=0.1"),
    "4 stale, importance weights": (*FOUR, WEIGHTS),
    "4 stale, uncorrected": FOUR,
}
"""Name -> words of the command line, after those of the quickstart's last command."""
PANELS = ("staleness of at most 1", "staleness of up to 4")
STUDENT = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36, 9: 2.31, 10: 2.26}
"""Number of seeds -> the quantile of Student's t for 95 %, two-sided."""
STALENESS = "training/off_policy/trajectory_staleness_worst"


@dataclass(frozen=True)
class Curve:
    """Held-out accuracy over the steps of a run.

    Args:
        staleness: of the stalest token of the run, in versions.
        seconds: of the complete command.
    """

    steps: tuple[int, ...]
    accuracy: tuple[float, ...]
    staleness: float
    seconds: float

    @property
    def late(self) -> float:
        """Mean of the last three validations, which vary from step to step."""
        return statistics.mean(self.accuracy[-3:])

    @property
    def step_wanted(self) -> float:
        """The first step from which on the accuracy is as wanted; infinite without one."""
        below = [step for step, value in zip(self.steps, self.accuracy) if value < ACCURACY_WANTED]
        above = [step for step in self.steps if not below or step > below[-1]]
        return min(above, default=float("inf"))


def warmed_up(out: Path) -> list[str]:
    """Run the quickstart's commands up to the last one, unless they were; returns the words of that one."""
    *before, (_, last) = command_lines(out, seed=0)
    for title, words in before:
        target = out / ("warm " + title.split()[0].rstrip(":"))
        if not target.exists():
            call(words, out / "warm.txt", out)
            target.touch()
    return last


def call(words: list[str], log: Path, out: Path) -> None:
    """Run a Python program; what it prints goes to a file.

    Raises:
        SystemExit: it failed; with the end of that file.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    environment["VERL_FILE_LOGGER_ROOT"] = str(out / "logs")
    with log.open("w") as file:
        status = subprocess.run([sys.executable, *words], env=environment, stdout=file, stderr=file, check=False)
    if status.returncode:
        raise SystemExit(f"{' '.join(words)} failed:\n{log.read_text()[-4000:]}")


def curve(name: str, seed: int, base: list[str], asked: argparse.Namespace) -> Curve:
    """One run, or what an earlier call of this program left of it."""
    label = f"{name.replace(', ', '-').replace(' ', '_')}-{seed}"
    metrics, clock = asked.out / "logs" / "staleness" / f"{label}.jsonl", asked.out / f"{label}.seconds"
    if not clock.exists():
        metrics.unlink(missing_ok=True)
        words = [
            *base,
            *RUNS[name],
            "actor_rollout_ref.actor.ppo_mini_batch_size=16",
            f"data.seed={seed}",
            f"trainer.seed={seed}",
            f"trainer.total_training_steps={asked.steps}",
            "trainer.save_freq=-1",
            "trainer.test_freq=3",
            "data.val_max_samples=256",
            "trainer.project_name=staleness",
            f"trainer.experiment_name={label}",
            f"trainer.default_local_dir={asked.out}/{label}",
            "trainer.logger=[file]",
            "trainer.log_train_generations=0",
        ]
        begun = time.monotonic()
        call(words, asked.out / f"{label}.txt", asked.out)
        clock.write_text(f"{time.monotonic() - begun:.1f}")
    rows = read_metrics(metrics)
    key = next(key for _, data in rows for key in data if key.startswith("val-core/") and key.endswith("/mean@1"))
    held_out = series(rows, key)
    stalest = max((data.get(f"{STALENESS}/max", 0.0) for _, data in rows), default=0.0)
    return Curve(held_out.steps, held_out.values, stalest, float(clock.read_text()))


def draw(curves: dict[str, list[Curve]], path: Path) -> None:
    """Two panels: the schedules with a staleness of at most 1, and ``sync`` beside those with up to 4."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "verl"  # the same file from the same numbers
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(10, 3.8), sharey=True, layout="constrained")
    for axis, title, many in zip(axes, PANELS, (False, True)):
        for name, seeds in curves.items():
            if name != "sync" and name.startswith("4 stale") != many:
                continue
            columns = list(zip(*(one.accuracy for one in seeds)))
            steps = seeds[0].steps
            line = axis.plot(steps, [statistics.mean(column) for column in columns], label=name, linewidth=1.5)[0]
            low, high = [min(column) for column in columns], [max(column) for column in columns]
            axis.fill_between(steps, low, high, color=line.get_color(), alpha=0.12, linewidth=0)
        axis.axhline(ACCURACY_WANTED, color="grey", linewidth=0.6, linestyle=":")
        axis.set(title=title, xlabel="step", ylim=(0, 1.02))
        axis.legend(loc="lower right", fontsize=8)
    axes[0].set_ylabel("held-out accuracy")
    figure.savefig(path, metadata={"Date": None})


def difference(base: list[Curve], own: list[Curve]) -> tuple[float, float]:
    """Mean of the paired differences of the final accuracy, and half the width of its 95 % interval."""
    each = [one.accuracy[-1] - other.accuracy[-1] for one, other in zip(own, base, strict=True)]
    return statistics.mean(each), STUDENT[len(each)] * statistics.stdev(each) / len(each) ** 0.5


def verdict(curves: dict[str, list[Curve]]) -> str:
    """Which runs differ from ``sync`` by more than chance explains, and what so few seeds cannot tell."""
    apart = {name: difference(curves["sync"], own) for name, own in curves.items() if name != "sync"}
    other = [name for name, (mean, half) in apart.items() if abs(mean) > half]
    halves = sorted({round(100 * half, 1) for _, half in apart.values()})
    return (
        f"Differences from sync that 0 is not within: {', '.join(other) or 'none'}. With {len(curves['sync'])} seeds "
        f"the intervals are ±{halves[0]} to ±{halves[-1]} points wide; a smaller difference is not excluded."
    )


def table(curves: dict[str, list[Curve]], figures: Figures) -> str:
    compares = "sync" in curves and len(curves["sync"]) in STUDENT
    lines = [
        "| run | staleness | accuracy by seed | minus sync, points | mean of the last three | ≥ 90 % from step |",
        "| --- | ---: | --- | ---: | ---: | --- |",
    ]
    for name, seeds in curves.items():
        final = [one.accuracy[-1] for one in seeds]
        reached = ["never" if one.step_wanted == float("inf") else f"{one.step_wanted:.0f}" for one in seeds]
        stalest, seconds = max(one.staleness for one in seeds), statistics.median(one.seconds for one in seeds)
        by_seed = ", ".join(f"{value:.1%}" for value in final)
        late = statistics.mean(one.late for one in seeds)
        mean, half = difference(curves["sync"], seeds) if compares else (0.0, 0.0)
        apart = f"{100 * mean:+.1f} ± {100 * half:.1f}" if compares and name != "sync" else ""
        lines.append(f"| {name} | {stalest:.0f} | {by_seed} | {apart} | {late:.1%} | {', '.join(reached)} |")
        figures.add(
            name,
            {
                "staleness": stalest,
                "accuracy": statistics.mean(final),
                "late accuracy": late,
                "worst accuracy": min(final),
                "seconds": seconds,
            },
        )
    return "\n".join([*lines, "", verdict(curves)] if compares and len(curves) > 1 else lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--runs", nargs="+", default=list(RUNS), choices=list(RUNS))
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, each with one thread")
    parser.add_argument("--out", type=Path, default=Path("outputs/staleness"))
    add_json(parser)
    asked = parser.parse_args()
    asked.out = asked.out.resolve()
    asked.out.mkdir(parents=True, exist_ok=True)
    base = warmed_up(asked.out)
    with futures.ThreadPoolExecutor(asked.jobs) as pool:
        wanted = [(name, seed) for seed in asked.seeds for name in asked.runs]
        jobs = {(name, seed): pool.submit(curve, name, seed, base, asked) for name, seed in wanted}
    curves = {name: [jobs[name, seed].result() for seed in asked.seeds] for name in asked.runs}
    draw(curves, asked.out / "staleness.svg")
    figures = Figures()
    print(table(curves, figures))
    figures.write(asked.json)


if __name__ == "__main__":
    main()
