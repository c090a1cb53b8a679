"""One warmed-up arithmetic model for all learning tests."""

from __future__ import annotations

import pytest

from tests.harness.arithmetic import Arithmetic, warmed_up


@pytest.fixture(scope="session")
def arithmetic(tmp_path_factory: pytest.TempPathFactory) -> Arithmetic:
    return warmed_up(tmp_path_factory.mktemp("arithmetic"))
