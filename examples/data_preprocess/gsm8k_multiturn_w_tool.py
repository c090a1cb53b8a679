"""GSM8K for rollouts with a tool: the model may ask a tool how good its answer is before it gives the last one.

The tool's arguments are in ``extra_info.tools_kwargs``, as rows for tools have them.
"""

from __future__ import annotations

from collections.abc import Sequence

from command import Row, run
from gsm8k import HUB_NAME, INSTRUCTION, PUBLISHED, solved
from source import Example, asked, convert, prompt_row

TOOL = "calc_gsm8k_reward"
SYSTEM = (
    "You solve word problems step by step. Before you give the final answer, call the tool "
    f"`{TOOL}` with it at least once, and think again if the tool finds it wrong."
)


def to_row(example: Example, index: int, split: str, where: str, instruction: str = INSTRUCTION) -> Row:
    """One row in the schema of the RL dataset, with the arguments of the tool."""
    question, solution, answer = solved(example, where)
    tools = {TOOL: {"create_kwargs": {"ground_truth": answer}}}
    extra = {"split": split, "index": index, "question": question, "answer": solution,
             "need_tools_kwargs": True, "tools_kwargs": tools}  # fmt: skip
    return prompt_row(HUB_NAME, asked(question, instruction), answer, extra, system=SYSTEM)


def main(argv: Sequence[str] | None = None) -> None:
    convert(PUBLISHED, to_row, argv, "Write GSM8K for rollouts with a tool.", instruction=INSTRUCTION)


if __name__ == "__main__":
    raise SystemExit(run(main))
