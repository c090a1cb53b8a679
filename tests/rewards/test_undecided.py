"""An answer that no scorer can decide in time counts as wrong, and is counted and shown; texts are compared first."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future

import pytest

from tests.rewards.files import Letters, batch
from verl.metrics import notices
from verl.rewards import RewardFunction, RewardSample, wire
from verl.rewards.invoke import invoke, invoke_async
from verl.rewards.managers.naive import NaiveRewardManager
from verl.rewards.samples import RewardFailure, RewardResult
from verl.rewards.scorers import math_verify, symbolic
from verl.rewards.undecided import undecided


class Ends:
    """Stands for a process that ends with this failure."""

    def __init__(self, failure):
        self.failure, self.given = failure, []

    def submit(self, samples):
        self.given += samples
        future: Future[list[RewardResult]] = Future()
        future.set_result(
            [RewardResult(0.0, failure=None) if self.failure is None else RewardResult(None, {}, self.failure)]
        )
        return future


@pytest.fixture
def ends(monkeypatch):
    """Lets both processes that compare formulas end in a certain way."""
    symbolic.decide.cache_clear()

    def let(kind):
        process = Ends(kind and RewardFailure(kind, "took too long"))
        for scorer in (symbolic, math_verify):
            monkeypatch.setattr(scorer, "_process", lambda: process)
        return process

    yield let
    symbolic.decide.cache_clear()


SAME = ("2^{100}", r"\binom{20}{10}", "2^{1009}", "100!", "9^{9^{9}}", r"\frac{1}{2}", "( 1, 2 )")


@pytest.mark.parametrize("text", SAME)
@pytest.mark.parametrize("written", [r"So it is \boxed{%s}.", r"\boxed{ %s }" + " It is." * 5000, "So it is $%s$."])
def test_an_answer_that_is_the_text_of_the_truth_is_right(ends, text, written):
    process = ends("timeout")
    assert math_verify.compute_score(written.replace("%s", text), text) == 1.0
    assert math_verify.compute_score(written.replace("%s", text), f"${text}$") == 1.0
    assert process.given == []


@pytest.mark.parametrize("answer", ["2^{101}", "5 7", "", "$"])
def test_another_text_is_not_the_truth(ends, answer):
    ends(None)
    assert math_verify.compute_score(rf"\boxed{{{answer}}}", "2^{100}") == 0.0
    assert math_verify.compute_score(rf"\boxed{{{answer}}}", "57") == 0.0
    assert math_verify.compute_score(rf"\boxed{{{answer}}}", "") == 0.0


@pytest.mark.parametrize(
    ("answer", "is_asked"),
    [
        (r"\binom{20}{10}", True), ("2^{100}", True), ("100!", True), (r"3 \cdot 2^{10} + 5!", True),
        (r"\binom{20}{10}^{99999}", False), ("2^{10000}", False), ("1000!", False), ("9^{9^{9}}", False),
        ("5!!", False), ("(2^{100})!", False), ("x^{999}", False),
    ],
)  # fmt: skip
def test_cheap_arithmetic_is_computed_and_what_is_costly_is_not(ends, answer, is_asked):
    process = ends(None)
    math_verify.compute_score(rf"\boxed{{{answer}}}", "7")
    assert bool(process.given) is is_asked


def scored(source, text, truth, function=None):
    found = NaiveRewardManager(Letters(), 0, function)(batch([text, "4"], [truth, "4"], source=source))
    return found, {name: metric.value for name, metric in found["metrics"].items()}


@pytest.mark.parametrize("kind", ["timeout", "processor time", "died"])
@pytest.mark.parametrize("function", [None, math_verify.compute_score])
def test_an_undecided_answer_is_wrong_counted_and_shown(ends, kind, function):
    ends(kind)
    found, metrics = scored("numina_a", r"\boxed{x+x+x}", "3x", function)
    assert found["reward_tensor"].sum(-1)[0] == 0.0 and found["unscorable"][0] is False, "a mask would pay"
    assert metrics["reward/undecided"] >= 1 and metrics["reward/unscorable"] == 0
    said = notices()["reward/undecided"]
    assert "count as wrong" in said and "row 0 of the batch" in said and "took too long" in said


def test_a_formula_that_is_too_costly_to_read_is_undecided(ends):
    ends(None)
    assert scored("numina_a", r"\boxed{9^{9^9}}", "1")[1]["reward/undecided"] == 1
    assert "a tower of powers" in notices()["reward/undecided"]


def test_a_decided_answer_is_not_counted(ends):
    ends(None)
    assert scored("numina_a", r"\boxed{x+x}", "3x")[1]["reward/undecided"] == 0
    assert scored("numina_a", r"\boxed{no formula & at all}", "3x")[1]["reward/undecided"] == 0
    assert "reward/undecided" not in notices()


def asks(solution_str, ground_truth):
    if solution_str == "late":
        undecided("late")
    return 0.0


async def waits(solution_str, ground_truth):
    await asyncio.sleep(0)
    return asks(solution_str, ground_truth)


async def at_once(function):
    rows = [RewardSample(None, text, "x") for text in ("late", "soon", "late")]
    return [each[0].undecided for each in await asyncio.gather(*(invoke_async(function, [row]) for row in rows))]


def test_the_reason_stays_with_its_sample_and_travels():
    results = [invoke(RewardFunction.of(asks), [RewardSample(None, text, "x")])[0] for text in ("late", "soon")]
    assert [result.undecided for result in wire.unpack_results(wire.pack_results(results))] == ["late", ""]
    assert asyncio.run(at_once(RewardFunction.of(waits))) == ["late", "", "late"]
    undecided("said of no sample, as a scorer does that is called directly")
