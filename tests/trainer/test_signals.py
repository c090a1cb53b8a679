"""Where in Python a signal comes: the step is dropped, and nothing else is said of it."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
import weakref

import psutil
import pytest

from verl.trainer.signals import StepDropped, StopSignals, kill_descendants


@pytest.fixture
def unraisable(monkeypatch):
    """What Python reports of finalizers."""
    reported: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda found: reported.append(found.exc_value))
    return reported


class Hit:
    """Gets the signal when it goes."""

    def __del__(self):
        os.kill(os.getpid(), signal.SIGTERM)
        sum(range(100))


async def hit_in_a_task(kept: list[asyncio.Task[None]]) -> None:
    async def inner() -> None:
        await asyncio.sleep(0)
        os.kill(os.getpid(), signal.SIGTERM)
        sum(range(100))

    kept.append(asyncio.ensure_future(inner()))
    await asyncio.sleep(60)


def test_a_step_that_is_dropped_in_a_task_of_a_loop_is_not_reported_again_when_the_task_goes(caplog, capfd):
    kept: list[asyncio.Task[None]] = []
    with StopSignals() as stop, pytest.raises(StepDropped), stop.droppable():
        asyncio.run(hit_in_a_task(kept))
    task = weakref.ref(kept[0])
    assert isinstance(kept[0]._exception, StepDropped)  # looking at it in the official way would count as retrieved
    kept.clear()
    gc.collect()
    assert task() is None
    assert [record for record in caplog.records if record.name == "asyncio"] == []
    assert "StepDropped" not in capfd.readouterr().err


def test_other_errors_of_tasks_are_still_reported(caplog):
    async def fail() -> None:
        raise ValueError("lost")

    async def forget() -> None:
        task = asyncio.ensure_future(fail())
        await asyncio.sleep(0)
        del task

    with StopSignals():
        asyncio.run(forget())
        gc.collect()
    (record,) = [record for record in caplog.records if record.name == "asyncio"]
    assert "never retrieved" in record.getMessage()


def test_a_step_that_is_dropped_in_a_finalizer_is_dropped_at_the_end_of_the_block(unraisable):
    reached = []
    with StopSignals() as stop, pytest.raises(StepDropped), stop.droppable():
        Hit()
        reached.append("the end")
    assert reached == ["the end"] and unraisable == []


@pytest.mark.parametrize("error", [psutil.AccessDenied(1), OSError("too many open files")])
def test_processes_that_cannot_be_listed_keep_nobody_from_leaving(monkeypatch, error):
    def refuse(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(psutil.Process, "children", refuse)
    kill_descendants()
