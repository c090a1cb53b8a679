"""Tries a reward function on real rows: ``python -m verl.rewards.check my_reward.py --data train.parquet``.

For each row the ground truth is wrapped in the forms in which models write answers, plus an empty and a wrong answer
(or the answers of ``--answers``); a table shows scores, times and errors. The exit code is 1 if anything failed.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from verl.errors import DataError, VerlError, printable
from verl.rewards import truths
from verl.rewards.check_data import load_json, read_rows, read_texts
from verl.rewards.dispatch import check_data_sources, default_compute_score
from verl.rewards.function import RewardFunction, load_reward_function
from verl.rewards.samples import RewardFailure, RewardResult, RewardSample
from verl.rewards.scorers.search_qa import gold_answers
from verl.rewards.scoring import Scorer, ScoringLimits

FORMS = ("{}", "#### {}", r"\boxed{{{}}}", "Answer: {}", "<answer>{}</answer>")
WRONG = "this is not the answer"


@dataclass(frozen=True)
class Trial:
    """One answer that was tried on one row."""

    sample: RewardSample
    result: RewardResult
    seconds: float


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m verl.rewards.check", description="Try a reward function on data.")
    parser.add_argument("file", nargs="?", help="Python file with the function; without it the built-in scorers")
    parser.add_argument("--data", required=True, help="rows in a file or folder of a kind that runs read")
    parser.add_argument("-n", "--rows", type=int, default=5, help="how many rows (5)")
    parser.add_argument("--name", help="the function in the file")
    parser.add_argument("--answers", help="json, jsonl or text file: one answer per row, tried instead of made-up ones")
    parser.add_argument("--tokenizer", help="model folder: answers go through its tokenizer, as in a run")
    parser.add_argument("--timeout", type=float, default=10.0, help="seconds for one call (10)")
    parser.add_argument("--reward-kwargs", default="{}", help="JSON dict of extra keyword arguments")
    parser.add_argument("--reward-fn-key", default="data_source", help="column that selects the built-in scorer")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the check; returns the exit code."""
    arguments = parse_arguments(sys.argv[1:] if argv is None else argv)
    try:
        function, trials = try_rows(arguments)
        if not trials:
            raise DataError("there is no answer for these rows", key="--answers", got=arguments.answers)
    except VerlError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    show(function, trials)
    return int(any(map(_failure, trials)))


def try_rows(arguments: argparse.Namespace) -> tuple[RewardFunction, list[Trial]]:
    """Load everything and score every answer. Raises a `VerlError` for what is wrong before anything is scored."""
    kwargs = load_json(arguments.reward_kwargs, "--reward-kwargs")
    if arguments.file:
        function = load_reward_function(arguments.file, arguments.name, kwargs)
    else:
        function = RewardFunction.of(default_compute_score, kwargs)
    rows = read_rows(arguments.data, arguments.rows)
    column = arguments.reward_fn_key
    if function.is_builtin:
        check_data_sources([row[column] for row in rows] if column in rows[0] else None, column)
    samples = make_samples(rows, column, function)
    answers = read_texts(arguments.answers) if arguments.answers else None
    through = tokenizer_pass(arguments.tokenizer) if arguments.tokenizer else lambda text: text
    scorer = Scorer(function, ScoringLimits(timeout=arguments.timeout, num_workers=1))
    scorer.prepare()  # so that no measured time holds the start of a process
    try:
        return function, [
            try_one(scorer, sample, through(text))
            for i, sample in enumerate(samples)
            for text in (candidates(sample.ground_truth) if answers is None else answers[i : i + 1])
        ]
    finally:
        scorer.close()


def make_samples(rows: Sequence[Mapping[str, Any]], column: str, function: RewardFunction) -> list[RewardSample]:
    """Rows as samples without an answer; a missing ground truth is an error where the scorer needs one."""
    samples = []
    for i, row in enumerate(rows):
        holder = row.get("reward_model")
        truth = truths.truth_of(holder)
        if function.is_builtin and truths.is_missing(truth):
            raise truths.missing_truth(f"row {i}", holder, function.label, is_builtin=True)
        info = row.get("extra_info")
        samples.append(RewardSample(row.get(column), "", truth, dict(info) if isinstance(info, Mapping) else {}, i))
    return samples


def candidates(ground_truth: object) -> list[str]:
    """The ground truth in the forms in which models write answers, an empty answer and a wrong one."""
    golds = gold_answers(ground_truth)
    return [*(form.format(gold) for gold in golds[:1] for form in FORMS), "", WRONG]


def try_one(scorer: Scorer, sample: RewardSample, text: str) -> Trial:
    """Score one answer and take the time."""
    sample = replace(sample, solution_str=text)
    start = time.perf_counter()
    result = scorer.score([sample])[0]
    return Trial(sample, result, time.perf_counter() - start)


def tokenizer_pass(folder: str) -> Callable[[str], str]:
    """What is left of a text after encoding and decoding (special tokens skipped), as a reward function sees it."""
    from pathlib import Path

    from tokenizers import Tokenizer

    from verl import env

    file = Path(env.expand(folder)) / "tokenizer.json"
    if not file.is_file():
        raise DataError("the folder holds no tokenizer.json", key="--tokenizer", got=folder)
    tokenizer = Tokenizer.from_file(str(file))
    return lambda text: tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids, skip_special_tokens=True)


def show(function: RewardFunction, trials: Sequence[Trial]) -> None:
    """The table, the first traceback, and what stands out."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    console.print(Text(f"reward function {function.label}, form '{function.form.value}'"))
    table = Table(show_lines=False)
    for name in ("row", "data_source", "ground truth", "answer tried", "score", "ms", "error"):
        table.add_column(name, overflow="fold", justify="right" if name in ("row", "score", "ms") else "left")
    for trial in trials:
        table.add_row(*(Text(printable(cell)) for cell in _cells(trial)), style="red" if _failure(trial) else "")
    console.print(table)
    failures = [failure for trial in trials if (failure := _failure(trial))]
    if failures:
        first = f"{len(failures)} of {len(trials)} calls failed. The first: {failures[0].message}"
        console.print(Text(printable(f"{first}\n{failures[0].trace}")))
    elif len({trial.result.score for trial in trials}) == 1:
        console.print(Text(f"Note: every answer scored {trials[0].result.score}; a model cannot learn from that."))


def _failure(trial: Trial) -> RewardFailure | None:
    """What went wrong, also where the sample has a score all the same."""
    return trial.result.failure or trial.result.caught


def _cells(trial: Trial) -> tuple[str, ...]:
    sample, result = trial.sample, trial.result
    extra = {name: value for name, value in result.extra.items() if name != "score"}
    score = "-" if result.score is None else f"{result.score:g}{f' {extra}' if extra else ''}"
    failure = _failure(trial)
    error = failure.message if failure else ""
    source = "-" if sample.data_source is None else str(sample.data_source)
    answer = _short(sample.solution_str) or "(empty)"
    truth = _short(str(sample.ground_truth))
    return str(sample.row), source, truth, answer, score, f"{trial.seconds * 1e3:.2f}", error


def _short(text: str, most: int = 60) -> str:
    return text if len(text) <= most else f"{text[: most - 3]}..."


if __name__ == "__main__":
    sys.exit(main())
