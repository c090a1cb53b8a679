"""Bars and seconds of work that takes more than a moment, shown only where a person watches a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")


def track(items: Iterable[T], description: str, total: int | None = None) -> Iterator[T]:
    """The items one by one, with a bar on standard error if that is a terminal."""
    if not sys.stderr.isatty():
        yield from items
        return
    from rich.console import Console
    from rich.progress import track as bar

    yield from bar(items, description, total=total, console=Console(stderr=True), transient=True)


@contextmanager
def timed(work: str) -> Iterator[None]:
    """Lines on standard error when the work begins and when it is done, with its seconds; nothing there moves."""
    began = time.monotonic()
    if sys.stderr.isatty():
        print(f"{work} ...", file=sys.stderr, flush=True)
    yield
    if sys.stderr.isatty():
        print(f"{work}: {time.monotonic() - began:.1f} s", file=sys.stderr, flush=True)
