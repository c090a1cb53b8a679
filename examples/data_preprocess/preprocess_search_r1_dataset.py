"""Questions of Search-R1 (Jin et al. 2025, arXiv:2503.09516): answered by searching, scored by exact match.

The published rows name where each question is from (``nq``, ``hotpotqa``, ...); the scorer is found by ``searchR1_``
and that name. A tool named ``search`` gets the question's truth, as rows for tools have them.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace

from command import Row, run
from source import Example, HubDataset, asked, convert, list_of, prompt_row, text_of
from verl.errors import DataError

HUB_NAME = "PeterJinGo/nq_hotpotqa_train"
TOOL = "search"
SYSTEM = "Answer the question. You may search for what you do not know, as often as you need."
INSTRUCTION = "Think first, and put the final answer, without explanations, between <answer> and </answer>."
PUBLISHED = HubDataset(
    HUB_NAME,
    ("question", "golden_answers", "data_source"),
    {"train": "train", "test": "test"},
    "~/data/searchR1_processed_direct",
)


def to_row(example: Example, index: int, split: str, where: str, instruction: str = INSTRUCTION) -> Row:
    """One row in the schema of the RL dataset, with the arguments of the tool.

    Raises:
        DataError: no answers.
    """
    question, source = text_of(example, "question", where), text_of(example, "data_source", where)
    answers = [str(answer) for answer in list_of(example, "golden_answers", where)]
    if not answers:
        raise DataError("the question has no answer", key=where, got=answers)
    truth = {"target": answers}
    tagged = f"searchR1_{source}"
    tools = {TOOL: {"create_kwargs": {"ground_truth": truth, "question": question, "data_source": tagged}}}
    extra = {"split": split, "index": index, "question": question, "need_tools_kwargs": True, "tools_kwargs": tools}
    row = prompt_row(tagged, asked(question, instruction, "\n"), "", extra, ability="fact-reasoning", system=SYSTEM)
    return row | {"reward_model": {"style": "rule", "ground_truth": truth}}


def main(argv: Sequence[str] | None = None) -> None:
    made = argparse.ArgumentParser(add_help=False)
    made.add_argument("--hf_repo_id", default=HUB_NAME)
    named, others = made.parse_known_args(argv)
    says = "Write the questions of Search-R1 as train.parquet and test.parquet (--hf_repo_id: of another data set)."
    convert(replace(PUBLISHED, name=named.hf_repo_id), to_row, others, says, instruction=INSTRUCTION)


if __name__ == "__main__":
    raise SystemExit(run(main))
