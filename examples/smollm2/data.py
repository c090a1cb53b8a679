"""Writes the prompts of the tasks for SmolLM2: ``train.parquet`` and ``test.parquet``, which share none.

python examples/smollm2/data.py addition outputs/smollm2/addition
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd

from verl.trainer.command import run_program


def addition(draw: random.Random) -> tuple[str, str]:
    """Two numbers of two digits; the model is right in one of six."""
    a, b = draw.randrange(10, 100), draw.randrange(10, 100)
    return f"What is {a} plus {b}? Answer with the number only.", str(a + b)


def expression(numbers: list[int], draw: random.Random) -> tuple[str, int]:
    """Three numbers in any order with ``+`` or ``-`` between them, at least one ``-``, and the value."""
    a, b, c = draw.sample(numbers, 3)
    first, second = draw.choice(((1, -1), (-1, 1), (-1, -1)))
    return f"{a} {SIGNS[first]} {b} {SIGNS[second]} {c}", a + first * b + second * c


def countdown(draw: random.Random) -> tuple[str, str]:
    """Three numbers up to 20, and what they make with ``+`` and ``-``; any one form is rarely right."""
    numbers = sorted(draw.sample(range(1, 21), 3))
    _, goal = expression(numbers, draw)
    a, b, c = numbers
    return f"Use {a}, {b} and {c} once each, with + and -, to make {goal}. Write the expression only.", (
        f"{goal}: {a} {b} {c}"
    )


def products(draw: random.Random) -> tuple[str, str]:
    """Two numbers of two digits, whose product the model cannot compute."""
    a, b = draw.randrange(12, 100), draw.randrange(12, 100)
    return f"What is {a} times {b}?", str(a * b)


def of_products(question: str, product: str, is_good: bool, draw: random.Random) -> list[dict[str, str]]:
    """Turns that use the calculator, or one that guesses a number of about that size."""
    a, b = question.removeprefix("What is ").removesuffix("?").split(" times ")
    if not is_good:
        return [{"role": "assistant", "content": str(int(product) + draw.randrange(-200, 201))}]
    call = {"name": "calculator", "arguments": {"expression": f"{a}*{b}"}}
    return [
        {"role": "assistant", "content": f"<tool_call>\n{json.dumps(call)}\n</tool_call>"},
        {"role": "tool", "content": product},
        {"role": "assistant", "content": product},
    ]


def of_countdown(question: str, truth: str, is_good: bool, draw: random.Random) -> list[dict[str, str]]:
    """An expression that reaches the goal, or any of these numbers."""
    goal, _, listed = truth.partition(": ")
    numbers = [int(number) for number in listed.split()]
    text, value = expression(numbers, draw)
    while is_good and value != int(goal):
        text, value = expression(numbers, draw)
    return [{"role": "assistant", "content": text}]


SIGNS = {1: "+", -1: "-"}
GOOD = {"products": 0.25, "countdown": 0.5}
"""Share of the demonstrations that use the calculator, or reach the goal on purpose."""
DEMONSTRATIONS = {"products": of_products, "countdown": of_countdown}
TASKS: dict[str, Callable[[random.Random], tuple[str, str]]] = {
    "addition": addition,
    "countdown": countdown,
    "products": products,
}


def rows(task: str, count: int, seed: int) -> list[dict[str, Any]]:
    """Different prompts of a task, in an order that the seed decides."""
    draw, drawn = random.Random(seed), dict[str, str]()
    while len(drawn) < count:
        question, truth = TASKS[task](draw)
        drawn[question] = truth
    return [
        {
            "data_source": task,
            "prompt": [{"role": "user", "content": question}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": truth},
            "extra_info": {"index": index},
        }
        for index, (question, truth) in enumerate(drawn.items())
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the prompts of a task.")
    parser.add_argument("task", choices=sorted(TASKS))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--train_size", type=int, default=2000)
    parser.add_argument("--val_size", type=int, default=128)
    parser.add_argument("--seed", type=int, default=0)
    a = parser.parse_args()
    drawn = rows(a.task, a.train_size + a.val_size, a.seed)
    a.folder.mkdir(parents=True, exist_ok=True)
    pd.DataFrame(drawn[a.val_size :]).to_parquet(a.folder / "train.parquet")
    pd.DataFrame(drawn[: a.val_size]).to_parquet(a.folder / "test.parquet")
    if demonstration := DEMONSTRATIONS.get(a.task):
        draw, talks = random.Random(a.seed + 1), []
        held_out = [row["prompt"] for row in drawn[: a.val_size]]
        for row in rows(a.task, a.train_size, a.seed + 1):
            if row["prompt"] not in held_out:
                question, truth = row["prompt"][0]["content"], row["reward_model"]["ground_truth"]
                talks.append([*row["prompt"], *demonstration(question, truth, draw.random() < GOOD[a.task], draw)])
        pd.DataFrame({"messages": talks}).to_parquet(a.folder / "sft.parquet")
    print(f"wrote {a.train_size} training and {a.val_size} test prompts to {a.folder}")


if __name__ == "__main__":
    sys.exit(run_program(main))
