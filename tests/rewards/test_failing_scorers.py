"""A text on which a scorer fails must not pay: built-in ones score it as an empty answer, users' functions mask it."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from tests.rewards.files import Letters, batch, reward_file, samples
from verl.config import PPOTrainerConfig, replace
from verl.errors import DataError, RewardError, SandboxError
from verl.metrics import notices, reset_notices
from verl.protocol import DataProto
from verl.rewards import (
    RewardFunction,
    RewardSample,
    Scorer,
    ScoringLimits,
    default_compute_score,
    dispatch,
    load_reward_function,
    load_reward_manager,
    wire,
)
from verl.rewards.early import EarlyScorer
from verl.rewards.managers.dapo import DAPORewardManager
from verl.rewards.managers.foreign import ForeignManager
from verl.rewards.managers.loop import RewardManagerBase
from verl.rewards.managers.naive import NaiveRewardManager
from verl.rewards.samples import RewardFailure, RewardResult
from verl.rewards.scorers import code, math_dapo, numina
from verl.rewards.scorers import math_verify as math_verify_scorer
from verl.sandbox import Outcome

BUILTIN = RewardFunction.of(default_compute_score)


def fails_on(monkeypatch, source, compute_score, error):
    """Let the scorer of a source raise where the text holds ``bad``; it is still that scorer for everything else."""

    def failing(solution_str, ground_truth, **options):
        if "bad" in solution_str:
            raise error
        return compute_score(solution_str, ground_truth, **options)

    monkeypatch.setitem(dispatch.SCORERS, source, failing)


def test_a_text_on_which_a_built_in_scorer_raises_scores_as_an_empty_one_and_is_counted_apart(monkeypatch):
    fails_on(monkeypatch, "math_dapo", math_dapo.compute_score, ZeroDivisionError("by a text"))
    found = DAPORewardManager(Letters(), 0)(batch(["bad", "Answer: 4"], ["4", "4"], source="math_dapo"))
    assert found["reward_tensor"].sum(-1).tolist() == [-1.0, 1.0], "an empty answer has -1 there, so 0 would pay"
    assert found["unscorable"] == [False, False] and found["reward_extra_info"]["acc"] == [False, True]
    metrics = {name: metric.value for name, metric in found["metrics"].items()}
    assert metrics == {
        "reward/unscorable": 0.0,
        "reward/unscorable_fraction": 0.0,
        "reward/unscorable_builtin": 1.0,
        "reward/undecided": 0.0,
    }
    said = notices()["reward/unscorable_builtin"]
    assert "1 of 2 samples" in said and "row 0 of the batch" in said and "ZeroDivisionError: by a text" in said


def test_no_notice_without_a_failure():
    found = NaiveRewardManager(Letters(), 0)(batch(["#### 4"], ["4"]))
    assert found["metrics"]["reward/unscorable_builtin"].value == 0.0 and notices() == {}


@pytest.mark.parametrize("on_error", ["mask", "raise", "zero"])
def test_the_policy_can_neither_mask_nor_stop_a_run_by_texts_that_built_in_scorers_do_not_read(monkeypatch, on_error):
    fails_on(monkeypatch, "openai/gsm8k", lambda text, truth: 0.0, RecursionError())
    found = NaiveRewardManager(Letters(), 0, limits=ScoringLimits(on_error=on_error))(batch(["bad"] * 3, ["4"] * 3))
    assert found["reward_tensor"].sum() == 0 and found["unscorable"] == [False] * 3


def test_a_time_out_of_a_built_in_scorer_scores_as_an_empty_answer(tmp_path):
    hang = "while not solution_str.startswith('good'): pass"
    path = reward_file(tmp_path, f"def compute_score(solution_str, ground_truth):\n    {hang}\n    return 1.0\n")
    function = load_reward_function(path)
    scorer = Scorer(function, ScoringLimits(timeout=1.0))
    masked, _ = scorer.score(samples("bad", "good"))
    assert masked.score is None
    ours = RewardFunction.of(math_verify_scorer.compute_score)
    result = Scorer(ours)._settled(samples("bad")[0], masked)
    assert result.score == 0.0 and result.caught.kind == "timeout" and result.failure is None
    scorer.close()


@pytest.mark.parametrize(
    ("error", "source", "truth"), [(SandboxError("no service"), "apps", "{}"), (DataError("no tests"), "taco", "[]")]
)
def test_what_is_no_fault_of_the_text_is_masked(monkeypatch, error, source, truth):
    fails_on(monkeypatch, source, lambda text, truth, **options: 1.0, error)
    bad, good = Scorer(BUILTIN).score([RewardSample(source, text, truth) for text in ("bad", "good")])
    assert bad.failure.kind == "refused" and bad.score is None and good.score == 1.0


def test_a_failure_travels_with_a_sample_that_was_scored_early(monkeypatch):
    fails_on(monkeypatch, "openai/gsm8k", lambda text, truth: float(text == "good"), ValueError("no"))
    manager = NaiveRewardManager(Letters(), 0)
    rows = [batch([text], ["4"]) for text in ("bad", "good")]
    packed = [asyncio.run(EarlyScorer(manager).score(row)) for row in rows]
    results = wire.unpack_results(packed)
    assert [result.score for result in results] == [0.0, 1.0]
    assert results[0].caught.kind == "raised" and isinstance(results[0].caught.exception, ValueError)
    assert results[1].caught is None


def failing(solution_str, ground_truth):
    if solution_str == "bad":
        raise ValueError("cannot read this")
    return {"bool": True, "nan": float("nan"), "text": "1.0", "none": None, "huge": 10**400}.get(solution_str, 0.5)


def test_a_users_failures_are_masked_and_on_error_zero_makes_them_0():
    texts = ["good", "bad", "nan", "text", "none", "huge", "bool"]
    data = batch(texts, ["x"] * 7)
    reset_notices()
    masked = NaiveRewardManager(Letters(), 0, failing, limits=ScoringLimits(isolation="none"))(data)
    assert masked["unscorable"] == [False, True, True, True, True, True, False]
    reset_notices()
    zero = NaiveRewardManager(Letters(), 0, failing, limits=ScoringLimits(isolation="none", on_error="zero"))(data)
    assert zero["unscorable"] == [False] * 7
    assert zero["reward_tensor"].sum(-1).tolist() == masked["reward_tensor"].sum(-1).tolist() == [0.5] + [0.0] * 5 + [1]
    assert zero["metrics"]["reward/unscorable"].value == masked["metrics"]["reward/unscorable"].value == 5.0
    assert "reward/unscorable_builtin" not in zero["metrics"]
    (said,) = notices().values()
    assert "5 of 7 samples of this batch have the score 0" in said and "cannot read this" in said


def test_a_batch_in_which_a_users_function_fails_throughout_stops_the_run_in_every_case():
    for on_error in ("mask", "raise", "zero"):
        manager = NaiveRewardManager(Letters(), 0, failing, limits=ScoringLimits(isolation="none", on_error=on_error))
        with pytest.raises(RewardError, match="cannot read this"):
            manager(batch(["bad", "bad"], ["x", "x"]))


def test_the_setting_reaches_the_manager_and_others_are_refused(tmp_path):
    path = reward_file(tmp_path, "def compute_score(solution_str):\n    return None if solution_str == 'a' else 1\n")
    names = {"reward.custom_reward_function.path": path, "reward.on_error": "zero"}
    manager = load_reward_manager(replace(PPOTrainerConfig(), **names), Letters())
    found = manager(batch(["a", "b"], ["x", "x"]))
    assert found["unscorable"] == [False, False] and found["reward_tensor"].sum() == 1.0
    manager.close()


class PerRow(RewardManagerBase):
    async def run_single(self, data: DataProto):
        score = float("inf") if data.non_tensor_batch["data_source"][0] == "bad" else 1.0
        return {"reward_score": score}


@pytest.mark.parametrize(("on_error", "masked"), [("mask", True), ("zero", False)])
def test_managers_of_other_contracts_know_the_setting(on_error, masked):
    data = batch(["a", "b"], ["x", "x"])
    data.non_tensor_batch["data_source"][0] = "bad"
    manager = PerRow(None, Letters())
    manager.configure(ScoringLimits(on_error=on_error))
    found = manager(data)
    assert found["unscorable"] == [masked, False] and found["reward_tensor"].sum() == 1.0
    manager.close()

    def old(data):
        scores = data.batch["responses"].float() * 0
        scores[0, 0] = float("nan")
        return scores

    found = ForeignManager(old, ScoringLimits(on_error=on_error))(data)
    assert found["unscorable"] == [masked, False] and found["reward_tensor"].isfinite().all()
    assert found["metrics"]["reward/unscorable"].value == 1.0


def test_a_score_of_an_agent_loop_that_is_no_number_is_masked():
    found = NaiveRewardManager(Letters(), 0)(batch(["#### 4"] * 3, ["4"] * 3, reward_score=[float("nan"), None, 0.25]))
    assert found["unscorable"] == [True, False, False]
    assert found["reward_tensor"].sum(-1).tolist() == [0.0, 1.0, 0.25]


class Odd:
    """A number of a user's own that fails when it is looked at."""

    def tolist(self):
        raise KeyError("odd")


@pytest.mark.parametrize(
    "value", [Odd(), {"score": Odd()}, 10**5000, "1" * 10_000, {"score": 1j}, [10**5000]], ids=range(6)
)
def test_odd_returned_values_are_failures_and_no_exceptions(value):
    scorer = Scorer(RewardFunction.of(lambda solution_str: value), ScoringLimits(isolation="none"))
    assert scorer.score(samples("a"))[0].failure is not None


def test_details_that_cannot_be_sent_fail_their_sample_and_say_so(tmp_path):
    code_ = """
        def compute_score(solution_str):
            loop = []
            loop.append(loop)
            return {"score": 1.0, "detail": {"huge": 10**5000, "loop": loop}.get(solution_str, 1)}
    """
    scorer = Scorer(load_reward_function(reward_file(tmp_path, code_)))
    huge, loop, good = scorer.score(samples("huge", "loop", "good"))
    assert "details that cannot be sent" in huge.failure.message and "details" in loop.failure.message
    assert good.score == 1.0
    scorer.close()


def test_answers_that_wait_behind_slow_ones_keep_their_time(monkeypatch):
    """A time limit of a moment, one place, and an answer that holds it for longer: nobody is given up."""
    began, go_on = threading.Event(), threading.Event()

    def slow(solution_str, ground_truth):
        if solution_str == "slow":
            began.set()
            assert go_on.wait(60)
        return 1.0

    monkeypatch.setitem(dispatch.PREFIXES, "numina_", slow)
    monkeypatch.setattr(dispatch, "WAITING", (slow,))
    scorer = Scorer(BUILTIN, ScoringLimits(timeout=0.05))
    rows = [RewardSample("numina_a", "slow", ""), *(RewardSample("numina_a", f"quick {i}", "") for i in range(8))]
    futures = [scorer._submit([row]) for row in rows]
    assert began.wait(60)
    time.sleep(0.3)  # six time limits
    go_on.set()
    assert [future.result(60)[0].score for future in futures] == [1.0] * 9
    scorer.close()


class Waits:
    """Stands for a sandbox in which a program waits long for its place and runs for two seconds."""

    def __init__(self, seconds: float, clock: list[float]):
        self.seconds, self.clock, self.given = seconds, clock, []

    def run(self, program, stdin, seconds):
        self.clock[0] += 1000.0
        self.given.append(seconds)
        return Outcome("ok", stdout="1", seconds=self.seconds)


def test_waiting_for_a_place_takes_nothing_from_the_time_of_a_program(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(code.time, "monotonic", lambda: clock[0])
    runner = Waits(2.0, clock)
    tests = {"inputs": ["1"] * 8, "outputs": ["1"] * 8}
    found = code.compute_score("print(1)", tests, runner, most_seconds=11.0)
    assert runner.given == [5.0, 5.0, 5.0, 5.0, 3.0, 1.0] and found["passed"] == 6


def test_numina_calls_are_not_given_up_by_their_runner():
    assert numina.compute_score in dispatch.WAITING
    scorer = Scorer(BUILTIN, ScoringLimits(timeout=0.001))
    (result,) = scorer.score([RewardSample("numina_a", r"\boxed{x+x+y}", "2x+y")])
    assert result.score == 1.0
    scorer.close()


def test_a_result_has_a_score_or_a_failure_and_says_what_was_caught():
    failure = RewardFailure("raised", "no", "trace", "f.py, line 2: raise", ValueError("no"))
    results = [RewardResult(failure=failure), RewardResult(0.0, {"acc": False}, caught=failure), RewardResult(1.0)]
    assert wire.unpack_results(wire.pack_results(results)) == results
