"""Multimodal Open-R1, 8,000 verified problems with a figure each: prompts with an image and an answer in tags.

A tenth of the examples is held out as test.parquet.
"""

from __future__ import annotations

from collections.abc import Sequence

from command import Row, run
from geo3k import image_bytes
from source import Example, HubDataset, asked, convert, prompt_row, text_of

HUB_NAME = "lmms-lab/multimodal-open-r1-8k-verified"
READ = ("image", "problem", "solution")
INSTRUCTION = "Think first, within <think> </think>, and then put the final answer within <answer> </answer>."
PUBLISHED = HubDataset(HUB_NAME, READ, {"train": "train"}, "~/data/openr1mm", held_out=0.1)


def to_row(example: Example, index: int, split: str, where: str, instruction: str = INSTRUCTION) -> Row:
    """One row in the schema of the RL dataset, with its image and the columns that are not read."""
    problem, solution = text_of(example, "problem", where), text_of(example, "solution", where)
    extra = {"split": split, "index": index, "question": problem, "answer": solution}
    kept = {name: value for name, value in example.items() if name not in READ}
    row = prompt_row(HUB_NAME, asked(f"<image>\n{problem}", instruction, "\n\n"), solution, extra)
    return {**kept, **row, "images": [image_bytes(example["image"], where)]}


def main(argv: Sequence[str] | None = None) -> None:
    says = "Write multimodal Open-R1 as train.parquet and test.parquet, with images."
    convert(PUBLISHED, to_row, argv, says, instruction=INSTRUCTION)


if __name__ == "__main__":
    raise SystemExit(run(main))
