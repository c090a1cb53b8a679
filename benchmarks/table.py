"""Measures sampling, training and weight transfer against peers and goals, and writes `docs/appendix/benchmarks.md`.

    python benchmarks/table.py --peer-python path/to/venv-with-trl/bin/python [--vllm-python .venv-vllm/bin/python] \\
        [--model outputs/smollm2/model] [--quick] [--only grpo_step packing ...]

Every benchmark is a script of this folder that runs by itself, too. `docs/appendix/benchmarks.json` keeps the figures:
``--only`` measures a part again; a row that misses its goal stays in the table. TRL's environment is the one that
`bench_grpo_step.py` names, ``make test-vllm`` makes vLLM's; without one its rows are said to be missing. ``--model``
is the folder that ``examples/smollm2/model.py`` writes: ``real_step``, ``real_sampling_*`` and ``real_sft`` measure it.
``--quick`` takes fewer rounds and jobs.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from figures import ROOT, machine_limits

HERE, DOCS = Path(__file__).resolve().parent, ROOT / "docs"
TRL, VLLM, MODEL = "--peer-python", "--vllm-python", "--model"
Rows = list[tuple[str, dict[str, float | str]]]


@dataclass(frozen=True)
class Goal:
    """What one figure of one row should reach."""

    row: str
    figure: str
    least: float | None = None
    most: float | None = None

    @property
    def words(self) -> str:
        return f"at least {shown(self.least)}" if self.least is not None else f"at most {shown(self.most)}"

    def is_met(self, value: float) -> bool:
        return (self.least is None or value >= self.least) and (self.most is None or value <= self.most)


@dataclass(frozen=True)
class Benchmark:
    """A run of a script.

    Args:
        title: what it compares, as a heading.
        script: in this folder, with its ``words``; ``quick`` ones are added for a quick run.
        options: of this program that are handed on where they are given; with `MODEL` nothing runs without it.
        ranks: processes that torchrun starts; 0 is a script of one process.
    """

    title: str
    script: str
    words: tuple[str, ...] = ()
    quick: tuple[str, ...] = ()
    goals: tuple[Goal, ...] = ()
    options: tuple[str, ...] = ()
    ranks: int = 0


def sampling_goals(own: Mapping[str, float], vllm: float) -> tuple[Goal, ...]:
    against = [Goal(job, "hf / generate", least) for job, least in own.items()]
    beside = [Goal(job, "hf / vllm", vllm) for job in own]
    prefill = [Goal("prefill", f"16 x {what} / unshared", most=1.1) for what in ("tokens", "time")]
    return (*against, *beside, *prefill)


STEP = "TRL / ours by CPU time"
STEP_TITLE = "Full GRPO step, 16 prompts x 8 samples, float32, against TRL's GRPOTrainer"
SHORT_STEP = ("--rounds", "1", "--steps", "8")
BENCHMARKS = {
    "sampling_float32": Benchmark(
        "Sampling in float32, 128 rows, 10M parameters, against `transformers.generate` and vLLM",
        "bench_sampling.py",
        ("--dtype", "float32", "--prefill", "--peak"),
        ("--rounds", "1", "--jobs", "distinct", "shared", "tail"),
        sampling_goals({"distinct": 1.4, "shared": 1.7, "tail": 3.0}, 0.9),
        (VLLM,),
    ),
    "sampling_bfloat16": Benchmark(
        "Sampling in bfloat16, 128 rows, 10M parameters, against `transformers.generate` and vLLM",
        "bench_sampling.py",
        ("--dtype", "bfloat16", "--prefill", "--peak"),
        ("--rounds", "1", "--jobs", "distinct", "shared", "tail"),
        sampling_goals({"distinct": 2.0, "shared": 2.3, "tail": 3.0}, 1.2),
        (VLLM,),
    ),
    "grpo_step": Benchmark(
        STEP_TITLE,
        "bench_grpo_step.py",
        ("--sizes", "0.1M", "10M", "tail"),
        SHORT_STEP,
        (Goal("0.1M", STEP, 2.0), Goal("10M", STEP, 1.6), Goal("tail", STEP, 2.5)),
        (TRL,),
    ),
    "grpo_step_unshared": Benchmark(
        f"{STEP_TITLE}; every prompt computed for each of its responses in training",
        "bench_grpo_step.py",
        ("--sizes", "10M", "--more", "actor_rollout_ref.actor.use_prefix_grouper=false"),
        SHORT_STEP,
        (Goal("10M", STEP, 1.3),),
        (TRL,),
    ),
    "vision": Benchmark(
        "GRPO step of a small Qwen2.5-VL, 8 pictures x 8 samples, float32, against TRL's GRPOTrainer",
        "bench_vision.py",
        (),
        SHORT_STEP,
        (Goal("a GRPO step", STEP, 1.3), Goal("prompts", "ratio", most=1.2)),
        (TRL,),
    ),
    "sft": Benchmark(
        "Fine-tuning step, 32 rows, 10M parameters, float32, against TRL's SFTTrainer at its fastest",
        "bench_sft.py",
        (),
        ("--rounds", "1", "--steps", "6"),
        (Goal("10M", "ours / TRL", 1.3),),
        (TRL,),
    ),
    "dpo": Benchmark(
        "DPO step, 16 pairs, 10M parameters, float32, against TRL's DPOTrainer at its fastest",
        "bench_dpo.py",
        (),
        ("--rounds", "1", "--steps", "5"),
        (Goal("10M", "ours / TRL", 1.0),),
        (TRL,),
    ),
    "real_step": Benchmark(
        "GRPO step of a published model of 135M parameters, 16 prompts x 8 samples, two threads, against TRL",
        "bench_real_step.py",
        ("--length", "24", "256", "--lora"),
        (),
        (
            Goal("24 tokens", "TRL / ours", 5.0),
            Goal("256 tokens", "TRL / ours", 4.0),
            Goal("24 tokens", "ours / TRL, memory", most=0.5),
            Goal("24 tokens", "LoRA / TRL, memory", most=0.25),
            Goal("training", "share", least=0.75),
        ),
        (TRL, MODEL),
    ),
    **{
        f"real_sampling_{dtype}": Benchmark(
            f"Sampling of a published model of 135M parameters in {dtype}, 128 rows, two threads",
            "bench_sampling.py",
            ("--dtype", dtype, "--rounds", "1", "--jobs", "shared", "tail, shared"),
            (),
            (Goal("shared", "hf / vllm", least), Goal("tail, shared", "hf / vllm", least)),
            (VLLM, MODEL),
        )
        for dtype, least in (("float32", 1.3), ("bfloat16", 1.0))
    },
    "real_sft": Benchmark(
        "Fine-tuning step of a published model of 135M parameters, 32 rows, float32, two threads, against TRL",
        "bench_sft.py",
        ("--rounds", "1", "--steps", "3"),
        (),
        (Goal("published model", "ours / TRL", 1.3),),
        (TRL, MODEL),
    ),
    "lm_head": Benchmark(
        "Fused LM head with the entropy, vocabulary 152,064, hidden 1,024, 4,096 tokens (quick: 512)",
        "bench_lm_head.py",
        ("--entropy", "--tiles", "2048", "8192"),
        ("--tokens", "512"),
        (
            Goal("tile automatic", "naive / memory", 20.0),
            Goal("tile automatic", "time / naive", most=1.35),
            Goal("tile automatic", "gradients apart", most=1e-5),
            Goal("tile 2048", "gradients apart", most=1e-5),
            Goal("tile 8192", "gradients apart", most=1e-5),
        ),
    ),
    "lm_head_linear": Benchmark(
        "Fused LM head, loss linear in the log-probs, same sizes",
        "bench_lm_head.py",
        (),
        ("--tokens", "512"),
        (
            Goal("one sweep, slopes known", "naive / memory", 20.0),
            Goal("one sweep, slopes known", "time / naive", most=1.05),
        ),
    ),
    "prefix": Benchmark(
        "Training with shared prompts, 4 groups of 8 responses of 32 tokens",
        "bench_prefix.py",
        (),
        ("--rounds", "3"),
        tuple(
            goal
            for prompt in (32, 128, 512)
            for goal in (
                Goal(f"prompts of {prompt}", "tokens / (prompts + responses)", most=1.0),
                Goal(f"prompts of {prompt}", "gain / ratio", 0.9),
            )
        ),
    ),
    "packing": Benchmark(
        "Training on packed rows against padded ones, log-normal lengths",
        "bench_packing.py",
        (),
        ("--rounds", "2", "--rows", "32"),
        tuple(Goal(f"sigma {sigma}", "share of the bound", 0.9) for sigma in (0.3, 0.6, 0.9, 1.2)),
    ),
    "balancing": Benchmark(
        "Sequences split over ranks",
        "bench_balancing.py",
        (),
        (),
        (
            Goal("8192, 128: equal counts", "above the bound", most=0.001),
            Goal("8192, 128: equal counts", "ms", most=50.0),
        ),
    ),
    "sharding": Benchmark(
        "Weights on each of two FSDP ranks, 24 layers",
        "bench_sharding.py",
        (),
        (),
        (Goal("fsdp2", "at most / bound", most=1.0),),
        ranks=2,
    ),
    "weight_sync": Benchmark(
        "Weights from trainer to sampler, bf16",
        "bench_weight_sync.py",
        (),
        ("--rounds", "3", "--steps", "1"),
        (
            *(Goal(way, "of a copy", 0.5) for way in ("same process", "shared memory", "gloo", "disk")),
            Goal("update 1", "times fewer bytes", 60.0),
        ),
    ),
}


@dataclass
class Found:
    """What one benchmark has told."""

    rows: Rows = field(default_factory=list)
    error: str = ""
    seconds: float = 0.0
    quick: bool = False
    load: float = 0.0


def measure(name: str, options: argparse.Namespace) -> Found:
    """Run a benchmark; what it says goes to the screen, too, line by line."""
    benchmark = BENCHMARKS[name]
    words = [*benchmark.words, *(benchmark.quick if options.quick else ())]
    for option in benchmark.options:
        place = vars(options)[option.lstrip("-").replace("-", "_")]
        words += [option, os.path.abspath(place)] if place else []
    command = [sys.executable, str(HERE / benchmark.script), *words]
    if benchmark.ranks:
        command[1:1] = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={benchmark.ranks}"]
    threads = "2" if MODEL in benchmark.options else "1"
    environment = {"OMP_NUM_THREADS": threads, **os.environ, "PYTHONPATH": str(ROOT)}
    found = Found(quick=options.quick, load=os.getloadavg()[0])
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "figures.json"
        command += [] if name == "weight_sync" else ["--json", str(path)]
        print(f"\n== {name}: {' '.join(command[1:])}", flush=True)
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True, cwd=ROOT) as run:
            assert run.stdout is not None
            lines = []
            for line in run.stdout:
                print(line, end="", flush=True)
                lines.append(line)
        found.seconds = time.monotonic() - start
        if run.returncode:
            found.error = f"ended with exit code {run.returncode}"
        else:
            found.rows = weight_rows("".join(lines)) if name == "weight_sync" else json.loads(path.read_text())
    return found


def weight_rows(told: str) -> Rows:
    """The figures in the lines that `bench_weight_sync.py` prints."""
    rows: Rows = []
    for line in told.splitlines():
        way = re.match(r"  ([\w, ]+?) +([\d.]+) ms +([\d.]+) GB/s +(\d+)% of a copy(?:, (\d+)% of its limit)?", line)
        update = re.match(r"  (update \d+): +([\d.]+)% changed.*: +([\d.]+) x fewer.*?(exact|NOT EXACT)$", line)
        if way:
            limit = {"of its limit": int(way[5]) / 100} if way[5] else {}
            rows.append((way[1], {"ms": float(way[2]), "GB/s": float(way[3]), "of a copy": int(way[4]) / 100, **limit}))
        elif update:
            rows.append((update[1], {"% changed": float(update[2]), "times fewer bytes": float(update[3]),
                                     "same bits": update[4]}))  # fmt: skip
    return rows


def shown(value: Any) -> str:
    if isinstance(value, (int, float)):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return str(value)


def goal_lines(name: str, found: Found) -> list[str]:
    lines = []
    rows: dict[str, dict[str, float | str]] = {}
    for row, figures in found.rows:
        rows.setdefault(row, figures)
    for goal in BENCHMARKS[name].goals:
        value = rows.get(goal.row, {}).get(goal.figure)
        if isinstance(value, (int, float)):
            mark = "reached" if goal.is_met(value) else "**missed**"
        else:
            mark = "not run"
        told = "" if value is None else shown(value)
        lines.append(f"| {name} | {goal.row} | {goal.figure} | {told} | {goal.words} | {mark} |")
    return lines


def section(name: str, found: Found) -> list[str]:
    """All figures of a benchmark: a table per set of columns."""
    benchmark = BENCHMARKS[name]
    how = "quick run, " if found.quick else ""
    lines = ["", f"### {name}", "", f"{benchmark.title}. `benchmarks/{benchmark.script}`, {how}"
             f"{found.seconds:.0f} s, load before it {found.load:.1f}."]  # fmt: skip
    if found.error:
        return [*lines, "", f"No figures: it {found.error}."]
    columns: list[str] = []
    for row, figures in found.rows:
        if list(figures) != columns:
            columns = list(figures)
            lines += ["", f"| | {' | '.join(columns)} |", "|" + " --- |" * (len(columns) + 1)]
        lines.append(f"| {row} | {' | '.join(shown(value) for value in figures.values())} |")
    return lines


def page(state: Mapping[str, Any]) -> str:
    machine = state["machine"]
    limits = ", ".join(f"{shown(value)} {name}" for name, value in machine["limits"].items())
    known = {name: Found(**state["found"][name]) for name in BENCHMARKS if name in state["found"]}
    lines = [
        "# Benchmarks",
        "",
        "Made by `python benchmarks/table.py` from its measurements (`benchmarks.json`). Peers and ours alternated, on",
        "one thread each where no other number is given. Other load on the machine slows both sides, so compare",
        "ratios, preferably by CPU time. Rows that miss their goal are included.",
        "",
        f"Machine: {machine['cores']} cores, torch {machine['torch']}; one thread reaches {limits}.",
        "",
        "## Goals",
        "",
        "| benchmark | row | figure | measured | goal | |",
        "| --- | --- | --- | --- | --- | --- |",
        *(line for name, found in known.items() for line in goal_lines(name, found)),
        "",
        "## Figures",
        *(line for name, found in known.items() for line in section(name, found)),
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(TRL, help="python of the environment with TRL")
    parser.add_argument(VLLM, help="python of the environment with vLLM")
    parser.add_argument(MODEL, help="folder of a published model, for the benchmarks real_*")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", nargs="+", choices=BENCHMARKS)
    options = parser.parse_args()
    of_model = [name for name, benchmark in BENCHMARKS.items() if MODEL in benchmark.options]
    options.only = options.only or [name for name in BENCHMARKS if options.model or name not in of_model]
    if not options.model and set(of_model) & set(options.only):
        parser.error(f"{', '.join(of_model)} need {MODEL} (examples/smollm2/model.py writes one)")
    import torch

    kept = DOCS / "appendix" / "benchmarks.json"
    state = json.loads(kept.read_text()) if kept.exists() else {"found": {}}
    cores = len(os.sched_getaffinity(0))
    state["machine"] = {"cores": cores, "torch": torch.__version__, "limits": machine_limits()}
    for name in options.only:
        state["found"][name] = vars(measure(name, options))
        kept.write_text(json.dumps(state, indent=1) + "\n")
        (DOCS / "appendix" / "benchmarks.md").write_text(page(state))
    found = {name: Found(**state["found"][name]) for name in options.only}
    print("\n".join(line for name in found for line in goal_lines(name, found[name])))
    print(
        f"{sum(f.seconds for f in found.values()) / 60:.0f} minutes; written to {DOCS / 'appendix' / 'benchmarks.md'}"
    )
    if any(f.error for f in found.values()):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
