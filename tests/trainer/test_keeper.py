"""The keeper of replicas that may be lost, with small processes in the place of samplers."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.trainer.test_replicas import OWN_POOL, configured
from verl import stacks
from verl.errors import WorkerError
from verl.metrics import notices, reset_notices
from verl.rollout.reports import ReplicaState, ServiceState
from verl.trainer.keeper import ReplicaKeeper
from verl.workers.sending import SyncResult

LIMIT = 1.5


class Clock:
    """Seconds that pass only where a test says so, but for an instant per look at it."""

    def __init__(self):
        self.seconds = time.monotonic()

    def monotonic(self):
        self.seconds += 1e-6
        return self.seconds


class Sleeper:
    """A unit of one process, which answers as long as it runs."""

    def __init__(self, name: str, fails: str = ""):
        self.name, self.fails = name, fails
        self.process = subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE)
        self.members = [SimpleNamespace(pid=self.process.pid, address="here")]
        self.handle = SimpleNamespace(name=name, call=self._call)

    async def _call(self, method):
        while stacks.state_of(self.process.pid) not in ("R", "S"):
            await asyncio.sleep(0.01)
        return 0

    async def call_all(self, method):
        if self.fails:
            raise ValueError(self.fails)

    @property
    def death(self):
        return "" if self.process.poll() is None else f"{self.name} died"

    def look_at(self):
        return stacks.look_at([self.process.pid])

    def close(self):
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()


class Service:
    """What the keeper asks of the sampling service; every replica has a request."""

    def __init__(self):
        self.names, self.discarded, self.given_up = {}, [], ""

    async def call(self, method, *args):
        await asyncio.sleep(0)
        return getattr(self, method.__name__)(*args)

    def look(self):
        states = {name: ReplicaState((f"request of {name}",)) for name in self.names}
        return ServiceState(states, tuple(("row", 0, 0) for _ in self.names))

    def add(self, name, sampler):
        self.names[name] = sampler

    def discard(self, name):
        self.names.pop(name, None)
        self.discarded.append(name)

    def give_up(self, reason):
        self.given_up = reason


class Run:
    """A keeper with everything around it."""

    def __init__(self, folder: Path, allowed: int, *changes: str):
        config = configured(
            *OWN_POOL, f"actor_rollout_ref.rollout.max_replacements={allowed}", f"trainer.hang_seconds={LIMIT}",
            f"trainer.default_local_dir={folder}", *changes,
        )  # fmt: skip
        self.service, self.changes, self.units, self.fails = Service(), [], {}, ""
        actors = SimpleNamespace(addresses=["here", "here"], change_feeds=self._change)
        rollout = SimpleNamespace(handle=lambda rank: self.service)
        pool = SimpleNamespace(world_size=2, max_colocate_count=1, slots=lambda *_: ["slot"] * 2)
        self.keeper = ReplicaKeeper(config, None, {"actor": actors, "rollout": rollout}, pool, "cpu")
        self.keeper._start = self._start
        self.folder, self.stops = folder, False

    def _change(self, changes):
        self.changes.append(changes)
        for name in changes[0].catch_up if self.stops else ():
            self.stops = False
            os.kill(self.units[name].process.pid, signal.SIGSTOP)
            self.units[name].process.wait()  # as a trainer, whose stream ends with the other process
            return [SyncResult(0.0, {name: WorkerError("the trainer's stream broke")})]
        return [SyncResult()]

    def _start(self, name, slots):
        self.units[name] = Sleeper(name, self.fails)
        return self.units[name]

    def __enter__(self):
        reset_notices()
        self.keeper.start()
        self.service.names = dict(self.keeper.handles)
        self.moved = []
        self.keeper.watch(self.moved.extend)
        return self

    def __exit__(self, *_):
        self.keeper.close()
        for unit in self.units.values():
            unit.close()
        reset_notices()

    def until(self, condition):
        end = time.monotonic() + 30
        while not condition():
            assert time.monotonic() < end, (self.service.names, notices())
            time.sleep(0.01)

    def until_answers(self, replica, count):
        for _ in range(count):
            before = replica.last_heartbeat
            self.until(lambda before=before: replica.last_heartbeat > before)


@pytest.fixture
def in_run(monkeypatch, tmp_path):
    monkeypatch.setattr("verl.config.rules.validate.validate", lambda cfg, served=False: None)
    monkeypatch.setattr("verl.trainer.keeper.LOOK_SECONDS", 0.02)
    return lambda *arguments: Run(tmp_path, *arguments)


def test_one_that_dies_and_one_that_is_stopped_are_replaced_and_fed_before_they_serve(in_run, record_property):
    with in_run(2) as run:
        os.kill(run.units["replica 0"].process.pid, signal.SIGKILL)
        os.kill(run.units["replica 1"].process.pid, signal.SIGSTOP)
        stopped = time.monotonic()
        run.until(lambda: "replica 1" in run.service.discarded)
        record_property("noticed_seconds", time.monotonic() - stopped)
        run.until(
            lambda: (
                set(run.service.names) == {"replica 2", "replica 3"}
                and run.keeper.metrics()["rollout/replicas/alive"] == 2
            )
        )
        record_property("recovered_seconds", time.monotonic() - stopped)
        assert run.service.discarded == ["replica 0", "replica 1"] and not run.keeper.is_mending
        assert {r: [list(change[r].join) for change in run.changes] for r in (0, 1)} == {
            0: [["replica 2"], []], 1: [[], ["replica 3"]],
        }, "each is fed by the rank that fed the one before"  # fmt: skip
        assert [list(change[0].catch_up) for change in run.changes] == [["replica 2"], ["replica 3"]]
        assert [change[1].leave for change in run.changes] == [("replica 0",), ("replica 1",)]
        hung = notices()["rollout, replica 1, replaced"]
        assert (
            f"(process {run.units['replica 1'].process.pid} on node here, stopped by a signal) has not answered for"
            in hung
        )
        assert "It has 1 requests, of which 0 tokens are known" in hung
        assert run.keeper.metrics()["rollout/replicas/replaced"] == 2 and run.moved


@pytest.mark.parametrize("seconds", [59, 61])
def test_one_that_is_stopped_is_replaced_after_the_limit_and_not_before(in_run, monkeypatch, seconds):
    clock = Clock()
    monkeypatch.setattr("verl.trainer.keeper.time", clock)
    with in_run(2, "trainer.hang_seconds=60") as run:
        (other, stopped), process = run.keeper._replicas, run.units["replica 1"].process
        os.kill(process.pid, signal.SIGSTOP)
        run.until_answers(other, 3)  # a question from before the stop has its answer by then
        clock.seconds += seconds - 2
        run.until_answers(other, 3)
        assert run.service.discarded == []
        clock.seconds += 2
        if seconds > 60:
            run.until(lambda: run.service.discarded)
            assert run.service.discarded == ["replica 1"]
            return
        run.until_answers(other, 3)
        os.kill(process.pid, signal.SIGCONT)
        run.until_answers(stopped, 1)
        assert run.service.discarded == [] and run.keeper.replaced == 0
        assert set(run.service.names) == {"replica 0", "replica 1"}


def test_a_replacement_that_does_not_start_is_one_of_those_that_are_allowed_and_the_last_error_ends_the_run(in_run):
    with in_run(2) as run:
        run.fails = "out of memory"
        os.kill(run.units["replica 0"].process.pid, signal.SIGKILL)
        run.until(lambda: run.service.given_up)
        assert run.service.given_up == (
            "actor_rollout_ref.rollout.max_replacements: replica 0 was lost, and 2 of 2 replacements were made in this "
            "run. Its last error: its replacement did not start: ValueError: out of memory"
        )
        run.until(lambda: run.keeper._thread is None or not run.keeper._thread.is_alive())
        assert len(run.units) == 4 and all(run.units[f"replica {n}"].process.poll() == -9 for n in (0, 2, 3))
    assert list(run.folder.iterdir()) == []


def test_a_replacement_that_is_stopped_while_it_takes_weights_is_named_and_the_next_one_serves(in_run):
    """Nobody but the keeper knows of it so far, and the trainer waits for it."""
    with in_run(2) as run:
        run.stops = True
        os.kill(run.units["replica 0"].process.pid, signal.SIGKILL)
        run.until(lambda: set(run.service.names) == {"replica 1", "replica 3"})
        hung = run.units["replica 2"].process
        said = notices()["rollout, replica 0, replacement 1 failed"]
        assert "replacement 2 of 2 starts: its replacement did not start: WorkerError: hangs: " in said
        assert f"(process {hung.pid} on node here, stopped by a signal) has not answered for" in said
        assert hung.poll() == -signal.SIGKILL and run.keeper.metrics()["rollout/replicas/alive"] == 2
        assert run.changes[-1][0].leave == ("replica 2",), "the trainer sends it nothing more"


def test_one_that_an_update_holds_because_another_one_is_stopped_is_not_taken_for_the_culprit(in_run):
    """It answers and has requests, and computes nothing as long as the other one does not take its weights."""
    with in_run(2) as run:
        os.kill(run.units["replica 1"].process.pid, signal.SIGSTOP)
        end = time.monotonic() + 30
        while not run.service.discarded:
            assert time.monotonic() < end
            time.sleep(0.01)
        run.until(lambda: set(run.service.names) == {"replica 0", "replica 2"})
        assert run.service.discarded == ["replica 1"] and run.keeper.replaced == 1


def test_close_waits_for_a_replacement_that_is_being_started(in_run):
    """Its thread would otherwise call Ray after the cluster is gone."""
    begun, may_end = threading.Event(), threading.Event()
    with in_run(1) as run:
        start = run._start

        def slow(name, slots):
            begun.set()
            may_end.wait(30)
            return start(name, slots)

        run.keeper._start = slow
        os.kill(run.units["replica 0"].process.pid, signal.SIGKILL)
        assert begun.wait(30)
        closing = threading.Thread(target=run.keeper.close)
        closing.start()
        run.until(run.keeper._looking.done)
        assert closing.is_alive() and "replica 2" not in run.units
        may_end.set()
        closing.join(30)
        assert not closing.is_alive() and "replica 2" in run.units
    assert list(run.folder.iterdir()) == []
