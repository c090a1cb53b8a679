"""One server of runs, and one uninterrupted run to compare with."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.forked_runs import Server, finish, grpo, prepare


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    started = Server()
    yield started
    started.close()


@pytest.fixture(scope="session")
def whole(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing disturbed."""
    folder = prepare(tmp_path_factory.mktemp("whole"))
    finish(server, folder, grpo())
    return folder
