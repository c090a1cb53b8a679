"""Answers that the built-in scorers score per second of processor time, and what one that hangs costs the others.

    python benchmarks/bench_scorers.py [--answers 20000]

GSM8K: the worked solutions of the real test split (VERL_SHARED), each against its own truth and the next one's. The
other texts are made here: a derivation of 1,500 characters with an answer at its end, out of a list of forms that MATH
has. Each runs as in a training run, through `verl.rewards.Scorer`. Processor time is that of this process and of the
processes that compare formulas; the rates that are asked for are 20,000 (GSM8K) and 2,000 (MATH).
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from verl.rewards import (
    RewardFunction,
    RewardSample,
    Scorer,
    ScoringLimits,
    default_compute_score,
    load_reward_function,
)
from verl.rewards.scorers import symbolic

TRUTHS = (
    "2",
    "-17",
    r"\frac{3}{4}",
    r"2\sqrt{3}",
    "(1, 2)",
    "x^2+2x+1",
    r"\frac{\sqrt{2}}{2}",
    "1,000",
    r"10\%",
    r"5\pi",
)
SAID = ("2", "-17", "3/4", r"\sqrt{12}", "(1,2)", "(x+1)^2", r"\frac{1}{\sqrt2}", "1000", "10", r"15.7")
STEP = r"We have $a^2 + b^2 = c^2$, hence \[ c = \sqrt{a^2 + b^2} = \frac{1}{2} \cdot 10 \] and we go on from there. "


def gsm8k(count: int) -> list[RewardSample]:
    shared = Path(os.environ.get("VERL_SHARED") or Path(__file__).resolve().parents[2] / "shared")
    lines = (shared / "data/gsm8k/test.jsonl").read_text(encoding="utf-8").splitlines()
    solutions = [json.loads(line)["answer"] for line in lines]
    truths = [text.rpartition("#### ")[2].replace(",", "") for text in solutions]
    return [
        RewardSample("openai/gsm8k", solutions[i % len(lines)], truths[(i + i % 2) % len(lines)]) for i in range(count)
    ]


def made(source: str, ending: str, count: int) -> list[RewardSample]:
    body = STEP * (1500 // len(STEP))
    return [
        RewardSample(source, body + ending.format(SAID[i % len(SAID)]), TRUTHS[(i + i % 2) % len(TRUTHS)])
        for i in range(count)
    ]


def processor_seconds() -> float:
    children = psutil.Process().children(recursive=True)
    return time.process_time() + sum(sum(child.cpu_times()[:2]) for child in children)


def rate(scorer: Scorer, samples: list[RewardSample]) -> tuple[float, float]:
    """(answers per second of processor time, share that is right)."""
    start = processor_seconds()
    results = scorer.score(samples)
    seconds = processor_seconds() - start
    assert all(result.failure is None for result in results)
    return len(samples) / seconds, sum((result.score or 0.0) > 0.5 for result in results) / len(results)


def hanging(timeout: float) -> float:
    """Seconds until 64 good answers have their scores beside one that never ends."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "reward.py"
        file.write_text(
            "def compute_score(solution_str):\n    while solution_str == 'hang':\n        pass\n    return 1.0\n"
        )
        scorer = Scorer(load_reward_function(str(file)), ScoringLimits(timeout=timeout, num_workers=2))
        scorer.prepare()
        samples = [RewardSample("d", "hang" if i == 5 else "good", "") for i in range(65)]
        start = time.monotonic()
        results = scorer.score(samples)
        seconds = time.monotonic() - start
        scorer.close()
    assert sum(result.failure is not None for result in results) == 1
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--answers", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    count = arguments.answers
    scorer = Scorer(RewardFunction.of(default_compute_score))
    symbolic.equal("x+x", "2x")  # its process has started
    cases: dict[str, Callable[[], list[RewardSample]]] = {
        "GSM8K": lambda: gsm8k(count),
        "MATH": lambda: made("lighteval/MATH", r"So it is $\boxed{{{}}}$.", count),
        "DAPO, AIME": lambda: made("math_dapo", "Answer: {}", count),
        "Geometry3K": lambda: made("hiyouga/geometry3k", r"</think>\boxed{{{}}}", count),
        "search": lambda: made("searchR1_nq", "<answer>{}</answer>", count),
        "Numina (with formulas)": lambda: made("numina_olympiads", r"So it is $\boxed{{{}}}$.", count // 10),
    }
    print(f"load {os.getloadavg()[0]:.1f}\n\n| scorer | answers per CPU-second | right |\n|---|---|---|")
    for name, make in cases.items():
        samples = make()
        rates = [rate(scorer, samples) for _ in range(arguments.rounds)]
        print(f"| {name} | {sorted(r for r, _ in rates)[len(rates) // 2]:,.0f} | {rates[0][1]:.1%} |", flush=True)
    print(f"\n64 answers beside one that hangs (limit 1 s): {hanging(1.0):.2f} s")


if __name__ == "__main__":
    main()
