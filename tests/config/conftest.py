"""What was said once per process, and the machine of these tests."""

import pytest

from verl import metrics
from verl.config.machine import host


@pytest.fixture(autouse=True)
def told():
    return metrics.notices


@pytest.fixture(autouse=True)
def engines(monkeypatch):
    """The machine of these tests has the rollout engines, whatever this environment has."""
    monkeypatch.setattr(host, "is_installed", lambda package: True)
