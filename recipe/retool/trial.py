"""A model, demonstrations and prompts on which ReTool can be tried in minutes on a CPU.

    python -m recipe.retool.trial outputs/retool [--seed 0]

The task is that of ``examples/calculator``, the product of two numbers of two digits, with the interpreter instead of
the calculator and the answer in a box. In the demonstrations one pupil in four lets the interpreter compute; the others
guess.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

import pandas as pd
from tokenizers import AddedToken

from examples.calculator import make

CODE = json.dumps({"name": "code_interpreter", "arguments": {"code": "print(PRODUCT)"}})
BEFORE, AFTER = (f"<tool_call>\n{CODE}\n</tool_call>").split("PRODUCT")
BOX = "\\boxed{"


def answer(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def demonstration(rng: random.Random, a: int, b: int) -> dict[str, Any]:
    """A conversation with a program, or with a guess of the right size."""
    question = {"role": "user", "content": f"{a}*{b}"}
    if rng.random() < 0.25:
        result = {"role": "tool", "content": str(a * b)}
        return {"messages": [question, answer(f"{BEFORE}{a}*{b}{AFTER}"), result, answer(f"{BOX}{a * b}}}")]}
    return {"messages": [question, answer(f"{BOX}{(a + rng.randrange(-3, 4)) * b}}}")]}


def main() -> None:
    parser = argparse.ArgumentParser(description="Write model, demonstrations and prompts for a trial of ReTool.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    folder, rng = arguments.folder, random.Random(arguments.seed)
    pairs = [(a, b) for a in range(make.LOW, make.HIGH) for b in range(make.LOW, make.HIGH)]
    rng.shuffle(pairs)
    folder.mkdir(parents=True, exist_ok=True)
    prompts = [{**make.prompt(a, b, index), "data_source": "math_dapo"} for index, (a, b) in enumerate(pairs[:1024])]
    pd.DataFrame(prompts).to_parquet(folder / "train.parquet")
    pd.DataFrame([demonstration(rng, a, b) for a, b in pairs[1024:]]).to_parquet(folder / "sft.parquet")
    tokenizer = make.make_tokenizer()
    tokenizer.add_tokens([AddedToken(text, normalized=False, special=False) for text in (BEFORE, AFTER, BOX, "}")])
    tokenizer.save_pretrained(folder / "base")
    make.make_model(tokenizer).save_pretrained(folder / "base")
    print(f"wrote {folder}")


if __name__ == "__main__":
    main()
