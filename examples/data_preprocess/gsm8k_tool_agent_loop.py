"""GSM8K for the agent loop with tools: rows of ``gsm8k_multiturn_w_tool.py`` with a column that names the loop."""

from __future__ import annotations

from collections.abc import Sequence

from command import run
from gsm8k import INSTRUCTION, PUBLISHED
from gsm8k_multiturn_w_tool import to_row
from source import convert


def main(argv: Sequence[str] | None = None) -> None:
    says = "Write GSM8K for the agent loop with tools."
    convert(PUBLISHED, to_row, argv, says, agent_name="tool_agent", instruction=INSTRUCTION)


if __name__ == "__main__":
    raise SystemExit(run(main))
