"""The 17 thousand problems of DAPO (Yu et al. 2025, arXiv:2503.14476), published in the schema of RL datasets.

The published file repeats its problems; each is written once, in the order of its first appearance.
"""

from __future__ import annotations

from collections.abc import Sequence

from verl.data.prepare.command import Row, run
from verl.data.prepare.source import Example, MakeRow, Published, convert
from verl.errors import DataError

HUB_NAME = "BytedTsinghua-SIA/DAPO-Math-17k"
DATA_SOURCE = "math_dapo"
PUBLISHED = Published(HUB_NAME, ("prompt", "reward_model", "extra_info"), {"train": "train"})


def row_maker() -> MakeRow:
    """A function that makes a row of a problem's first appearance and nothing of the others."""
    seen: set[str] = set()

    def to_row(example: Example, index: int, split: str, where: str) -> Row | None:
        key = str((example["extra_info"] or {}).get("index") or example["prompt"])
        if key in seen:
            return None
        seen.add(key)
        truth = (example["reward_model"] or {}).get("ground_truth")
        if not example["prompt"] or truth in (None, ""):
            raise DataError("a prompt or its ground truth is missing", key=where, got=truth)
        return {
            "data_source": DATA_SOURCE,
            "prompt": list(example["prompt"]),
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(truth)},
            "extra_info": {"split": split, "index": len(seen) - 1, "id": key},
        }

    return to_row


def main(argv: Sequence[str] | None = None) -> None:
    convert("dapo_math", PUBLISHED, row_maker(), argv, "Write DAPO's problems, each once, as train.parquet.")


if __name__ == "__main__":
    raise SystemExit(run(main))
