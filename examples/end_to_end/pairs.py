"""Pairs for a reward model out of a policy's own answers: a right one is chosen, a wrong one is rejected.

    python examples/end_to_end/pairs.py answers.parquet pairs.parquet held_out.parquet [--scorer reward.py]

``answers.parquet`` is what `verl.trainer.main_generation` writes. Where no answer is right, the reference answer of the
data set is chosen (``extra_info.answer``, else the ground truth); a prompt without a wrong answer gives no pair.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pandas as pd

from verl.rewards import Scorer, default_compute_score, load_reward_function
from verl.rewards.function import RewardFunction
from verl.rewards.samples import RewardSample

HELD_OUT = 8  # every so many-th pair is kept for validation


def make_pair(row: dict[str, Any], scorer: Scorer) -> dict[str, Any] | None:
    """The pair of one prompt, None where there is no wrong answer."""
    truth, info = row["reward_model"]["ground_truth"], row.get("extra_info") or {}
    answers = [str(answer) for answer in row["responses"] if str(answer).strip()]
    samples = [RewardSample(row["data_source"], answer, truth, info, i) for i, answer in enumerate(answers)]
    right = [(result.score or 0.0) > 0 for result in scorer.score(samples)] if samples else []
    wrong = [answer for answer, is_right in zip(answers, right, strict=True) if not is_right]
    if not wrong:
        return None
    good = [answer for answer, is_right in zip(answers, right, strict=True) if is_right]
    chosen = good[0] if good else str(info.get("answer") or truth)
    return {"prompt": list(row["prompt"]), "chosen": chosen, "rejected": wrong[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description="Write pairs of answers from generated ones.")
    parser.add_argument("answers", help="parquet file of verl.trainer.main_generation")
    parser.add_argument("train", help="parquet file to write")
    parser.add_argument("held_out", help=f"parquet file to write: every {HELD_OUT}th pair")
    parser.add_argument("--scorer", help="Python file with a reward function; without it the built-in scorers")
    arguments = parser.parse_args()
    function = load_reward_function(arguments.scorer) if arguments.scorer else RewardFunction.of(default_compute_score)
    scorer = Scorer(function)
    rows = pd.read_parquet(arguments.answers).to_dict("records")
    pairs = [pair for pair in (make_pair(row, scorer) for row in rows) if pair is not None]
    scorer.close()
    held_out = pairs[::HELD_OUT]
    train = [pair for i, pair in enumerate(pairs) if i % HELD_OUT]
    for path, part in ((arguments.train, train), (arguments.held_out, held_out)):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        pd.DataFrame(part).to_parquet(path)
    print(f"wrote {len(train)} and {len(held_out)} pairs from {len(rows)} prompts")


if __name__ == "__main__":
    main()
