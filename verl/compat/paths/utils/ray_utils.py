"""The event loop of a thread, under upstream's path."""

import asyncio
import functools
from collections.abc import Callable
from typing import Any


def auto_await(func: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator: outside of an event loop the result of an async function, inside what is awaited."""

    @functools.wraps(func)
    def call(*args: Any, **kwargs: Any) -> Any:
        made = func(*args, **kwargs)
        if not asyncio.iscoroutine(made):
            return made
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return asyncio.run(made)
        return made

    return call


def get_event_loop() -> asyncio.AbstractEventLoop:
    """The running one, or one that is made and set for this thread."""
    try:
        return asyncio.get_event_loop_policy().get_event_loop()
    except RuntimeError:
        loop = asyncio.new_event_loop()
        asyncio.set_event_loop(loop)
        return loop
