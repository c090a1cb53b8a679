"""Turns correct sums into the demonstrations of a hasty pupil, who forgets three carries out of four.

A model that imitates them answers every sum with a carry wrongly, and no more demonstrations would help. The reward
sees only whether the answer is right: with it, reinforcement learning has to find what its teacher did not show.

    python examples/quickstart/demonstrations.py sft.parquet demonstrations.parquet
"""

from __future__ import annotations

import argparse
import random

import pandas as pd


def hasty_sum(question: str, forgets: bool) -> str:
    """``'27+15='`` -> ``'42'``, or ``'32'`` where the carry is forgotten."""
    left, right = (int(number) for number in question.rstrip("=").split("+"))
    carries = left % 10 + right % 10 >= 10
    return str(left + right - (10 if carries and forgets else 0))


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the demonstrations of a pupil who forgets most carries.")
    parser.add_argument("source", help="conversations from verl.data.prepare.arithmetic")
    parser.add_argument("target", help="the parquet file to write")
    parser.add_argument("--forgets", type=float, default=0.75, help="share of carries that are forgotten")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    rng = random.Random(arguments.seed)
    rows = pd.read_parquet(arguments.source)
    for messages in rows["messages"]:
        messages[1]["content"] = hasty_sum(messages[0]["content"], rng.random() < arguments.forgets)
    rows.to_parquet(arguments.target)
    print(f"wrote {arguments.target} ({len(rows)} conversations)")


if __name__ == "__main__":
    main()
