"""What a person sees of a function that always hangs, always raises, or is slow: soon, with line and setting."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import psutil
import pytest

from tests.rewards.files import Letters, batch, reward_file, samples
from verl.errors import RewardError
from verl.metrics import notices, reset_notices
from verl.rewards import RewardFunction, Scorer, ScoringLimits, load_reward_function, scoring
from verl.rewards.managers.naive import NaiveRewardManager
from verl.rewards.runners.base import MOST_HANGING, RunnerPool
from verl.rewards.samples import RewardFailure, RewardResult
from verl.rewards.scorers import symbolic

HANGS = """
    import time

    def compute_score(solution_str):
        while solution_str != "good":
            time.sleep(1000)
        return 1.0
"""


def workers() -> set[psutil.Process]:
    """The living processes of this one in which reward functions run."""
    return {child for child in psutil.Process().children() if is_worker(child)}


def is_worker(child: psutil.Process) -> bool:
    try:
        return child.status() != psutil.STATUS_ZOMBIE and "verl.rewards.worker" in " ".join(child.cmdline())
    except (psutil.NoSuchProcess, psutil.ZombieProcess):  # it ended meanwhile
        return False


class Background(threading.Thread):
    """Calls a function in a thread; what it returns is there once the thread has ended."""

    def __init__(self, call: Callable[[], list[RewardResult]]):
        super().__init__(daemon=True)
        self.call, self.result = call, []
        self.start()

    def run(self) -> None:
        self.result = self.call()


@pytest.mark.slow
def test_calls_of_a_function_that_hangs_run_out_of_their_time_together(tmp_path):
    others = workers()  # of graders, say, which stay until the tests end
    scorer = Scorer(load_reward_function(reward_file(tmp_path, HANGS)), ScoringLimits(timeout=3.0, num_workers=1))
    scorer.prepare()
    scoring_them = Background(lambda: scorer.score(samples(*["bad"] * 24)))
    most = 0
    while scoring_them.is_alive():
        most = max(most, len(workers() - others))
        scoring_them.join(0.1)
    results = scoring_them.result
    assert {result.failure.kind for result in results} == {"timeout"}
    assert most > 4, "one after the other they have one process, and another one while that is replaced"
    assert "was not tried: the 16 calls before it" in results[-1].failure.message
    assert scorer.score(samples("good", "good"))[1].score == 1.0
    deadline = time.monotonic() + 60
    while len(workers() - others) > 1:
        assert time.monotonic() < deadline, "those beyond the limit end"
        time.sleep(0.05)
    scorer.close()


def test_threads_that_hang_run_out_of_their_time_together():
    over, at_once = threading.Event(), []

    def compute_score(solution_str):
        at_once.append(len(scorer._runner._pool._threads))  # without those that were given up
        return 1.0 if solution_str == "good" else over.wait(60)

    scorer = Scorer(RewardFunction.of(compute_score), ScoringLimits(timeout=1.0, num_workers=1))
    results = scorer.score(samples(*["bad"] * 40))
    assert {result.failure.kind for result in results} == {"timeout"}
    assert at_once[0] == 1 and max(at_once) > 4, "one after the other there is never a second thread"
    assert scorer.score(samples("good"))[0].score == 1.0
    over.set()
    scorer.close()


class Desk:
    """An executor whose calls are a word each: it hangs at ``bad`` until released, and says that it took too long."""

    most = 1

    def __init__(self, go_on: threading.Event, begun: list[str]):
        self.go_on, self.begun = go_on, begun

    def prepare(self):
        return None

    def handle(self, calls, answer):
        for (word,) in calls:
            self.begun.append(word)
            if word == "bad":
                self.go_on.wait(60)
                answer(RewardFailure("timeout", "too slow"))
            else:
                answer([RewardResult(1.0)])

    stop = close = prepare


def test_a_pool_keeps_to_its_limit_while_calls_are_answered():
    go_on, begun = threading.Event(), []
    pool = RunnerPool(lambda: Desk(go_on, begun), 1, timeout=0.0)
    futures = [pool.submit([word]) for word in ("bad", "bad", "good", "good")]
    while not begun:
        time.sleep(0.001)
    pool.relieve()
    assert begun == ["bad"] and len(pool._threads) == 1, "none ran out of its time so far"
    go_on.set()
    assert [future.result(60)[0].score for future in futures] == [None, None, 1.0, 1.0]
    assert pool._limit == 1
    pool.close()


def test_a_pool_grows_behind_calls_that_hang_and_shrinks_again():
    go_on, begun = threading.Event(), []
    pool = RunnerPool(lambda: Desk(go_on, begun), 1, timeout=0.0)
    go_on.set()
    assert pool.submit(["bad"]).result(60)[0].failure.kind == "timeout"
    go_on.clear()
    futures = [pool.submit(["bad"]) for _ in range(4)]
    while len(begun) < 5:
        pool.relieve()
        time.sleep(0.001)
    assert len(pool._threads) == 4
    go_on.set()
    assert {future.result(60)[0].failure.kind for future in futures} == {"timeout"}
    assert pool.submit(["good"]).result(60)[0].score == 1.0
    deadline = time.monotonic() + 60
    while len(pool._threads) > 1 and time.monotonic() < deadline:
        time.sleep(0.001)
    assert len(pool._threads) == 1
    assert pool.submit(["good"]).result(60)[0].score == 1.0
    pool.close()


def test_after_many_in_a_row_those_that_wait_fail_unasked_and_the_next_answer_ends_that():
    go_on, begun = threading.Event(), []
    go_on.set()
    pool = RunnerPool(lambda: Desk(go_on, begun), 1)
    go_on.clear()
    futures = [pool.submit(["bad"]) for _ in range(MOST_HANGING + 5)]
    go_on.set()
    failures = [future.result(60)[0].failure for future in futures]
    assert len(begun) == MOST_HANGING and [f.message for f in failures[-5:]] == [failures[-1].message] * 5
    assert "was not tried" in failures[-1].message and failures[-1].kind == "timeout"
    assert pool.submit(["good"]).result(60)[0].score == 1.0 and not pool.busy()
    pool.close()


def test_a_text_behind_many_that_ran_out_of_their_time_is_tried_where_the_texts_decide():
    go_on, begun = threading.Event(), []
    pool = RunnerPool(lambda: Desk(go_on, begun), 1, timeout=0.0, gives_up=False)
    futures = [pool.submit(["bad"]) for _ in range(MOST_HANGING + 1)] + [pool.submit(["good"])]
    go_on.set()
    assert futures[-1].result(60)[0].score == 1.0 and len(begun) == MOST_HANGING + 2
    pool.relieve()
    assert pool._limit == 1
    pool.close()


def test_the_grader_of_formulas_tries_every_one_of_them():
    runner = symbolic.start()
    try:
        assert not runner._pool._gives_up
    finally:
        runner.close()


RAISES = """
    def helper(text):
        return int(text)  # the line that raises

    def compute_score(solution_str, ground_truth):
        return helper(solution_str)
"""


@pytest.mark.parametrize("isolation", ["process", "none"])
@pytest.mark.parametrize("on_error", ["mask", "raise", "zero"])
def test_a_function_that_always_raises_shows_file_line_and_code(tmp_path, isolation, on_error):
    path = reward_file(tmp_path, RAISES)
    limits = ScoringLimits(isolation=isolation, on_error=on_error)
    manager = NaiveRewardManager(Letters(), 0, load_reward_function(path), limits=limits)
    with pytest.raises(RewardError) as caught:
        manager(batch(["one", "two"], ["1", "2"]))
    assert f"{path}, line 3: return int(text)  # the line that raises" in str(caught.value)
    assert "invalid literal for int()" in str(caught.value) and "row 0 of the batch" in str(caught.value)
    manager.close()


def test_no_message_shows_the_arguments_that_may_be_secrets(tmp_path):
    reset_notices()
    code = """
        def compute_score(solution_str, key):
            raise ValueError("always") if solution_str == "bad" else TypeError("no")
    """
    function = load_reward_function(reward_file(tmp_path, code), reward_kwargs={"key": "sk-secret"})
    assert "sk-secret" not in repr(function)
    manager = NaiveRewardManager(Letters(), 0, function, limits=ScoringLimits(on_error="mask"))
    with pytest.raises(RewardError) as caught:
        manager(batch(["bad", "worse"], ["1", "2"]))
    assert "sk-secret" not in str(caught.value) + "".join(notices().values())
    manager.close()


def test_a_slow_function_points_to_what_makes_it_faster(monkeypatch):
    monkeypatch.setattr(scoring, "SLOW_BATCH", 0.0)
    monkeypatch.setattr(scoring.os, "sched_getaffinity", lambda pid: set(range(8)))

    def score(limits, count):
        reset_notices()
        scorer = Scorer(RewardFunction.of(lambda solution_str: 1.0), limits)
        scorer.score(samples(*["a"] * count))
        scorer.close()
        return notices().get("reward.num_workers", "")

    said = score(ScoringLimits(num_workers=1), 3)
    for part in ("scoring 3 samples took", "1 at once on 8 cores", "reward.num_workers=3", "async def"):
        assert part in said
    assert "reward.num_workers=" not in score(ScoringLimits(num_workers=8), 9)
    assert score(ScoringLimits(num_workers=4), 4) == score(ScoringLimits(num_workers=1, max_rpm=1e6), 3) == ""
    assert scoring.SLOW_BATCH == 0.0
