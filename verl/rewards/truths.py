"""Ground truths: which functions need one, and what is said of a row that has none or one that no text can equal."""

from __future__ import annotations

import inspect
import math
import numbers
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from verl.errors import ConfigError, DataError
from verl.metrics import notice
from verl.rewards.forms import Form
from verl.rewards.function import RewardFunction
from verl.rewards.samples import RewardResult, RewardSample

KEY = "reward_model.ground_truth"
SETTING = "reward.ground_truth"
PARAMETERS = {Form.SINGLE: "ground_truth", Form.BATCH: "ground_truths", Form.RESPONSES: "ground_truths"}


def needs_truth(function: RewardFunction) -> bool:
    """Whether a function names the ground truth, without a default for rows that have none; built-in ones need it."""
    parameter = inspect.signature(function.fn).parameters.get(PARAMETERS[function.form])
    named = parameter is not None and parameter.default is inspect.Parameter.empty
    return function.is_builtin or (named and parameter.name not in function.reward_kwargs)  # type: ignore[union-attr]


def is_missing(truth: object) -> bool:
    """Null, or what files make of it; an empty text is a ground truth."""
    if isinstance(truth, Mapping) and "target" in truth:
        truth = truth["target"]
    return truth is None or (isinstance(truth, float) and math.isnan(truth))


def truth_of(holder: Any) -> Any:
    """The ground truth in the ``reward_model`` of a row; None where there is none."""
    return holder.get("ground_truth") if isinstance(holder, Mapping) else None


def missing_truth(place: str, holder: Any, label: str, is_builtin: bool = False) -> DataError:
    """The error for a row without a ground truth; it names both ways out."""
    way = "Give every row one; an empty text is one."
    ways = f"{way} {SETTING}=none says that the dataset has none: the function then gets None."
    return DataError(
        f"{place} has no ground truth, and {'the built-in scorers need' if is_builtin else f'{label} names'} one",
        key=KEY,
        got="no such column" if holder is None else holder,
        allowed='a column reward_model with {"ground_truth": ...}',
        fix=way if is_builtin else ways,
    )


def check_setting(function: RewardFunction, setting: str | None) -> None:
    """Raise where a dataset is said to have no ground truths and the built-in scorers are to compare with them."""
    if setting == "none" and function.is_builtin:
        raise ConfigError(
            "the built-in scorers compare with ground truths",
            key=SETTING,
            got="none",
            allowed="needed",
            fix="Set reward.custom_reward_function.path to a function of yours that needs none.",
        )


def check_truths(function: RewardFunction, holders: Iterable[Any], describe: Callable[[int], str]) -> None:
    """Raise for the first row without a ground truth if the function needs one.

    Args:
        holders: the column ``reward_model``; None for rows of data without it.
        describe: where a row stands, for the message.
    """
    if not needs_truth(function):
        return
    for row, holder in enumerate(holders):
        if is_missing(truth_of(holder)):
            raise missing_truth(describe(row), holder, function.label, function.is_builtin)


def notice_numbers(function: RewardFunction, samples: Sequence[RewardSample], results: Sequence[RewardResult]) -> None:
    """Tell where ground truths are numbers, answers are texts, and every sample of a batch has the same score."""
    scores = {result.score for result in results}
    if function.is_ours or len(samples) < 2 or len(scores) > 1 or not needs_truth(function):
        return
    sample = samples[0]
    value = sample.ground_truth.item() if hasattr(sample.ground_truth, "item") else sample.ground_truth
    if isinstance(value, numbers.Number):
        notice(
            KEY,
            f"of {sample.place} is a number ({type(value).__name__} {value}), and {function.label} gets the answer as "
            f"text; all {len(samples)} samples of this batch have the score {scores.pop()}. A number never equals a "
            "text: write str(ground_truth) in the function, or store texts in the column.",
        )
