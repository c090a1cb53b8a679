r"""Geometry3K, geometry with a figure (Lu et al. 2021, arXiv:2105.04165): prompts with images and a boxed answer.

Images are kept as the bytes of their files, in a column ``images``; ``<image>`` in the prompt says where they belong.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

from command import Row, run
from source import Example, HubDataset, asked, convert, list_of, prompt_row, text_of
from verl.errors import DataError

HUB_NAME = "hiyouga/geometry3k"
INSTRUCTION = r"Think first, within <think> </think>, and then put the final answer in \boxed{}."
PUBLISHED = HubDataset(HUB_NAME, ("problem", "images", "answer"), {"train": "train", "test": "test"}, "~/data/geo3k")


def image_bytes(image: Any, where: str) -> dict[str, bytes]:
    """An image as ``{"bytes": ...}``: of a file as parquet has it, or of a PIL image as the hub's reader gives it."""
    if isinstance(image, Mapping) and image.get("bytes"):
        return {"bytes": bytes(image["bytes"])}
    if hasattr(image, "save"):
        out = io.BytesIO()
        image.save(out, format="PNG")
        return {"bytes": out.getvalue()}
    raise DataError("an image is neither bytes nor a picture", key=where, got=type(image).__name__)


def to_row(example: Example, index: int, split: str, where: str, instruction: str = INSTRUCTION) -> Row:
    """One row in the schema of the RL dataset, with its images."""
    problem, answer = text_of(example, "problem", where), text_of(example, "answer", where)
    images = [image_bytes(image, where) for image in list_of(example, "images", where)]
    extra = {"split": split, "index": index, "question": problem, "answer": answer}
    return {**prompt_row(HUB_NAME, asked(problem, instruction), answer, extra), "images": images}


def main(argv: Sequence[str] | None = None) -> None:
    convert(
        PUBLISHED,
        to_row,
        argv,
        "Write Geometry3K as train.parquet and test.parquet, with images.",
        instruction=INSTRUCTION,
    )


if __name__ == "__main__":
    raise SystemExit(run(main))
