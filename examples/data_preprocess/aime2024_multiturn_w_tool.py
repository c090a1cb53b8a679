"""The thirty problems of AIME 2024, for evaluation by the agent loop with tools: answers are integers from 0 to 999."""

from __future__ import annotations

from collections.abc import Sequence

from command import Row, run
from source import Example, HubDataset, convert, prompt_row, text_of
from verl.errors import DataError

HUB_NAME = "Maxwell-Jia/AIME_2024"
DATA_SOURCE = "aime2024"
INSTRUCTION = 'Think step by step. The last line has to be "Answer: " and the number.'
PUBLISHED = HubDataset(HUB_NAME, ("ID", "Problem", "Answer"), {"train": "test"})


def to_row(example: Example, index: int, split: str, where: str) -> Row:
    """One row in the schema of the RL dataset.

    Raises:
        DataError: the answer is no integer from 0 to 999.
    """
    answer = str(example["Answer"]).strip()
    if not answer.isdigit() or int(answer) > 999:
        raise DataError("the answer is no integer from 0 to 999", key=where, got=example["Answer"])
    extra = {"split": "test", "index": index, "id": str(example["ID"])}
    question = f"{text_of(example, 'Problem', where)}\n\n{INSTRUCTION}"
    return prompt_row(DATA_SOURCE, question, str(int(answer)), extra)


def main(argv: Sequence[str] | None = None) -> None:
    convert(PUBLISHED, to_row, argv, "Write AIME 2024 as test.parquet.", agent_name="tool_agent")


if __name__ == "__main__":
    raise SystemExit(run(main))
