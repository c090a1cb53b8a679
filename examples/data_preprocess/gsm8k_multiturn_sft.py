"""GSM8K as conversations for supervised fine-tuning: the question, and the worked solution as the assistant's turn."""

from __future__ import annotations

from collections.abc import Sequence

from command import Row, run
from gsm8k import INSTRUCTION, PUBLISHED, solved
from source import Example, convert


def to_row(example: Example, index: int, split: str, where: str) -> Row:
    """One conversation in the column ``messages``."""
    question, solution, _ = solved(example, where)
    asked = {"role": "user", "content": f"{question} {INSTRUCTION}"}
    return {"messages": [asked, {"role": "assistant", "content": solution}]}


def main(argv: Sequence[str] | None = None) -> None:
    convert(PUBLISHED, to_row, argv, "Write GSM8K as conversations for SFT.")


if __name__ == "__main__":
    raise SystemExit(run(main))
