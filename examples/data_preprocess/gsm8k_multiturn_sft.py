"""GSM8K as conversations for supervised fine-tuning: the question, and the worked solution as the assistant's turn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from command import Row, run
from gsm8k import INSTRUCTION, PUBLISHED, solved
from source import Example, asked, convert


def to_row(example: Example, index: int, split: str, where: str, instruction: str = INSTRUCTION) -> Row:
    """One conversation in the column ``messages``."""
    question, solution, _ = solved(example, where)
    user = {"role": "user", "content": asked(question, instruction)}
    return {"messages": [user, {"role": "assistant", "content": solution}]}


def main(argv: Sequence[str] | None = None) -> None:
    published = replace(PUBLISHED, folder="~/data/gsm8k_sft")
    convert(published, to_row, argv, "Write GSM8K as conversations for SFT.", instruction=INSTRUCTION)


if __name__ == "__main__":
    raise SystemExit(run(main))
