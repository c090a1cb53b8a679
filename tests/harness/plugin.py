"""Tests that are coroutines, which pytest does not run by itself, and those that may be repeated."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from typing import Any

import pytest

HANGS = 600.0
"""Seconds after which a test is taken to hang."""


def within(seconds: float) -> Callable[[Any], Any]:
    """Gives a test that is a coroutine this many seconds; where something may hang, few are enough."""

    def set_limit(test: Any) -> Any:
        test.seconds = seconds
        return test

    return set_limit


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What runs in an event loop depends on a clock."""
    for item in items:
        if inspect.iscoroutinefunction(getattr(item, "obj", None)):
            item.add_marker("timed")


def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run it in a new event loop."""
    test = pyfuncitem.obj
    if not inspect.iscoroutinefunction(test):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in inspect.signature(test).parameters}
    asyncio.run(asyncio.wait_for(test(**arguments), getattr(test, "seconds", HANGS)))
    return True
