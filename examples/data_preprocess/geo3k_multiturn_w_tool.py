"""Geometry3K for the agent loop with tools: the rows of ``geo3k.py`` with the column that names the loop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from command import run
from geo3k import INSTRUCTION, PUBLISHED, to_row
from source import convert


def main(argv: Sequence[str] | None = None) -> None:
    says = "Write Geometry3K with images for the agent loop with tools."
    published = replace(PUBLISHED, folder="~/data/geo3k_multiturn_w_tool")
    convert(published, to_row, argv, says, agent_name="tool_agent", instruction=INSTRUCTION)


if __name__ == "__main__":
    raise SystemExit(run(main))
