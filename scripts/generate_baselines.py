"""Write docs/appendix/baselines.md from docs/appendix/baselines.json, which holds what the commands below measured.

    PYTHONPATH=. python scripts/generate_baselines.py [--check] [--measure NAME ...]

``--measure`` runs a command, reads its results off what it prints or writes, and notes them with the day and the
machine. A result is never typed in by hand.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGE, RESULTS = ROOT / "docs" / "appendix" / "baselines.md", ROOT / "docs" / "appendix" / "baselines.json"
HEAD = """# Baselines

What a script of this repository has measured; nothing is copied from elsewhere. This page is made by
`scripts/generate_baselines.py`; `--measure NAME` repeats a measurement and notes it.

| name | what | command | result | when, where |
| --- | --- | --- | --- | --- |
"""
TAIL = """
Every estimator and policy loss on one small task: [algorithm_curves.md](algorithm_curves.md), made by
`scripts/learning_curves.py`. Speed against other libraries: [perf_tuning.md](../howto/perf_tuning.md).

![Reward on training prompts and accuracy on held-out ones](../images/quickstart.png)

Every run of the test suite that learns is checked against a curve: `tests/e2e/test_learning.py` (GRPO and PPO with a
critic), `tests/e2e/test_real_model.py` (a small real Llama), `tests/e2e/test_published_model.py` (the model of 135
million parameters on every engine). Results on GSM8K, MATH or AIME with models of billions need GPUs and are not there.
"""


@dataclass(frozen=True)
class Measure:
    """A command and what to read off it.

    Args:
        words: after the interpreter; ``{out}`` is a folder that is made for it.
        patterns: name of a result -> what it looks like in the output, the value in the first group; or, with ``file``,
            its key in that JSON file.
        picture: a plot in the folder, and what it is called in ``docs/images``.
    """

    what: str
    words: tuple[str, ...]
    patterns: Mapping[str, str]
    file: str | None = None
    picture: tuple[str, str] | None = None

    def command(self) -> str:
        """As a reader calls it: without the options that name a folder of this measurement."""
        pairs = zip(self.words, (*self.words[1:], ""), strict=True)
        return "python " + " ".join(word for word, after in pairs if "{" not in word + after)


def published(what: str, *words: str, name: str, picture: tuple[str, str] | None = None) -> Measure:
    """A task of `examples/smollm2`; ``name`` is that of its files."""
    return Measure(
        f"SmolLM2-135M-Instruct: {what}",
        ("examples/smollm2/run.py", *words, "--out", "{out}"),
        {"before": "first", "after": "last", "steps": "steps", "minutes": "minutes", "peak GB": "peak_gb"},
        file=f"logs/{name}.summary.json",
        picture=picture,
    )


ADDITION = "GRPO on two-digit additions, held-out greedy accuracy"

MEASURES = {
    "quickstart": Measure(
        "GRPO on two-digit additions, a Qwen2 of one million parameters: held-out greedy accuracy before "
        "and after 50 steps; the run fails below 0.9",
        ("examples/quickstart/run.py", "--out", "{out}"),
        {"before": "accuracy_before", "after": "accuracy_after", "seconds": "seconds_total"},
        file="summary.json",
    ),
    "scorers": Measure(
        "answers scored per second of processor time",
        ("benchmarks/bench_scorers.py",),
        {
            name: rf"^\| {re.escape(name)} \| ([0-9,]+) \|"
            for name in ("GSM8K", "MATH", "DAPO, AIME", "Geometry3K", "search", "Numina (with formulas)")
        }
        | {"s for 64 answers beside one that hangs for 1 s": r"limit 1 s\): ([0-9.]+) s"},
    ),
    "balancing": Measure(
        "splitting 8,192 sequences over 128 ranks: above the bound, milliseconds",
        ("benchmarks/bench_balancing.py",),
        {"equal counts": r"^\| 8192, 128 \| equal counts \| ([0-9.%]+ \| [0-9.]+) \|"},
    ),
    **{
        f"smollm2_addition_{seed}": published(
            ADDITION,
            *("addition", "--seed", str(seed)),
            name=f"addition-{seed}",
            picture=("logs/addition-0.png", "smollm2.png") if seed == 0 else None,
        )
        for seed in range(3)
    },
    **{
        f"smollm2_addition_lora_{seed}": published(
            f"{ADDITION}, an adapter of rank 32",
            *("addition", "--lora", "--seed", str(seed)),
            name=f"addition-lora-{seed}",
        )
        for seed in range(3)
    },
    "smollm2_countdown": published(
        "GRPO on Countdown (three numbers, + and -) after imitating flawed demonstrations, mean reward of held-out "
        "greedy answers: 1, or 0.1 off the goal",
        "countdown",
        name="countdown-0",
    ),
    "smollm2_tools": published(
        "GRPO on products after imitating flawed demonstrations, with a calculator in several turns, held-out greedy "
        "accuracy",
        "tools",
        name="tools-0",
    ),
    "smollm2_sft": published(
        "fine-tuning on GSM8K's worked solutions, held-out loss per token",
        *("sft", "--gsm8k", "{shared}/data/gsm8k"),
        name="sft-0",
    ),
    "smollm2_dpo": published(
        "DPO on pairs of its answers to additions, mean score of eight held-out samples", "dpo", name="dpo-0"
    ),
    "smollm2_reward_model": published(
        "a reward model on pairs of its answers to additions, held-out accuracy", "reward_model", name="reward_model-0"
    ),
}


def measure(name: str) -> dict[str, Any]:
    """Run a command; returns its results. Raises SystemExit where it fails or a result is missing."""
    one = MEASURES[name]
    with tempfile.TemporaryDirectory() as out:
        shared = os.environ.get("VERL_SHARED", ROOT.parent / "shared")
        words = [sys.executable, *(word.format(out=out, shared=shared) if "{" in word else word for word in one.words)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{name} failed:\n{done.stdout[-1000:]}\n{done.stderr[-2000:]}")
        written = json.loads((Path(out) / one.file).read_text(encoding="utf-8")) if one.file else {}
        if one.picture:
            shutil.copy(Path(out) / one.picture[0], ROOT / "docs" / "images" / one.picture[1])
    results = {}
    for result, pattern in one.patterns.items():
        if one.file:
            value = written[pattern]
            results[result] = f"{value:.3f}" if isinstance(value, float) else str(value)
            continue
        found = re.search(pattern, done.stdout, re.MULTILINE)
        if found is None:
            raise SystemExit(f"{name} printed no {result}:\n{done.stdout[-2000:]}")
        results[result] = found[1].replace(" | ", ", ")
    load = os.getloadavg()[0]
    where = f"{len(os.sched_getaffinity(0))} cores, {platform.machine()}, load {load:.0f}"
    return {"results": results, "when": datetime.date.today().isoformat(), "where": where}


def page(noted: Mapping[str, Any]) -> str:
    """The page from what was noted; a measurement that was never made says so."""
    lines = []
    for name, one in MEASURES.items():
        found = noted.get(name)
        results = "; ".join(f"{key}: {value}" for key, value in found["results"].items()) if found else "not measured"
        where = f"{found['when']}, {found['where']}" if found else ""
        lines.append(f"| `{name}` | {one.what} | `{one.command()}` | {results} | {where} |\n")
    return HEAD + "".join(lines) + TAIL


def noted() -> dict[str, Any]:
    return json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.is_file() else {}


def main(argv: list[str] | None = None) -> int:
    """Measure what is named, then write the page; with ``--check`` only say whether it is up to date."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; status 1 if the page is old")
    parser.add_argument("--measure", nargs="*", default=[], choices=sorted(MEASURES), help="run these again")
    arguments = parser.parse_args(argv)
    results = noted()
    for name in arguments.measure:
        results[name] = measure(name)
        RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    made = page(results)
    if arguments.check:
        same = PAGE.read_text(encoding="utf-8") == made
        print(f"{PAGE.name} is {'up to date' if same else 'old: run this script without --check'}")
        return 0 if same else 1
    PAGE.write_text(made, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
