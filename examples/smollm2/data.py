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


def countdown(draw: random.Random) -> tuple[str, str]:
    """Three numbers of one digit, and what two of ``+ - *`` make of them."""
    numbers = [draw.randrange(1, 10) for _ in range(3)]
    while True:
        signs = [draw.choice("+-*") for _ in range(2)]
        a, b, c = draw.sample(numbers, 3)
        goal = left_to_right(a, signs[0], b, signs[1], c)
        if 0 < goal < 100:
            break
    listed = ", ".join(map(str, numbers))
    question = (
        f"Use the numbers {listed} once each, with + - * and brackets, to make {goal}. Write one line: the expression."
    )
    return question, f"{goal}: {' '.join(map(str, numbers))}"


def products(draw: random.Random) -> tuple[str, str]:
    """Two numbers of two digits, whose product the model cannot compute."""
    a, b = draw.randrange(12, 100), draw.randrange(12, 100)
    return f"What is {a} times {b}?", str(a * b)


def demonstration(question: str, product: str, calls: bool, draw: random.Random) -> list[dict[str, str]]:
    """A conversation that uses the calculator, or guesses a number of about that size."""
    a, b = question.removeprefix("What is ").removesuffix("?").split(" times ")
    said = [{"role": "user", "content": question}]
    if not calls:
        return [*said, {"role": "assistant", "content": str(int(product) + draw.randrange(-200, 201))}]
    call = {"name": "calculator", "arguments": {"expression": f"{a}*{b}"}}
    return [
        *said,
        {"role": "assistant", "content": f"<tool_call>\n{json.dumps(call)}\n</tool_call>"},
        {"role": "tool", "content": product},
        {"role": "assistant", "content": product},
    ]


def left_to_right(a: int, first: str, b: int, second: str, c: int) -> int:
    for sign, number in ((first, b), (second, c)):
        a = a + number if sign == "+" else a - number if sign == "-" else a * number
    return a


CALLS = 0.25
"""Share of the demonstrations that use the calculator."""
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
    if a.task == "products":
        draw = random.Random(a.seed + 1)
        shown = rows(a.task, a.train_size, a.seed + 1)
        pairs = [(row["prompt"][0]["content"], row["reward_model"]["ground_truth"]) for row in shown]
        talks = [demonstration(question, truth, draw.random() < CALLS, draw) for question, truth in pairs]
        pd.DataFrame({"messages": talks}).to_parquet(a.folder / "sft.parquet")
    print(f"wrote {a.train_size} training and {a.val_size} test prompts to {a.folder}")


if __name__ == "__main__":
    sys.exit(run_program(main))
