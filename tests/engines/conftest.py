"""A process group for the tests of sharded engines in this process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from verl import distributed


@pytest.fixture(scope="module")
def group() -> Iterator[None]:
    """A group of one rank; the next module starts another one."""
    distributed.join_group()
    yield
    distributed.leave_group()
