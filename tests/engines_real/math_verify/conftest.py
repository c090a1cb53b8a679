"""These tests ask the real math-verify; they are collected where it is installed (``make test-trackers`` has it)."""

from __future__ import annotations

import importlib.util

MISSING = importlib.util.find_spec("math_verify") is None
collect_ignore_glob = ["test_*.py"] if MISSING else []


def pytest_report_header() -> str:
    return f"math-verify: {'not collected, it is not installed' if MISSING else 'collected'}"
