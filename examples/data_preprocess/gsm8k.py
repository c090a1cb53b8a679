"""GSM8K, grade-school word problems, as prompts with a checkable answer (Cobbe et al. 2021, arXiv:2110.14168).

Reads the jsonl files its authors published, or the hub's data set, and writes ``train.parquet`` and ``test.parquet``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from command import Row, run
from source import Example, HubDataset, asked, convert, prompt_row, text_of
from verl.errors import DataError

HUB_NAME = "openai/gsm8k"
INSTRUCTION = 'Think step by step and write the final answer as a number after "####".'
FINAL_ANSWER = re.compile(r"####\s*(-?[\d.,]+)\s*$")
PUBLISHED = HubDataset(HUB_NAME, ("question", "answer"), {"train": "train", "test": "test"}, "~/data/gsm8k", "main")


def final_answer(solution: str) -> str | None:
    """The number behind ``####`` at the end of a solution, without thousands separators; None if there is none.

    Example:
        >>> final_answer("2 * 540 = 1080\\n#### 1,080")
        '1080'
    """
    match = FINAL_ANSWER.search(solution)
    return match.group(1).replace(",", "") if match else None


def to_row(example: Example, index: int, split: str, where: str, instruction: str = INSTRUCTION) -> Row:
    """One row in the schema of the RL dataset; ``where`` names the example for a message."""
    question, solution, answer = solved(example, where)
    extra = {"split": split, "index": index, "question": question, "answer": solution}
    return prompt_row(HUB_NAME, asked(question, instruction), answer, extra)


def solved(example: Example, where: str) -> tuple[str, str, str]:
    """Question, worked solution and final answer of an example.

    Raises:
        DataError: no question, or no number at the end of the solution.
    """
    question, solution = text_of(example, "question", where), text_of(example, "answer", where)
    answer = final_answer(solution)
    if answer is None:
        raise DataError("no number after '####' at the end of the answer", key=where, got=solution)
    return question, solution, answer


def main(argv: Sequence[str] | None = None) -> None:
    convert(PUBLISHED, to_row, argv, "Write GSM8K as train.parquet and test.parquet.", instruction=INSTRUCTION)


if __name__ == "__main__":
    raise SystemExit(run(main))
