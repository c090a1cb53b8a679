"""A folder in which `tests.harness.runs.train` finds what it needs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.runs import prepare


@pytest.fixture
def here(workplace: Path) -> Path:
    """Of a test, which is in it."""
    prepare()
    return workplace


@pytest.fixture(scope="module")
def shared_here(shared_workplace: Path) -> Path:
    """Of all tests of a module."""
    prepare()
    return shared_workplace
