"""Notices are told once per process; every test here starts with none told."""

import pytest

from verl import metrics


@pytest.fixture(autouse=True)
def told():
    metrics.reset_notices()
    yield metrics.notices
    metrics.reset_notices()
