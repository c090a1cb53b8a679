"""The 17 thousand problems of DAPO (Yu et al. 2025, arXiv:2503.14476), published in the schema of RL datasets.

The published file repeats its problems; each is written once, in the order of its first appearance, unless
``--keep_repeats`` is given. A code interpreter gets the truth of its row.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from command import Row, run
from source import Example, HubDataset, MakeRow, convert, fields_of, list_of
from verl.errors import DataError

HUB_NAME = "BytedTsinghua-SIA/DAPO-Math-17k"
TOOL = "code_interpreter"
PUBLISHED = HubDataset(
    HUB_NAME,
    ("prompt", "reward_model", "extra_info"),
    {"train": "train"},
    "~/data/retool_dapo",
    leaves_out="they repeat others",
)


def row_maker(keep_repeats: bool = False) -> MakeRow:
    """A function that makes a row of a problem's first appearance, and of the others if they are kept."""
    seen: set[str] = set()

    def to_row(example: Example, index: int, split: str, where: str) -> Row | None:
        prompt = list_of(example, "prompt", where)
        known = dict(fields_of(example, "extra_info", where)) if example["extra_info"] else {}
        key = str(known.get("index") or prompt)
        if key in seen and not keep_repeats:
            return None
        seen.add(key)
        truth = fields_of(example, "reward_model", where).get("ground_truth")
        if not prompt or truth in (None, ""):
            raise DataError("a prompt or its ground truth is missing", key=where, got=truth)
        tools = {TOOL: {"create_kwargs": {"ground_truth": truth}}}
        return {**example, "extra_info": {**known, "need_tools_kwargs": True, "tools_kwargs": tools}}

    return to_row


def prepare(published: HubDataset, argv: Sequence[str] | None, says: str) -> None:
    """The program of a data set in this schema."""
    made = argparse.ArgumentParser(add_help=False)
    made.add_argument("--keep_repeats", action="store_true")
    named, others = made.parse_known_args(argv)
    convert(published, row_maker(named.keep_repeats), others, f"{says} --keep_repeats writes repeated problems, too.")


def main(argv: Sequence[str] | None = None) -> None:
    prepare(PUBLISHED, argv, "Write DAPO's problems, each once, as train.parquet.")


if __name__ == "__main__":
    raise SystemExit(run(main))
