"""A function that raises, hangs, crashes or exits costs its own sample and nothing else, wherever it runs."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from pathlib import Path

import psutil
import pytest

from tests.rewards.files import reward_file, samples
from verl.errors import ConfigError, RewardError
from verl.metrics import notices, reset_notices
from verl.rewards import RewardFunction, RewardSample, Scorer, ScoringLimits, load_reward_function

NASTY = """
    import ctypes, os, re, subprocess, sys, time

    def compute_score(data_source, solution_str, ground_truth, extra_info=None):
        word, _, file = solution_str.partition(" in ")
        if word not in ("good", "text"):
            with open(__file__ + ".log", "a") as log:
                print(os.getpid(), word, file=log)
        if word == "loop":
            if file:
                open(file, "w").close()
            while True:
                pass
        if solution_str == "sleep":
            time.sleep(1000)
        if solution_str == "regex":
            re.match("(a+)+b", "a" * 60)
        if solution_str == "exit":
            sys.exit(3)
        if solution_str == "hard exit":
            os._exit(3)
        if solution_str == "crash":
            ctypes.string_at(0)
        if solution_str == "raise":
            raise ValueError("bad answer")
        if solution_str == "print":
            print("x" * 200_000)
        if solution_str == "input":
            return len(sys.stdin.read())
        if solution_str == "child":
            return subprocess.Popen(["sleep", "1000"]).pid
        return {"score": 1.0, "pid": os.getpid()}
"""
FAST = ScoringLimits(timeout=3.0, num_workers=2)
"""Long enough for what is quick on a busy machine; what runs out of it never ends."""
WAIT = 60


@pytest.fixture(scope="module")
def nasty(tmp_path_factory):
    function = load_reward_function(reward_file(tmp_path_factory.mktemp("nasty"), NASTY))
    scorer = Scorer(function, FAST)
    scorer.prepare()
    yield scorer
    scorer.close()


def forget(scorer: Scorer) -> Path:
    """The file in which the calls of a scorer that do something nasty are noted, which is empty now."""
    log = Path(f"{scorer.function.origin}.log")
    log.write_text("")
    return log


def lines(log: Path) -> list[tuple[int, str]]:
    """Process and word of each such call."""
    return [(int(pid), word) for pid, _, word in (line.partition(" ") for line in log.read_text().splitlines())]


def is_gone(pid: int) -> bool:
    """Whether a process ends (or is only waiting to be collected)."""
    deadline = time.monotonic() + WAIT
    while time.monotonic() < deadline:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.02)
    return False


@pytest.mark.parametrize(
    ("text", "kind", "part"),
    [
        ("loop", "timeout", "took longer than 3 s and was stopped"),
        ("sleep", "timeout", "took longer than 3 s"),
        ("regex", "timeout", "took longer than 3 s"),
        ("exit", "raised", "SystemExit: 3"),
        ("hard exit", "died", "exit code 3"),
        ("crash", "died", "SIGSEGV"),
        ("raise", "raised", "ValueError: bad answer"),
    ],
)
def test_a_function_from_a_file_is_stopped_whatever_it_does(nasty, text, kind, part):
    log = forget(nasty)
    first, bad, last = nasty.score(samples("good", text, "good"))
    assert first.score == last.score == 1.0
    assert bad.failure.kind == kind and part in bad.failure.message
    ((pid, word),) = lines(log)
    assert word == text, "it ran once"
    assert psutil.pid_exists(pid) if kind == "raised" else is_gone(pid), "only an exception leaves its process"


def test_the_others_go_on_in_the_other_process_while_a_call_hangs(nasty, tmp_path):
    scorer, began = Scorer(nasty.function, ScoringLimits(timeout=1000, num_workers=2)), tmp_path / "began"
    hanging = scorer._submit(samples(f"loop in {began}"))
    while not began.exists():
        time.sleep(0.01)
    others = [scorer._submit([sample]) for sample in samples(*["good"] * 30)]
    results = [future.result(WAIT)[0] for future in others]
    assert not hanging.done() and all(result.score == 1.0 for result in results)
    scorer.close()
    assert hanging.result(WAIT)[0].failure.kind == "died"


def test_calls_behind_one_that_hangs_wait_for_its_time_limit_and_are_scored(nasty):
    log = forget(nasty)
    nasty.score(samples("good", "good"))  # several may be sent at once
    results = nasty.score(samples("loop", *["good"] * 30))
    assert results[0].failure.kind == "timeout" and all(result.score == 1.0 for result in results[1:])
    assert [word for _, word in lines(log)] == ["loop"], "its time limit is waited for once"


def test_an_exception_in_a_process_can_be_raised_from_with_the_users_traceback(nasty):
    (result,) = nasty.score(samples("raise"))
    assert isinstance(result.failure.exception, ValueError) and str(result.failure.exception) == "bad answer"
    assert 'raise ValueError("bad answer")' in result.failure.trace and "my_reward.py" in result.failure.trace
    assert "my_reward.py" in str(result.failure.exception.__cause__)


def test_what_a_function_prints_and_reads_does_not_disturb(nasty, capfd):
    printed, read = nasty.score(samples("print", "input"))
    assert printed.score == 1.0 and read.score == 0.0
    assert capfd.readouterr().out == ""


def test_order_is_kept_and_processes_are_used_again(nasty):
    texts = [f"text {i}" for i in range(50)]
    results = nasty.score(samples(*texts))
    assert len({r.extra["pid"] for r in results}) <= 2
    echo = RewardFunction.of(lambda solution_str: float(solution_str.split()[1]))
    assert [r.score for r in Scorer(echo).score(samples(*texts))] == [float(i) for i in range(50)]


def test_nothing_is_left_behind(tmp_path):
    scorer = Scorer(load_reward_function(reward_file(tmp_path, NASTY)), FAST)
    (result,) = scorer.score(samples("good"))
    (child,) = scorer.score(samples("child"))
    worker, grandchild = result.extra["pid"], int(child.score)
    assert Path(f"/proc/{worker}").exists() and Path(f"/proc/{grandchild}").exists()
    del scorer
    gc.collect()
    assert is_gone(worker) and is_gone(grandchild)


def test_a_thread_that_hangs_is_given_up_and_stopped():
    def compute_score(solution_str):
        while solution_str == "loop":
            pass
        return 1

    scorer = Scorer(RewardFunction.of(compute_score), FAST)
    before = {thread for thread in threading.enumerate() if thread.name == "verl-reward"}
    good, bad, more = scorer.score(samples("good", "loop", "good"))
    assert good.score == more.score == 1.0 and bad.failure.kind == "timeout" and "given up" in bad.failure.message
    assert [r.score for r in scorer.score(samples("good", "good"))] == [1.0, 1.0]
    scorer.close()
    mine = [t for t in threading.enumerate() if t.name == "verl-reward" and t not in before]
    for thread in mine:
        thread.join(60)
    assert not any(thread.is_alive() for thread in mine)


def test_a_hang_is_seen_however_often_the_pool_was_idle_before():
    def compute_score(solution_str):
        while solution_str == "loop":
            pass
        return 1

    scorer = Scorer(RewardFunction.of(compute_score), ScoringLimits(timeout=0.02, num_workers=1))
    for _ in range(12):
        assert scorer.score(samples("loop"))[0].failure.kind == "timeout"
    scorer.close()


def test_async_samples_run_at_once_and_each_has_its_limit():
    there, ended = 0, []

    async def compute_score(solution_str):
        nonlocal there
        if solution_str == "raise":
            raise ValueError("bad")
        if solution_str == "cancel":
            raise asyncio.CancelledError
        if solution_str == "hang":
            try:
                await asyncio.sleep(WAIT)
            except asyncio.CancelledError:
                ended.append("cancelled")
                raise
        there += 1
        while there < 100:  # one after the other would wait for ever
            await asyncio.sleep(0.01)
        return 1

    scorer = Scorer(RewardFunction.of(compute_score), ScoringLimits(timeout=3.0))
    results = scorer.score(samples(*["good"] * 100, "raise", "cancel", "hang"))
    assert [r.score for r in results[:100]] == [1.0] * 100
    assert [r.failure.kind for r in results[100:]] == ["raised", "raised", "timeout"] and ended == ["cancelled"]


def test_an_async_function_that_blocks_fails_alone_and_the_others_begin_again():
    async def compute_score(solution_str):
        while solution_str == "block":
            time.sleep(0.01)
        await asyncio.sleep(0.01)
        return 1

    scorer = Scorer(RewardFunction.of(compute_score), ScoringLimits(timeout=3.0))
    results = scorer.score(samples("good", "block", *["good"] * 20))
    assert results[1].failure.kind == "timeout" and "blocked the event loop" in results[1].failure.message
    assert all(r.score == 1.0 for i, r in enumerate(results) if i != 1)
    assert scorer.score(samples("good"))[0].score == 1.0


def test_a_batch_is_one_call_and_a_row_that_raises_is_found():
    calls = []

    def compute_reward(responses, ground_truths):
        calls.append(list(responses))
        if "bad" in responses:
            raise ValueError("bad row")
        return [float(len(responses))] * len(responses)

    scorer = Scorer(RewardFunction.of(compute_reward))
    assert [r.score for r in scorer.score(samples("a", "b"))] == [2.0, 2.0] and calls == [["a", "b"]]
    results = scorer.score(samples("a", "bad", "b", "c"))
    assert [r.score for r in results] == [3.0, None, 3.0, 3.0]  # the good rows are scored together, not alone
    assert results[1].failure.message == "ValueError: bad row"


def test_a_batch_call_that_fails_as_a_whole_fails_every_row():
    def compute_reward(responses, ground_truths):
        if len(responses) > 1:
            raise ValueError("too many")
        return [1.0]

    results = Scorer(RewardFunction.of(compute_reward)).score(samples("a", "b"))
    assert [r.failure.message for r in results] == ["ValueError: too many"] * 2


def test_a_batch_call_that_hangs_is_stopped_once():
    calls, over, ended = [], threading.Event(), []

    def compute_reward(responses, ground_truths):
        calls.append(list(responses))
        over.wait(WAIT)
        ended.append(list(responses))

    results = Scorer(RewardFunction.of(compute_reward), ScoringLimits(timeout=0.2)).score(samples("a", "b", "c"))
    assert not ended, "it was not waited for"
    over.set()
    assert {r.failure.kind for r in results} == {"timeout"} and calls == [["a", "b", "c"]]


def test_a_row_that_cannot_be_sent_is_scored_in_a_thread_with_a_notice(tmp_path):
    reset_notices()
    code = """
        def compute_score(solution_str, extra_info):
            value = extra_info["value"]
            return value() if callable(value) else value
    """
    scorer = Scorer(load_reward_function(reward_file(tmp_path, code)), ScoringLimits(timeout=WAIT))
    infos = [{"value": 1}, {"value": lambda: 7}, {"value": 2}]
    results = scorer.score([RewardSample("d", "a", "t", info) for info in infos])
    assert [r.score for r in results] == [1.0, 7.0, 2.0]
    assert "threads of this process" in " ".join(notices().values())


def test_a_function_that_another_process_cannot_load_is_refused_where_a_process_is_wanted():
    with pytest.raises(RewardError, match="top level of a file"):
        Scorer(RewardFunction.of(lambda solution_str: 1), ScoringLimits(isolation="process"))


def test_a_child_that_cannot_load_the_function_says_why_once(tmp_path):
    path = reward_file(tmp_path, "def compute_score(solution_str): return 1\n")
    scorer = Scorer(load_reward_function(path), FAST)
    reward_file(tmp_path, "raise OSError('gone')\n")
    results = scorer.score(samples("a", "b", "c"))
    assert {r.failure.kind for r in results} == {"start"} and "OSError: gone" in results[0].failure.message


def test_one_sample_is_scored_without_blocking_the_event_loop(nasty):
    async def both():
        return await asyncio.gather(*(nasty.score_async(sample) for sample in samples("good", "raise")))

    good, bad = asyncio.run(both())
    assert good.score == 1.0 and bad.failure.kind == "raised"


def test_isolation_none_runs_in_this_thread():
    here = Scorer(RewardFunction.of(lambda solution_str: threading.get_ident()), ScoringLimits(isolation="none"))
    assert here.score(samples("a"))[0].score == float(threading.get_ident())
    assert here.score([]) == []


@pytest.mark.parametrize(
    ("limits", "part"),
    [
        ({"isolation": "proces"}, "Did you mean 'process'"),
        ({"on_error": "stop"}, "mask, raise"),
        ({"timeout": 0}, "reward.timeout"),
        ({"timeout": -1.0}, "reward.timeout"),
        ({"num_workers": 0}, "reward.num_workers"),
    ],
)
def test_limits_out_of_range_are_refused(limits, part):
    with pytest.raises(ConfigError, match=part):
        ScoringLimits(**limits)
