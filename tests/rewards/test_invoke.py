"""Whatever a function returns or raises becomes a score or a failure that says what is wrong."""

from __future__ import annotations

import asyncio
import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from tests.rewards.files import samples
from verl.rewards import RewardFunction
from verl.rewards.invoke import invoke, invoke_async, result_of, results_of


@pytest.mark.parametrize(
    ("value", "score"),
    [
        (1, 1.0),
        (0.25, 0.25),
        (True, 1.0),
        (np.float32(0.5), 0.5),
        (np.bool_(True), 1.0),
        (np.array(2), 2.0),
        (np.array([2.0]), 2.0),
        (torch.tensor(0.5), 0.5),
        (Fraction(1, 2), 0.5),
        ({"score": np.float64(0.5)}, 0.5),
        ({"score": False}, 0.0),
    ],
)
def test_numbers_of_all_kinds_are_scores(value, score):
    result = result_of(value)
    assert result.failure is None and result.score == score and type(result.score) is float


@pytest.mark.parametrize(
    ("value", "part"),
    [
        (None, "returned None"),
        (float("nan"), "returned nan"),
        (math.inf, "returned inf"),
        (10**400, "returned inf"),
        (1e300, "returned 1e+300, which is too large"),
        (-(10**30), "returned -1e+30, which is too large"),
        ("1.0", "returned a string ('1.0')"),
        ([1.0, 2.0], "returned list"),
        (1j, "returned complex"),
        (np.array([1.0, 2.0]), "returned list"),
        ({"scor": 1.0}, "without the key 'score'. Its keys: ['scor']"),
        ({"score": None}, "returned None"),
        ({"score": "good"}, "returned a string"),
        (object(), "returned object"),
    ],
)
def test_everything_else_is_a_failure_that_says_what_came(value, part):
    failure = result_of(value).failure
    assert failure.kind == "value" and part in failure.message
    assert "a finite float, int or bool, or a dict with the key 'score'" in failure.message


def test_the_details_of_a_dict_are_kept_as_plain_values():
    result = result_of({"score": np.float32(1), "acc": np.bool_(True), "pred": "7", "parts": np.array([1, 2])})
    assert result.extra == {"score": 1.0, "acc": True, "pred": "7", "parts": [1, 2]}


@pytest.mark.parametrize("raw", [[1, 0.5], (1, 0.5), np.array([1, 0.5]), torch.tensor([1, 0.5])])
def test_a_batch_function_may_return_any_list(raw):
    function = RewardFunction.of(lambda responses: raw)
    assert [r.score for r in invoke(function, samples("a", "b"))] == [1.0, 0.5]


@pytest.mark.parametrize(
    ("raw", "part"),
    [
        ([1], "returned 1 scores for 2 responses"),
        ([1, 2, 3], "returned 3 scores for 2 responses"),
        (None, "returned None instead of a list of 2 scores"),
        (1.0, "returned float (1.0) instead of a list"),
        ("ab", "returned a string"),
        ({"score": [1, 2]}, "returned dict"),
        (np.float64(1), "instead of a list"),
    ],
)
def test_a_list_of_the_wrong_length_fails_every_row(raw, part):
    results = results_of(RewardFunction.of(lambda responses: raw), raw, 2)
    assert len(results) == 2 and all(part in r.failure.message for r in results)


def test_one_bad_value_in_a_list_fails_only_its_row():
    results = invoke(RewardFunction.of(lambda responses: [1, None, {"score": 0.5, "acc": 1}]), samples("a", "b", "c"))
    assert [r.score for r in results] == [1.0, None, 0.5] and "None" in results[1].failure.message


def test_an_exception_keeps_its_type_text_and_only_the_users_frames():
    def compute_score(solution_str):
        raise KeyError("missing")

    (result,) = invoke(RewardFunction.of(compute_score), samples("a"))
    assert result.failure.kind == "raised" and result.failure.message == "KeyError: 'missing'"
    assert isinstance(result.failure.exception, KeyError)
    assert 'raise KeyError("missing")' in result.failure.trace and "rewards/invoke.py" not in result.failure.trace


def test_sys_exit_is_a_failure_and_an_interrupt_is_not_swallowed():
    def leaves(solution_str):
        raise SystemExit(3)

    def interrupted(solution_str):
        raise KeyboardInterrupt

    assert "SystemExit" in invoke(RewardFunction.of(leaves), samples("a"))[0].failure.message
    with pytest.raises(KeyboardInterrupt):
        invoke(RewardFunction.of(interrupted), samples("a"))


def test_async_functions_are_awaited_in_both_ways():
    async def later(solution_str):
        await asyncio.sleep(0)
        return {"score": 1}

    def hidden(solution_str):
        return later(solution_str)

    assert invoke(RewardFunction.of(hidden), samples("a"))[0].score == 1.0
    assert asyncio.run(invoke_async(RewardFunction.of(later), samples("a")))[0].score == 1.0
