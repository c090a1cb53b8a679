"""These tests talk to the real wandb, mlflow and swanlab, offline; they are collected where all are installed
(``make test-trackers`` sets up such an environment)."""

from __future__ import annotations

import importlib.util

MISSING = [name for name in ("mlflow", "swanlab", "wandb") if importlib.util.find_spec(name) is None]
collect_ignore_glob = ["test_*.py"] if MISSING else []


def pytest_report_header() -> str:
    return f"trackers: not collected, {' and '.join(MISSING)} not installed" if MISSING else "trackers: collected"
