r"""MATH, competition problems (Hendrycks et al. 2021, arXiv:2103.03874): the answer is what the solution boxes last."""

from __future__ import annotations

from collections.abc import Sequence

from command import Row, run
from source import Example, HubDataset, asked, convert, prompt_row, text_of
from verl.errors import DataError
from verl.rewards.scorers.math_boxed import last_boxed

HUB_NAME = "DigitalLearningGmbH/MATH-lighteval"
INSTRUCTION = r"Think step by step and put the final answer in \boxed{}."
PUBLISHED = HubDataset(HUB_NAME, ("problem", "solution"), {"train": "train", "test": "test"}, "~/data/math")


def to_row(example: Example, index: int, split: str, where: str, instruction: str = INSTRUCTION) -> Row:
    """One row in the schema of the RL dataset.

    Raises:
        DataError: a solution without a boxed answer.
    """
    problem, solution = text_of(example, "problem", where), text_of(example, "solution", where)
    answer = last_boxed(solution)
    if answer is None:
        raise DataError(r"the solution has no \boxed{answer}", key=where, got=solution[-200:])
    extra = {"split": split, "index": index, "question": problem}
    row = prompt_row(HUB_NAME, asked(problem, instruction), answer, extra)
    return {"level": example.get("level"), "type": example.get("type"), **row}


def main(argv: Sequence[str] | None = None) -> None:
    convert(PUBLISHED, to_row, argv, "Write MATH as train.parquet and test.parquet.", instruction=INSTRUCTION)


if __name__ == "__main__":
    raise SystemExit(run(main))
