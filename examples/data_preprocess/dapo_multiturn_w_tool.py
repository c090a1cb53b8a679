"""The 17 thousand problems of DAPO (Yu et al. 2025, arXiv:2503.14476), published in the schema of RL datasets.

The published file repeats its problems; each is written once, in the order of its first appearance. The agent loop with
tools runs the rows.
"""

from __future__ import annotations

from collections.abc import Sequence

from command import Row, run
from source import Example, HubDataset, MakeRow, convert, fields_of, list_of
from verl.errors import DataError

HUB_NAME = "BytedTsinghua-SIA/DAPO-Math-17k"
DATA_SOURCE = "math_dapo"
PUBLISHED = HubDataset(
    HUB_NAME, ("prompt", "reward_model", "extra_info"), {"train": "train"}, leaves_out="they repeat others"
)


def row_maker() -> MakeRow:
    """A function that makes a row of a problem's first appearance and nothing of the others."""
    seen: set[str] = set()

    def to_row(example: Example, index: int, split: str, where: str) -> Row | None:
        prompt = list_of(example, "prompt", where)
        known = fields_of(example, "extra_info", where) if example["extra_info"] else {}
        key = str(known.get("index") or prompt)
        if key in seen:
            return None
        seen.add(key)
        truth = fields_of(example, "reward_model", where).get("ground_truth")
        if not prompt or truth in (None, ""):
            raise DataError("a prompt or its ground truth is missing", key=where, got=truth)
        return {
            "data_source": DATA_SOURCE,
            "prompt": prompt,
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(truth)},
            "extra_info": {"split": split, "index": len(seen) - 1, "id": key},
        }

    return to_row


def main(argv: Sequence[str] | None = None) -> None:
    says = "Write DAPO's problems, each once, as train.parquet."
    convert(PUBLISHED, row_maker(), argv, says, agent_name="tool_agent")


if __name__ == "__main__":
    raise SystemExit(run(main))
