"""Conversations to learn from, made of the answers of a policy: of each prompt the right ones, without repetitions.

    python recipe/r1_style/rejection.py answers.parquet chats.parquet [--reward reward.py] [--above 0] [--most 2]

``answers.parquet`` is what `verl.trainer.main_generation` writes; the conversations have a column ``messages`` for
`verl.trainer.sft_trainer`. An answer is right if the reward function's ``acc``, else its score, is larger than
``--above``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import Any

import pandas as pd

from verl.errors import DataError
from verl.rewards import Scorer, default_compute_score, load_reward_function
from verl.rewards.failures import report_failures
from verl.rewards.function import RewardFunction
from verl.rewards.samples import RewardResult, RewardSample
from verl.trainer.command import run_program


def samples_of(row: Mapping[str, Any], number: int) -> list[RewardSample]:
    """The answers to a prompt, to be scored.

    Args:
        row: of the file of answers: ``responses``, ``reward_model.ground_truth``, ``data_source``, ``extra_info``.
        number: of the row, for messages.
    """
    truth, info = row["reward_model"]["ground_truth"], row.get("extra_info") or {}
    return [RewardSample(row["data_source"], str(answer), truth, info, number) for answer in row["responses"]]


def is_right(result: RewardResult, above: float) -> bool:
    """Whether ``acc``, else the score, is larger than ``above``; an answer without a score is not right."""
    if result.score is None:
        return False
    accuracy = result.extra.get("acc")
    return float(result.score if accuracy is None else accuracy) > above


def conversations(
    rows: Sequence[Mapping[str, Any]], scorer: Scorer, above: float = 0.0, most: int = 2
) -> tuple[list[dict[str, Any]], int]:
    """``{"messages": [...]}`` for the first ``most`` different right answers to a prompt, and how many answers failed.

    The first failure of the reward function is shown with its traceback.

    Raises:
        DataError: no answer is right.
        RewardError: the reward function failed on every answer.
    """
    chats: list[dict[str, Any]] = []
    samples: list[RewardSample] = []
    results: list[RewardResult] = []
    for number, row in enumerate(rows):
        answers = samples_of(row, number)
        scored = scorer.score(answers)
        right = [sample.solution_str for sample, result in zip(answers, scored) if is_right(result, above)]
        for answer in list(dict.fromkeys(right))[:most]:
            chats.append({"messages": [*row["prompt"], {"role": "assistant", "content": answer}]})
        samples += answers
        results += scored
    report_failures(samples, results, scorer.function.label, scorer.limits.on_error, scorer.function.is_ours)
    if not chats:
        fix = "Sample more answers, or train the policy for longer before."
        raise DataError(f"none of the answers to {len(rows)} prompts is above {above:g}", key="--above", fix=fix)
    return chats, sum(result.score is None for result in results)


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the right answers of a policy as conversations.")
    parser.add_argument("answers", help="parquet file of verl.trainer.main_generation")
    parser.add_argument("target", help="parquet file to write")
    parser.add_argument("--reward", help="Python file with a reward function; without it the built-in scorers")
    parser.add_argument("--above", type=float, default=0.0, help="right is an answer whose acc, else score, is larger")
    parser.add_argument("--most", type=int, default=2, help="right answers per prompt")
    arguments = parser.parse_args()
    function = load_reward_function(arguments.reward) if arguments.reward else RewardFunction.of(default_compute_score)
    rows = pd.read_parquet(arguments.answers).to_dict("records")
    with closing(Scorer(function)) as scorer:
        chats, failures = conversations(rows, scorer, arguments.above, arguments.most)
    pd.DataFrame(chats).to_parquet(arguments.target)
    print(f"wrote {len(chats)} conversations from {len(rows)} prompts; {failures} answers could not be scored")


if __name__ == "__main__":
    sys.exit(run_program(main))
