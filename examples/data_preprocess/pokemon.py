"""Pictures of Pokemon with captions: conversations about one image, for supervised fine-tuning of a model that sees.

A tenth of the examples is held out as test.parquet.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from command import Row, run
from geo3k import image_bytes
from source import Example, HubDataset, convert, list_of
from verl.errors import DataError

HUB_NAME = "llamafactory/pokemon-gpt4o-captions"
ROLES = {"human": "user", "gpt": "assistant"}
PUBLISHED = HubDataset(
    HUB_NAME, ("conversations", "images"), {"train": "train"}, "~/data/pokemon-gpt4o-captions", held_out=0.1
)


def to_row(example: Example, index: int, split: str, where: str) -> Row:
    """``messages`` and ``images``."""
    turns = list_of(example, "conversations", where)
    for turn in turns:
        if not isinstance(turn, Mapping) or turn.get("from") not in ROLES or not isinstance(turn.get("value"), str):
            raise DataError("a turn is not {from: human or gpt, value: text}", key=where, got=turn)
    messages = [{"role": ROLES[turn["from"]], "content": turn["value"]} for turn in turns]
    return {"images": [image_bytes(i, where) for i in list_of(example, "images", where)], "messages": messages}


def main(argv: Sequence[str] | None = None) -> None:
    convert(PUBLISHED, to_row, argv, "Write captions of Pokemon as train.parquet and test.parquet, with images.")


if __name__ == "__main__":
    raise SystemExit(run(main))
