"""The thirty problems of AIME 2024 in the schema of RL datasets, for evaluation with a code interpreter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from command import run
from dapo_multiturn_w_tool import PUBLISHED as DAPO
from dapo_multiturn_w_tool import prepare

PUBLISHED = replace(DAPO, name="BytedTsinghua-SIA/AIME-2024", folder="~/data/retool_aime2024")


def main(argv: Sequence[str] | None = None) -> None:
    prepare(PUBLISHED, argv, "Write the problems of AIME 2024, each once, as train.parquet.")


if __name__ == "__main__":
    raise SystemExit(run(main))
