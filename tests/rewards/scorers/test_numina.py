"""The rules of PRM800K, by hand: which answers are the same, which are not, and what the answer of a text is."""

from __future__ import annotations

import os
from concurrent.futures import Future

import pytest

from verl.rewards import (
    RewardFunction,
    RewardSample,
    Scorer,
    ScoringLimits,
    default_compute_score,
    load_reward_function,
)
from verl.rewards.runners.process import ProcessRunner
from verl.rewards.samples import RewardFailure, RewardResult
from verl.rewards.scorers import formulas, symbolic
from verl.rewards.scorers.numina import compute_score, extract_answer, normalize, same_answer
from verl.utils.reward_score import prime_math

SAME = [
    ("1,000", "1000"), ("3 cm", "3"), (r"10\%", "10"), ("(1, 2)", "(1,2)"), ("1 or 2", "1,2"), (r"\text{Yes}", "yes"),
    (r"7\frac{3}{4}", "31/4"), ("7 3/4", "7.75"), ("2 million", "2000000"), ("x=7", "7"), ("3.0", "3"),
    (r"\frac{\sqrt{8}}{2}", r"\sqrt{2}"), ("(x+1)^2", "x^2+2x+1"), (r"(\frac12, \sqrt{9})", "(0.5,3)"),
    ("2.00005", "2"), (r"50\%", "0.5"), ("12.56", r"4\pi"), (r"3\pi", "9.42"), ("x+1=2", "2=x+1"), ("x-1=0", "1-x=0"),
    (r"\begin{pmatrix}1&2\\3&\sqrt4\end{pmatrix}", r"\begin{pmatrix} 1 & 2 \\ 3 & 2 \end{pmatrix}"),
    (r"\$5", "5"), (r"[0, \infty)", r"[0,\infty)"), (r"\sin^2 x+\cos^2 x", "1"),
]  # fmt: skip
OTHER = [
    ("2/4", "1/2"), ("50", "0.5"), ("[1,2)", "(1,2)"), ("2,1", "1,2"), ("3.5", "3"), ("x", "|x|"), ("1,2,3", "1,2"),
    ("", "1"), ("2.001", "2"), (r"\begin{pmatrix}1&2\end{pmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}"),
    ("sin(x)", "cos(x)"), ("x^2", "x^3"), ("yes", "no"), (r"\pi", "3"), ("9^9^9", "1"),
]  # fmt: skip


@pytest.mark.parametrize(("answer", "truth"), SAME)
def test_these_answers_are_the_same_either_way_round(answer, truth):
    assert same_answer(answer, truth)
    assert same_answer(truth, answer)


@pytest.mark.parametrize(("answer", "truth"), OTHER)
def test_these_answers_are_not_the_same(answer, truth):
    assert not same_answer(answer, truth)
    assert answer == "" or not same_answer(truth, answer)


@pytest.mark.parametrize(
    ("text", "found", "answer"),
    [
        (r"First \boxed{1}, then \boxed{\frac{1}{2}}. The answer is 3.", True, r"\frac{1}{2}"),
        ("Therefore the answer is 42. That was easy.", True, "42"),
        ("Answer: $x=7$", True, "7"),
        ("The answers are 1 and 2", True, "1 and 2"),
        ("We add them.\nSo 17 is the answer", True, "17"),
        ("So x = 5", True, "5"),
        ("The answer is 42." + " That was easy." * 1000, True, "42"),
        (r"\boxed{42}. Remember that \boxed was asked for.", True, "42"),
        ("no idea at all", False, "no idea at all"),
        ("", False, ""),
    ],
)
def test_the_answer_of_a_text(text, found, answer):
    assert extract_answer(text) == (found, answer)


def test_a_score_tells_whether_an_answer_was_found():
    assert compute_score(r"\boxed{5}", 5) == {"score": 1.0, "acc": True, "pred": "5", "format": 1.0}
    assert compute_score("who knows", "5") == {"score": 0.0, "acc": False, "pred": "who knows", "format": 0.0}


def test_upstreams_path_returns_three_values():
    assert prime_math.compute_score(r"\boxed{5}", "5") == (True, True, "5")


@pytest.mark.parametrize(
    ("text", "normal"),
    [("7 3/4", "(7+3/4)"), ("2 million", "2*10^6"), ("-1 1/2", "-(1+1/2)"), ("x=5", "5"), ("2=x", "2=x")],
)
def test_spellings_are_normalised(text, normal):
    assert normalize(text) == normal


@pytest.fixture
def slow_process(tmp_path, monkeypatch):
    """Two processes that never answer for one pair of formulas, given three seconds."""
    file = tmp_path / "slow.py"
    file.write_text(
        "from verl.rewards.scorers import formulas\n\n"
        "formulas.compute_score('z+z', '2z')  # what is slow the first time\n\n\n"
        "def compute_score(solution_str, ground_truth):\n"
        "    while 'w' in solution_str:\n        pass\n"
        "    return formulas.compute_score(solution_str, ground_truth)\n"
    )
    runner = ProcessRunner(load_reward_function(str(file)), 3.0, 2, memory_mb=1024)
    runner.prepare()
    monkeypatch.setattr(symbolic, "_runner", runner)
    symbolic.decide.cache_clear()
    yield runner
    runner.close()
    symbolic.decide.cache_clear()


def test_a_pair_that_a_clock_stopped_is_tried_again_and_one_that_was_decided_is_not(monkeypatch):
    ends = [
        RewardFailure("timeout", "late"),
        RewardFailure("died", "no memory"),
        RewardFailure("processor time", "late"),
    ]
    asked = []

    class Scripted:
        def submit(self, samples):
            asked.append(samples)
            future: Future[list[RewardResult]] = Future()
            future.set_result([RewardResult(failure=ends[len(asked) - 1])])
            return future

    monkeypatch.setattr(symbolic, "_process", Scripted)
    symbolic.decide.cache_clear()
    assert not any(symbolic.equal("v+v", "2v") for _ in range(5)) and len(asked) == len(ends)
    symbolic.decide.cache_clear()


def test_a_formula_not_decided_in_time_is_not_equal_and_tried_once(slow_process, monkeypatch):
    given, open_now, at_once, submit = [], set(), [], slow_process.submit

    def watched(samples):
        future = submit(samples)
        if samples[0].solution_str == "w+w":
            given.append(future)
            open_now.add(future)
            at_once.append(len(open_now))
            future.add_done_callback(open_now.discard)
        return future

    monkeypatch.setattr(slow_process, "submit", watched)
    rows = [("numina_a", r"\boxed{y+y}", "2y"), ("numina_a", r"\boxed{w+w}", "2w"), ("openai/gsm8k", "#### 1", "1")]
    samples = [RewardSample(*rows[i % 3]) for i in range(12)]
    scorer = Scorer(RewardFunction.of(default_compute_score), ScoringLimits(num_workers=12))
    results = scorer.score(samples)
    assert [result.score for result in results] == [1.0, 0.0, 1.0] * 4
    assert [future.result()[0].failure.kind for future in given] == ["timeout"] * 4, "each was given its time once"
    assert max(at_once) == min(2, len(os.sched_getaffinity(0))), "two of them at once"
    scorer.close()


@pytest.mark.parametrize(
    "pair", [("1/0", "1"), ("0^{-1}", "1"), (r"\ln 0", "1"), (r"\infty", r"\infty+1"), ("1e999", "1")]
)
def test_formulas_without_a_value_are_not_equal(pair):
    assert formulas.compute_score(*pair) == 0.0
