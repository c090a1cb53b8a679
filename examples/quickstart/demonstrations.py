"""Turns correct sums into the demonstrations of a rambling pupil, who does not stop at the answer.

In three of five examples the pupil goes on after the sum with another ``=``. A model that imitates them can add, and
still gives the wrong answer nearly always, and no more demonstrations would help. The reward sees only whether the
answer is exactly the sum: with it, reinforcement learning has to find what its teacher did not show.

    python examples/quickstart/demonstrations.py sft.parquet demonstrations.parquet
"""

from __future__ import annotations

import argparse
import random

import pandas as pd


def rambling_answer(answer: str, rambles: bool) -> str:
    """``'42'``, or ``'42='`` where the pupil goes on."""
    return f"{answer}=" if rambles else answer


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the demonstrations of a pupil who does not stop in time.")
    parser.add_argument("source", help="conversations of data_preprocess/arithmetic.py")
    parser.add_argument("target", help="the parquet file to write")
    parser.add_argument("--rambles", type=float, default=0.6, help="share of answers that go on")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    rng = random.Random(arguments.seed)
    rows = pd.read_parquet(arguments.source)
    for messages in rows["messages"]:
        messages[1]["content"] = rambling_answer(messages[1]["content"], rng.random() < arguments.rambles)
    rows.to_parquet(arguments.target)
    print(f"wrote {arguments.target} ({len(rows)} conversations)")


if __name__ == "__main__":
    main()
