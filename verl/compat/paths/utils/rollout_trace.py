"""Upstream's marks for traces of a rollout.

Here a conversation's record (its turns, tool calls and rewards) is a column of the dump (``trainer.rollout_data_dir``).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def rollout_trace_op(func: Any) -> Any:
    """Decorator: the function as it is."""
    return func


@contextmanager
def rollout_trace_attr(*args: Any, **kwargs: Any) -> Iterator[None]:
    """What runs inside belongs to one sample; its dump says which."""
    yield
