"""The event loop of a thread, under upstream's path."""

import asyncio


def get_event_loop() -> asyncio.AbstractEventLoop:
    """The running one, or one that is made and set for this thread."""
    try:
        return asyncio.get_event_loop_policy().get_event_loop()
    except RuntimeError:
        loop = asyncio.new_event_loop()
        asyncio.set_event_loop(loop)
        return loop
