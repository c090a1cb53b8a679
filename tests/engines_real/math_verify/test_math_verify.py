"""The real math-verify in its process: what it finds equal, and what it does with answers that attack it."""

from __future__ import annotations

import pytest

from tests.harness.hostile import answers
from verl.rewards import RewardSample, Scorer, ScoringLimits, load_reward_function
from verl.rewards.scorers.math_verify import compute_score
from verl.utils.reward_score import math_verify as facade


@pytest.mark.parametrize(
    ("answer", "truth", "score"),
    [
        (r"so $\boxed{\frac{\sqrt8}{2}}$", r"\sqrt2", 1.0),
        (r"the answer is $x=\frac12$", "0.5", 1.0),
        (r"\boxed{\{1,2\}}", r"\{2,1\}", 1.0),
        (r"\boxed{x^5+x^3+x^2}", "x^2+x^3+x^5", 1.0),
        (r"\boxed{3^2+4^2}", "25", 1.0),
        (r"\boxed{5}", 5, 1.0),
        (r"\boxed{\binom{20}{10}}", "184756", 1.0),
        (r"\boxed{100!}", "100!", 1.0),
        (r"\boxed{2^{100}}", "2^{101}", 0.0),
        (r"\boxed{2^{1009}}", "2^{1009}", 1.0),
        (r"\boxed{\frac24}" + " It is." * 5000, "1/2", 1.0),
        (r"\boxed{\frac24}, in the form \boxed{...} or \boxed{}", "1/2", 1.0),
        (r"\boxed{2}", "3", 0.0),
        ("no formula", "3", 0.0),
        (r"\boxed{9^{9^{9^{9}}}}", "3", 0.0),
        (r"\boxed{99999999!}", "3", 0.0),
    ],
)
def test_formulas_are_compared(answer, truth, score):
    assert compute_score(answer, truth) == score
    assert facade.compute_score(answer, truth) == score


def test_hostile_answers_run_nothing_and_none_is_right(tmp_path):
    canary = tmp_path / "canary"
    assert {compute_score(text, "17") for text in answers(str(canary))} == {0.0}
    assert not canary.exists()


def test_it_is_named_like_any_other_function():
    scorer = Scorer(load_reward_function("verl.rewards.scorers.math_verify"), ScoringLimits(num_workers=1))
    assert scorer.score([RewardSample("mine", r"\boxed{\frac24}", "1/2")])[0].score == 1.0
    scorer.close()
