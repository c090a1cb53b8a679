"""Runs that start again by themselves (``trainer.max_restarts``)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.harness.forked_runs import (
    STEPS,
    STOPPING,
    Ended,
    Run,
    Server,
    assert_no_process_left,
    assert_same_end,
    finish,
    grpo,
    ledgers,
    newest,
    prepare,
    seconds_since_kill,
    weights,
)
from tests.harness.programs import python
from tests.harness.waiting import wait_until
from verl.checkpoint import list_checkpoints
from verl.config import load_config
from verl.errors import ConfigError, DataError
from verl.journal.ledger_reader import History
from verl.metrics import notices, reset_notices
from verl.trainer import restarts
from verl.trainer.restarts import EndReport, RunAttempt, attempt_of, begin_attempts, is_last, pause_before

RESTARTED = [*grpo(), "trainer.max_restarts=2"]
KILLED_IN_STEP_4 = "backward:14:KILL"  # a step has two mini-batches and two epochs, so four backward passes


@pytest.fixture(scope="module")
def server():
    started = Server()
    yield started
    started.close()


def attempt(result=-signal.SIGKILL, first=0, last=0, stop=None, **report) -> RunAttempt:
    return attempt_of(result, report, stop, first, last, seconds=1.0)


def failed(reason: str, last: int) -> RunAttempt:
    return attempt(1, last, last, reason=reason)


def restarted(run: Run, record_property: Callable[[str, object], None]) -> Ended:
    """Waits for the end of a run that is killed once, and measures what happens between."""
    run.until_said("attempt 1 ended")
    record_property("noticed_seconds", seconds_since_kill(run.folder))
    run.until_said("continues from")
    record_property("recovered_seconds", seconds_since_kill(run.folder))
    return run.wait()


def assert_nothing_lost(undisturbed: Path, hit: Path, record_property: Callable[[str, object], None]) -> None:
    """The ledger, and so every sample, is that of a run without a kill."""
    expected, trained = (trained_samples(folder) for folder in (undisturbed, hit))
    record_property("lost", (expected - trained).total())
    record_property("doubled", (trained - expected).total())
    record_property("bits_equal", weights_equal(undisturbed, hit))
    assert_same_end(undisturbed, hit)


def trained_samples(folder: Path) -> Counter[tuple[str, int]]:
    """How often the journal of a run trains on each sample."""
    samples = History.of(newest(ledgers(folder))).samples
    return Counter((one.uid, one.sample) for one in samples if one.stage == "trained")


def weights_equal(undisturbed: Path, hit: Path) -> bool:
    one, other = (weights(folder / f"run/global_step_{STEPS}") for folder in (undisturbed, hit))
    return one.keys() == other.keys() and all(torch.equal(tensor, other[key]) for key, tensor in one.items())


def test_a_killed_run_starts_again_and_ends_with_the_same_bits(server: Server, tmp_path, record_property):
    undisturbed, hit = prepare(tmp_path / "undisturbed"), prepare(tmp_path / "hit")
    finish(server, undisturbed, grpo())
    ended = restarted(server.start(hit, RESTARTED, KILLED_IN_STEP_4), record_property)
    assert ended.status == 0, ended.output[-3000:]
    assert "attempt 1 ended, from step 0 to 3" in ended.output and "killed by SIGKILL" in ended.output
    assert "trainer.max_restarts=2: 2 attempts" in ended.output
    assert_nothing_lost(undisturbed, hit, record_property)
    assert_no_process_left(hit)


def test_a_run_that_never_gets_further_is_given_up_with_its_history(server: Server, tmp_path):
    folder = prepare(tmp_path)
    ended = server.start(folder, [*grpo(), "trainer.max_restarts=1"], "backward:1:KILL").wait()
    assert ended.status == 128 + signal.SIGKILL
    assert "trainer.max_restarts=1: 2 attempts\n  attempt 1, from step 0 to 0" in ended.output, ended.output[-2000:]
    assert "\n  attempt 2, from step 0 to 0" in ended.output
    assert_no_process_left(folder)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_to_the_process_that_waits_ends_the_run_in_order(server: Server, tmp_path, number):
    folder = prepare(tmp_path)
    run = server.start(folder, RESTARTED, "backward:6:PAUSE")
    run.until_paused()
    run.send(number)
    output = folder / "output.txt"
    wait_until(lambda: STOPPING in output.read_text(), output.read_text)
    (folder / "paused").unlink()
    ended = run.wait()
    assert ended.status == (143 if number == signal.SIGTERM else -signal.SIGKILL)
    assert_no_process_left(folder)
    assert list_checkpoints(folder / "run")[0].step == 2
    assert "attempt" not in output.read_text()


def test_a_signal_to_every_process_of_a_job_counts_once(server: Server, tmp_path):
    folder = prepare(tmp_path)
    run = server.start(folder, RESTARTED, "backward:6:PAUSE")
    os.kill(run.until_paused(), signal.SIGTERM)  # the attempt
    run.until_said(STOPPING)
    run.send(signal.SIGTERM)
    assert not run.ends_within(2 * restarts.SIGNAL_SECONDS), "a second signal would end it at once"
    (folder / "paused").unlink()
    assert run.wait().status == 143
    assert list_checkpoints(folder / "run")[0].step == 2


def test_a_signal_during_the_pause_ends_the_run(server: Server, tmp_path):
    folder = prepare(tmp_path)
    run = server.start(folder, [*grpo(), "trainer.max_restarts=9"], "backward:1:KILL")
    run.until_said("the next one begins in 4 s")
    run.send(signal.SIGTERM)
    ended = run.wait()
    assert ended.status == 143
    assert "trainer.max_restarts=9: 3 attempts" in ended.output, ended.output[-2000:]


def test_programs_of_an_ended_attempt_are_gone_before_the_next_one():
    """One that ignores SIGTERM and has a guard, which kills it some seconds later."""
    code = """
import os, subprocess, sys
from verl import lifeline
from verl.trainer.restarts import AttemptProcess
lifeline.adopt_orphans()
reader, writer = os.pipe()
pid = os.fork()
if not pid:
    ignoring = "import signal; signal.signal(15, signal.SIG_IGN); print(1, flush=True); signal.pause()"
    subprocess.Popen(lifeline.guarded([sys.executable, "-c", ignoring]), stdout=subprocess.PIPE).stdout.readline()
    os._exit(9)
attempt = AttemptProcess(pid, reader, ())
os.waitpid(pid, 0)
assert lifeline.children()
attempt.end_leftovers()
assert not lifeline.children()
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_second_attempt_imports_no_library_again(tmp_path):
    """Its imports are those of the process that waits, which has one thread and no device open."""
    code = """
import os, pathlib, sys, threading
from verl.trainer import restarts
with restarts.begin_attempts(pathlib.Path(sys.argv[1]), 1) as number:
    imported = [name in sys.modules for name in restarts.PRELOADED]
    if number == 1:
        os.kill(os.getpid(), 9)
    import torch
    print(*imported, threading.active_count(), torch.cuda.is_initialized())
"""
    done = python("-c", code, str(tmp_path), cwd=tmp_path)
    assert done.stdout == "True True True 2 False\n"  # a thread of the attempt waits for the end of its parent


@pytest.mark.slow
def test_a_lost_worker_on_ray_starts_the_run_again_with_the_same_bits(server: Server, tmp_path, record_property):
    undisturbed, hit = prepare(tmp_path / "undisturbed"), prepare(tmp_path / "hit")
    finish(server, undisturbed, grpo())
    ended = restarted(server.start(hit, [*RESTARTED, "trainer.runtime=ray"], KILLED_IN_STEP_4), record_property)
    assert ended.status == 0, ended.output[-3000:]
    assert "attempt 1 ended, from step 0 to 3" in ended.output and "WorkerError" in ended.output
    assert_nothing_lost(undisturbed, hit, record_property)


def test_errors_that_no_restart_mends_and_signals_are_final():
    assert attempt(2, reason="DataError: ...", is_permanent=True).is_final
    assert attempt(2, stop=signal.SIGTERM, reason="OSError: no space").is_final, "it failed as it saved"
    assert attempt(2, signal=int(signal.SIGTERM), reason="OSError: no space").is_final
    assert attempt(143, reason="RunStopped: 143").is_final and attempt(-signal.SIGINT).is_final
    assert attempt(0, is_complete=True).is_final
    assert not attempt(2, reason="WorkerError: ...").is_final and not attempt(-signal.SIGKILL).is_final


def test_a_run_that_exits_without_an_end_is_not_complete():
    ended = attempt(0)
    assert (ended.status, ended.is_final) == (1, False)
    assert "status 0 before it could report why" in str(ended)


def test_an_attempt_that_the_kernel_killed_for_want_of_memory_says_so(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "memory.events").write_text("low 0\nhigh 4\nmax 5\noom 3\noom_kill 2\noom_group_kill 1\n")
    groups = tmp_path / "cgroup"
    groups.write_text("1:memory:/b\n0::/a\n")
    memory = restarts.memory_events(tmp_path, groups)
    assert (memory["oom"], memory["oom_kill"]) == (3, 2) and not restarts.memory_events(tmp_path / "absent", groups)
    for oom, place in ((1, "the control group"), (0, "the machine or a group around this one")):
        ended = attempt_of(-signal.SIGKILL, {}, None, 0, 3, 1.0, {"oom": oom, "oom_kill": 2})
        assert f"SIGKILL (meanwhile the kernel killed 2 processes: {place} was out of memory)" in str(ended)
        assert not ended.is_final
    assert "meanwhile" not in str(attempt_of(-signal.SIGKILL, {}, None, 0, 3, 1.0, {"oom": 1}))


def test_an_error_that_comes_twice_at_one_checkpoint_ends_the_run():
    assert is_last([failed("a", 3), failed("a", 3)], 9)
    assert not is_last([failed("a", 3), failed("b", 3)], 9)
    assert not is_last([failed("a", 3), failed("a", 4)], 9)
    assert not is_last([attempt(), attempt()], 9), "processes are killed for reasons outside of the run"
    assert is_last([attempt(), attempt()], 1)


def test_pauses_double_while_no_checkpoint_is_made():
    barren, useful = attempt(first=2, last=2), attempt(first=2, last=3)
    assert [pause_before([useful, *[barren] * count]) for count in range(5)] == [1, 1, 2, 4, 8]
    assert pause_before([barren] * 20) == 60


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (None, '{"is_complete": true, "is_permanent": false, "reason": ""}'),
        (DataError("no rows"), '{"is_complete": false, "is_permanent": true, "reason": "DataError: no rows"}'),
        (KeyError("x"), '{"is_complete": false, "is_permanent": false, "reason": "KeyError: \'x\'"}'),
    ],
)
def test_an_attempt_reports_how_it_ended(tmp_path, error, expected):
    with open(tmp_path / "report", "wb") as file:
        EndReport(file.fileno(), 1).__exit__(error and type(error), error, None)
    assert (tmp_path / "report").read_text() == expected + "\n"


def test_a_notebook_does_not_restart(monkeypatch, tmp_path):
    monkeypatch.setattr(restarts, "in_notebook", lambda: True)
    with pytest.raises(ConfigError, match=r"trainer.max_restarts: a run restarts as a program .*Got 'a notebook'"):
        begin_attempts(tmp_path, 1)


def test_restarts_without_checkpoints_have_a_notice(tmp_path, monkeypatch):
    monkeypatch.chdir(prepare(tmp_path))
    reset_notices()
    load_config("ppo_trainer", [word for word in RESTARTED if "save_freq" not in word])
    assert "trainer.save_freq" in notices()["trainer.max_restarts"]


def test_restarts_continue_from_the_newest_checkpoint_alone():
    with pytest.raises(ConfigError, match=r"trainer.resume_mode: .*continues from its newest checkpoint"):
        load_config("ppo_trainer", [*RESTARTED, "trainer.resume_mode=disable"])
