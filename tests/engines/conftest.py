"""One process group for all tests of sharded engines in this process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from verl import distributed


@pytest.fixture(scope="session")
def group() -> Iterator[None]:
    """A group of one rank. It is left only once: torch remembers the mesh of a group that is gone under its name."""
    distributed.start()
    yield
    distributed.stop()
