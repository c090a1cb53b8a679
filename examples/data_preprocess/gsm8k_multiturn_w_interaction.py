"""GSM8K for rollouts in which something answers the model: it says whether the answer is right, and the model goes on.

Which one answers, and with what, is in ``extra_info.interaction_kwargs``.
"""

from __future__ import annotations

from collections.abc import Sequence

from command import Row, run
from gsm8k import HUB_NAME, INSTRUCTION, PUBLISHED, solved
from source import Example, asked, convert, prompt_row

INTERACTION = "gsm8k"
SYSTEM = "You solve word problems step by step. You are told whether your answer is right, and may correct it."


def to_row(example: Example, index: int, split: str, where: str, instruction: str = INSTRUCTION) -> Row:
    """One row in the schema of the RL dataset, with what the other side needs to know."""
    question, solution, answer = solved(example, where)
    scene = {"name": INTERACTION, "query": question, "ground_truth": answer}
    extra = {"split": split, "index": index, "question": question, "answer": solution, "interaction_kwargs": scene}
    return prompt_row(HUB_NAME, asked(question, instruction), answer, extra, system=SYSTEM)


def main(argv: Sequence[str] | None = None) -> None:
    convert(PUBLISHED, to_row, argv, "Write GSM8K for rollouts with an interaction.", instruction=INSTRUCTION)


if __name__ == "__main__":
    raise SystemExit(run(main))
