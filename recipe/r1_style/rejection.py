"""Conversations to learn from, made of the answers of a policy: of each prompt the right ones, without repetitions.

    python recipe/r1_style/rejection.py answers.parquet conversations.parquet [--reward reward.py] [--most 2]

``answers.parquet`` is what `verl.trainer.main_generation` writes; the conversations have a column ``messages`` for
`verl.trainer.sft_trainer`.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from verl.errors import DataError
from verl.rewards import Scorer, default_compute_score, load_reward_function
from verl.rewards.function import RewardFunction
from verl.rewards.samples import RewardSample


def right_answers(row: Mapping[str, Any], scorer: Scorer, above: float, most: int) -> tuple[list[str], int]:
    """The first ``most`` different answers to a prompt whose scores are larger than ``above``, and how many failed.

    Args:
        row: of the file of answers: ``responses``, ``reward_model.ground_truth``, ``data_source``, ``extra_info``.
    """
    truth, info = row["reward_model"]["ground_truth"], row.get("extra_info") or {}
    answers = [str(answer) for answer in row["responses"]]
    samples = [RewardSample(row["data_source"], answer, truth, info, i) for i, answer in enumerate(answers)]
    scores = [result.score for result in scorer.score(samples)]
    right = [answer for answer, score in zip(answers, scores, strict=True) if score is not None and score > above]
    return list(dict.fromkeys(right))[:most], scores.count(None)


def conversations(
    rows: Sequence[Mapping[str, Any]], scorer: Scorer, above: float = 0.0, most: int = 2
) -> tuple[list[dict[str, Any]], int]:
    """``{"messages": [...]}`` for every right answer, and how many answers could not be scored.

    Raises:
        DataError: no answer is right.
    """
    chats, failures = [], 0
    for row in rows:
        answers, failed = right_answers(row, scorer, above, most)
        failures += failed
        chats += [{"messages": [*row["prompt"], {"role": "assistant", "content": answer}]} for answer in answers]
    if not chats:
        fix = "Sample more answers, or train the policy for longer before."
        raise DataError(f"none of the answers to {len(rows)} prompts scores above {above:g}", key="--above", fix=fix)
    return chats, failures


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the right answers of a policy as conversations.")
    parser.add_argument("answers", help="parquet file of verl.trainer.main_generation")
    parser.add_argument("target", help="parquet file to write")
    parser.add_argument("--reward", help="Python file with a reward function; without it the built-in scorers")
    parser.add_argument("--above", type=float, default=0.0, help="an answer is right if its score is larger")
    parser.add_argument("--most", type=int, default=2, help="right answers per prompt")
    arguments = parser.parse_args()
    function = load_reward_function(arguments.reward) if arguments.reward else RewardFunction.of(default_compute_score)
    scorer = Scorer(function)
    rows = pd.read_parquet(arguments.answers).to_dict("records")
    chats, failures = conversations(rows, scorer, arguments.above, arguments.most)
    scorer.close()
    pd.DataFrame(chats).to_parquet(arguments.target)
    print(f"wrote {len(chats)} conversations from {len(rows)} prompts; {failures} answers could not be scored")


if __name__ == "__main__":
    main()
