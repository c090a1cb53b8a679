"""A run in which nothing happens any more ends, and says who waits for whom."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from tests.harness.programs import python
from verl import stacks
from verl.errors import WorkerError
from verl.journal.spans import Activity, Span, Spans, now
from verl.trainer.watchdog import Watchdog, hanging_threads

SLEEPER = (
    "from verl import stacks\nstacks.listen('a sleeper')\ndef waits():\n    print('up', flush=True)\n    input()\n"
)
LIAR = """if True:
    import os, signal
    file = os.memfd_create("verl-stacks:\\x1b[2J the controller\\n" + "long" * 50)
    signal.signal(signal.SIGRTMIN + 7, lambda *_: os.ftruncate(file, os.fstat(file).st_size + (1 << 22)))
    print("up", flush=True)
    while True:
        signal.pause()
"""


def threads_of_this_process() -> set[str]:
    return {thread.name for thread in threading.enumerate()}


def test_a_wait_in_the_main_thread_is_left_with_an_error_and_a_report_of_all_processes(tmp_path, record_property):
    """The other process is one of ours that a signal has stopped: it has no stacks to show, and is at fault."""
    with subprocess.Popen(
        [sys.executable, "-c", SLEEPER + "waits()"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout.readline() == "up\n"
        assert "in waits" in stacks.stacks_of(other.pid) and stacks.name_of(other.pid) == "a sleeper"
        other.send_signal(signal.SIGSTOP)
        spans, begun = Spans(), time.monotonic()
        with pytest.raises(WorkerError) as raised, Watchdog(spans, 0.4, tmp_path, list), spans.span("reward", 3):
            try:
                threading.Event().wait(60)
            except Exception as error:  # a reward function's own handler does not take it
                raise AssertionError from error
        noticed = time.monotonic() - begun
        record_property("noticed_seconds", noticed)
        assert 0.3 < noticed < 30
        other.kill()
    said = str(raised.value)
    assert said.startswith("trainer.hang_seconds: nothing has happened for ")
    culprit = f"a sleeper (process {other.pid}, stopped by a signal)"
    assert f"MainThread is in stage reward of step 3 (scoring) and waits for {culprit}. Got 0.4." in said
    report = (tmp_path / "hang.txt").read_text()
    assert f"the controller (process {os.getpid()}, " in report and "in wait" in report
    assert f"{culprit}\n(no stack" in report
    assert "verl-watchdog" not in threads_of_this_process(), "its thread ends with the run"


def test_a_mini_batch_is_progress_and_without_a_limit_nobody_watches(tmp_path):
    spans = Spans()
    with Watchdog(spans, None, tmp_path, list), spans.span("update_actor", 1):
        assert "verl-watchdog" not in threads_of_this_process()
        (began,) = spans.open()
        time.sleep(0.01)
        assert hanging_threads(spans.open(), 0.005)
        spans.progress()
        assert spans.open()[0].progress >= began.progress + 0.01


@pytest.fixture
def sampler():
    """A process that draws tokens all the time."""
    code = "from verl import stacks; import time; stacks.listen('the sampler'); stacks.mark(); print('up', flush=True)"
    code += "\nwhile True: stacks.mark(); time.sleep(0.01)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == "up\n"
            yield process
        finally:
            process.kill()


def test_tokens_that_a_sampler_draws_are_progress_of_those_who_wait_for_samples_alone(sampler, tmp_path):
    spans, looks = Spans(), lambda: stacks.look_at([sampler.pid])
    with (
        pytest.raises(WorkerError, match="stage reward"),
        Watchdog(spans, 0.5, tmp_path, looks),
        spans.span("reward", 1),
    ):
        threading.Event().wait(60)
    went_on = False
    ends = pytest.raises(WorkerError, match=r"stage gen .* stopped by a signal")
    with ends, Watchdog(spans, 0.5, tmp_path, looks), spans.span("gen", 1):
        threading.Event().wait(1.2)
        went_on = True
        sampler.send_signal(signal.SIGSTOP)
        threading.Event().wait(60)
    assert went_on


def test_a_thread_that_waits_for_another_one_is_at_fault_only_if_the_other_one_goes_on_with_nothing():
    def thread(ident: int, stage: str, seconds: float) -> Activity:
        return Activity(ident, [Span("step", 1, "", 0.0), Span(stage, 1, "", 0.0)], now() - seconds)

    waits, samples = thread(1, "wait_for_batch", 90), thread(2, "gen", 70)
    assert hanging_threads([waits, samples], 60) == [samples]
    assert hanging_threads([waits, thread(2, "gen", 50)], 60) == [], "the samples may be there soon"
    assert hanging_threads([waits], 60) == [waits]
    assert hanging_threads([], 60) == []


def test_a_process_that_does_not_listen_is_never_sent_the_signal():
    with subprocess.Popen(["sleep", "60"]) as other:
        try:
            assert stacks.stacks_of(other.pid) == "" and other.poll() is None
            assert stacks.state_of(other.pid) in ("S", "R", "D"), "alive and not stopped; D while it is being loaded"
        finally:
            other.kill()
    assert stacks.state_of(other.pid) == ""


def test_a_run_that_does_not_hear_of_it_is_ended_after_a_while(tmp_path):
    """As in native code that holds the interpreter: the signal never reaches the main thread."""
    code = """if True:
        import signal, sys, time
        from pathlib import Path
        from verl.journal.spans import Spans
        from verl.trainer import watchdog
        watchdog.GRACE_SECONDS = 0.2
        signal.pthread_sigmask(signal.SIG_BLOCK, {watchdog.SIGNAL})
        spans = Spans()
        with watchdog.Watchdog(spans, 0.2, Path(sys.argv[1]), list), spans.span("gen", 1):
            time.sleep(600)
    """
    ended = python("-c", code, str(tmp_path), check=False, timeout=300)
    assert ended.returncode == 2
    assert ended.stderr.count("trainer.hang_seconds: nothing has happened for") == 1
    assert "It had to be killed; finished checkpoints are untouched" in ended.stderr


def test_a_program_that_poses_as_one_of_ours_neither_fills_the_memory_nor_reaches_the_terminal(tmp_path):
    with subprocess.Popen([sys.executable, "-c", LIAR], stdout=subprocess.PIPE, text=True) as other:
        try:
            assert other.stdout.readline() == "up\n"
            name = stacks.name_of(other.pid)
            assert len(name) == stacks.LONGEST_NAME and "\n" not in name
            assert len(stacks.stacks_of(other.pid)) == stacks.MOST_BYTES
            spans = Spans()
            with pytest.raises(WorkerError), Watchdog(spans, 0.2, tmp_path, list), spans.span("gen", 1):
                threading.Event().wait(60)
        finally:
            other.kill()
    assert "\\x1b[2J the controller" in (tmp_path / "hang.txt").read_text()


def test_a_run_ends_even_if_its_processes_cannot_be_looked_at(tmp_path):
    def broken():
        raise RuntimeError("the cluster is gone")

    spans = Spans()
    with (
        pytest.raises(
            WorkerError, match=r"in stage gen of step 4\. Who hangs could not be seen: RuntimeError: the clus"
        ),
        Watchdog(spans, 0.2, tmp_path, broken),
        spans.span("gen", 4),
    ):
        threading.Event().wait(20)
        raise AssertionError("nobody ended it")
