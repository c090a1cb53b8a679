"""Notices are told once per process; every test here starts with none told."""

import pytest

from verl import metrics
from verl.config import machine


@pytest.fixture(autouse=True)
def told():
    metrics.reset_notices()
    yield metrics.notices
    metrics.reset_notices()


@pytest.fixture(autouse=True)
def engines(monkeypatch):
    """The machine of these tests has the rollout engines, whatever this environment has."""
    monkeypatch.setattr(machine, "is_installed", lambda package: True)
