"""Several calls go to a child at once, and yet each has its own time limit, its own failure and its own answer."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import threading
import time

import pytest

from tests.harness.open_files import ends, is_there
from tests.rewards.files import reward_file, samples
from verl.metrics import notices
from verl.rewards import Scorer, ScoringLimits, load_reward_function, wire
from verl.rewards.runners.process import TOO_LONG, Child, ProcessRunner, _portions, _room
from verl.rewards.samples import RewardFailure
from verl.sandbox import frames

CODE = """
    import contextlib, os, pathlib, time

    def pairs(log):
        return [line for line in log.read_text().splitlines() if line.startswith("pair")]

    def compute_score(solution_str, folder):
        word, _, number = solution_str.partition(" ")
        log = os.open(f"{folder}/log", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(log, f"{solution_str}\\n".encode())
        os.close(log)
        if word == "die":
            os._exit(3)
        if word == "killed":  # the first processes, as if by the kernel
            if pathlib.Path(f"{folder}/log").read_text().count(solution_str) <= int(number):
                os.kill(os.getpid(), 9)
        if word == "fork":
            os.fork()
        if word == "hang":
            time.sleep(1000)
        if word == "sleep":
            time.sleep(float(number))
        if word == "junk":  # on the pipe of the answers
            for pipe in (fd for fd in range(3, 30) if os.path.exists(f"/proc/self/fd/{fd}")):
                if os.readlink(f"/proc/self/fd/{pipe}").startswith("pipe:"):
                    with contextlib.suppress(OSError):
                        os.write(pipe, (1).to_bytes(4, "big") + b"?")
        if word == "pair":  # the first and second call that began end together, the third and fourth, and so on
            log = pathlib.Path(f"{folder}/log")
            rank = pairs(log).index(solution_str)  # by the order of the lines: no two calls have the same
            while len(pairs(log)) < rank + 2 - rank % 2:
                time.sleep(0.01)
        return {"score": 1.0, "pid": os.getpid(), "said": "y" * 50_000 if word == "long" else word}
"""
WAIT = 60


@pytest.fixture
def function(tmp_path):
    return load_reward_function(reward_file(tmp_path, CODE), reward_kwargs={"folder": str(tmp_path)})


@pytest.fixture
def make(function, tmp_path):
    """Makes a child of the function above."""
    children: list[Child] = []

    def child(timeout: float = WAIT) -> Child:
        start = {"origin": function.origin, "name": function.name, "timeout": timeout}
        start |= {"memory_mb": None, "cpu_seconds": None}
        children.append(Child({**start, "reward_kwargs": {"folder": str(tmp_path)}}, timeout, []))
        return children[-1]

    yield child
    for one in children:
        one.close()


def ask(child: Child, *texts: str) -> list[str]:
    """What a child answers to calls that it is given together: what the function said, or the failure's message."""
    answers: list[str] = []
    child.handle(
        [wire.pack_samples(samples(text)) for text in texts],
        lambda found: answers.append(found.message if isinstance(found, RewardFailure) else found[0].extra["said"]),
    )
    return answers


def began(tmp_path) -> list[str]:
    return (tmp_path / "log").read_text().split("\n")[:-1]


def test_a_child_answers_each_of_several_calls(make):
    assert ask(make(), "a", "b", "c") == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("word", "part"), [("die", "ended its process (exit code 3)"), ("hang", "took longer than 2 s and was stopped")]
)
def test_calls_before_one_that_fails_its_process_keep_their_answers_and_those_behind_did_not_begin(
    make, tmp_path, word, part
):
    child = make(timeout=2.0 if word == "hang" else WAIT)
    ask(child, "start")
    *before, failure = ask(child, "a", "b", word, "c", "d")
    assert before == ["a", "b"] and failure == part
    assert began(tmp_path) == ["start", "a", "b", word]
    assert child.most == 1
    assert ask(child, "c", "d") == ["c", "d"], "a new process"


def test_a_call_whose_process_is_killed_from_outside_is_made_again(make, tmp_path):
    child = make()
    ask(child, "start")
    assert ask(child, "a", "killed 2", "b") == ["a", "killed"]  # b is another process's
    assert began(tmp_path) == ["start", "a", "killed 2", "killed 2", "killed 2"]
    assert "its sample is scored again" in notices()["the process of a reward function"]
    assert ask(child, "b", "c") == ["b", "c"]


def test_a_copy_that_a_function_forks_answers_for_no_other_sample(make):
    child = make()
    ask(child, "start")
    assert ask(child, "fork", "a", "fork", "b", "c") == ["fork", "a", "fork", "b", "c"]


def test_a_call_that_has_each_of_its_processes_killed_fails(make, tmp_path):
    child = make()
    (failure,) = ask(child, "killed 99")
    assert failure == "ended its process (signal 9, SIGKILL), as 2 processes before it"
    assert began(tmp_path) == ["killed 99"] * 3
    assert ask(child, "a") == ["a"]


KILLED_WHILE_IT_STARTS = """
    import os, pathlib

    starts = pathlib.Path(__file__).with_name("starts")
    with starts.open("a") as file:
        file.write("x")
    if starts.stat().st_size <= {kills}:
        os.kill(os.getpid(), 9)

    def compute_score(solution_str):
        return {{"score": 1.0, "said": solution_str}}
"""


@pytest.mark.parametrize("kills", [2, 3])
def test_a_process_that_is_killed_while_it_starts_is_started_again_twice(tmp_path, kills):
    function = load_reward_function(reward_file(tmp_path, KILLED_WHILE_IT_STARTS.format(kills=0)))
    (tmp_path / "starts").unlink()  # of this process
    reward_file(tmp_path, KILLED_WHILE_IT_STARTS.format(kills=kills))
    start = {"origin": function.origin, "name": function.name, "timeout": WAIT, "reward_kwargs": {}}
    child = Child({**start, "memory_mb": None, "cpu_seconds": None}, WAIT, [])
    (said,) = ask(child, "a")
    child.close()
    assert said == ("a" if kills == 2 else "its process did not start: ended its process (signal 9, SIGKILL)")
    assert (tmp_path / "starts").read_text() == "xxx"


def test_the_time_limit_of_a_call_begins_with_the_answer_before(make):
    child = make(timeout=2.0)
    ask(child, "start")
    assert ask(child, *["sleep 0.1"] * 21) == ["sleep"] * 21, "2.1 s all together"


def test_only_calls_that_have_shown_to_be_quick_are_taken_several_at_once(make):
    child = make()
    child.handle([[]], lambda found: None)
    assert child.most == 1, "it was started, and has shown nothing"
    ask(child, "sleep 0.03")
    assert child.most == 1
    deadline = time.monotonic() + WAIT
    while child.most < 32 and time.monotonic() < deadline:
        assert ask(child, *"abcdefgh" * 4) == list("abcdefgh" * 4)
    assert child.most == 32
    ask(child, "sleep 0.05")
    assert child.most == 1, "the mean of what it took before and now is more than 0.02 s"


def test_calls_and_answers_that_are_larger_than_a_pipe_do_not_block_each_other(function):
    runner = ProcessRunner(function, WAIT, 1)
    runner.submit(samples("start")).result(WAIT)
    (child,) = [worker.executor for worker in runner._pool._threads]
    texts = ["long " + "x" * 30_000] * 12
    answers: list[str] = []
    thread = threading.Thread(target=lambda: answers.extend(ask(child, *texts)), daemon=True)
    thread.start()
    thread.join(WAIT)
    runner.close()
    assert answers == ["y" * 50_000] * 12


def test_a_call_that_is_too_long_to_send_fails_alone(make, tmp_path, monkeypatch):
    child = make()
    monkeypatch.setattr(frames, "MAX_REQUEST", 10_000)
    assert ask(child, "a", "x" * 20_000, "b") == ["a", TOO_LONG.message, "b"]
    assert began(tmp_path) == ["a", "b"] and child._process is not None


def test_half_of_a_pipe_is_filled_and_of_the_smallest_one_where_its_size_is_unknown(monkeypatch):
    reader, writer = os.pipe()
    with open(reader, "rb"), open(writer, "wb") as pipe:
        assert _room(pipe) == fcntl.fcntl(pipe, fcntl.F_GETPIPE_SZ) // 2
        monkeypatch.delattr(fcntl, "F_GETPIPE_SZ")
        assert _room(pipe) == 8 << 10


def test_frames_are_written_together_as_far_as_there_is_room():
    packed = [b"a" * 4, b"b" * 6, b"c", b"d" * 30, b"e"]
    assert list(_portions(packed, 10)) == [packed[:2], packed[2:3], packed[3:4], packed[4:]]


def test_closing_amid_several_calls_answers_the_one_that_runs_and_leaves_the_others(make, tmp_path):
    child = make()
    ask(child, "start")
    answers: list[str] = []
    thread = threading.Thread(target=lambda: answers.extend(ask(child, "a", "hang", "b", "c")))
    thread.start()
    deadline = time.monotonic() + WAIT
    while "hang" not in began(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.01)
    child.stop()
    thread.join(WAIT)
    assert answers == ["a", "ended its process (it was stopped)"]
    assert ask(child, "b", "c") == ["the reward function was closed"]
    assert began(tmp_path) == ["start", "a", "hang"]


def test_a_process_whose_answers_cannot_be_read_is_ended_so_that_none_is_taken_for_another(make):
    child = make()
    with pytest.raises(ValueError, match="Expecting value"):
        ask(child, "junk", "a", "b")
    assert ask(child, "c", "d") == ["c", "d"]


def test_a_scorer_runs_every_call_once_though_some_end_their_process(function, tmp_path):
    scorer = Scorer(function, ScoringLimits(timeout=WAIT, num_workers=2))
    quick = [f"quick {i}" for i in range(100)]
    texts = [f"die {i}" if i in (30, 31, 77) else f"good {i}" for i in range(100)]
    scorer.score(samples(*quick))
    results = scorer.score(samples(*texts))
    scorer.close()
    assert [i for i, result in enumerate(results) if result.failure] == [30, 31, 77]
    assert {results[i].failure.kind for i in (30, 31, 77)} == {"died"}
    assert sorted(began(tmp_path)) == sorted(quick + texts)


def test_calls_that_wait_behind_16_ended_processes_in_a_row_fail_with_them(function, tmp_path):
    scorer = Scorer(function, ScoringLimits(timeout=WAIT, num_workers=1))
    results = scorer.score(samples(*(f"die {i}" for i in range(64))))
    assert began(tmp_path) == [f"die {i}" for i in range(16)]
    assert {result.failure.kind for result in results} == {"died"}
    assert "was not tried: the 16 calls before it all ended their process" in results[16].failure.message
    results = scorer.score(samples("good", *(f"die {i}" for i in range(15)), "better"))
    scorer.close()
    assert [i for i in (0, 16) if results[i].failure is None] == [0, 16], "an answer begins the count again"


def test_calls_run_two_at_a_time_even_if_calls_before_were_quick(function):
    scorer = Scorer(function, ScoringLimits(timeout=WAIT, num_workers=2))
    scorer.prepare()
    for _ in range(20):
        scorer.score(samples(*"abcdefgh"))
    results = scorer.score(samples(*(f"pair {i}" for i in range(8))))
    scorer.close()
    assert [result.failure for result in results] == [None] * 8
    assert len({result.extra["pid"] for result in results}) == 2


CALLER = """
import sys
from verl.rewards import Scorer, ScoringLimits, load_reward_function
from verl.rewards.samples import RewardSample
scorer = Scorer(load_reward_function(sys.argv[1]), ScoringLimits(timeout=600.0, isolation="process"))
scorer.score([RewardSample("a", "b", "c")])
"""
HANGS_WITH_A_PROGRAM = """
    import os, subprocess, sys, time

    def compute_score(solution_str):
        program = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"], start_new_session=True)
        print(os.getpid(), program.pid, file=sys.stderr, flush=True)
        time.sleep(600)
"""


def test_a_call_that_hangs_ends_with_its_caller_and_so_does_what_it_started(tmp_path):
    command = [sys.executable, "-c", CALLER, str(reward_file(tmp_path, HANGS_WITH_A_PROGRAM))]
    caller = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    pids = [int(word) for word in caller.stderr.readline().split()]
    assert len(pids) == 2 and all(is_there(pid) for pid in pids)
    caller.kill()
    caller.wait()
    assert ends(pids, WAIT)
