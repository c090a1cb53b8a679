"""Reads init's answers: from what the kernel says of a process to a status and a sentence.

The report is the program's own word and is taken as hostile text: it can hold a returned value, which is compared with
what is expected like anything that was printed, and the hint that an exception was a MemoryError.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping
from typing import Any

from verl.json_text import read_json
from verl.sandbox.limits import CallCase, Limits, StdinCase
from verl.sandbox.outcome import Outcome, Status, exit_detail

_CPU_SLACK = 0.9


def to_outcome(answer: Mapping[str, Any], limits: Limits, case: StdinCase | CallCase | None = None) -> Outcome:
    """The outcome of one case, or of a cell (``case`` None)."""
    reports = _reports(answer["report"])
    status, detail = _status(answer, limits, reports)
    value = None
    if status == "ok" and isinstance(case, CallCase):
        values = [report["value"] for report in reports if "value" in report]
        try:
            value = read_json(values[-1])
        except (IndexError, TypeError, ValueError):
            status, detail = "error", f"the program ended before {case.function} returned"
    return Outcome(
        status=status,
        stdout=answer["stdout"],
        stderr=answer["stderr"],
        exit_code=answer["exit_code"],
        signal=answer["signal"],
        seconds=float(answer["seconds"]),
        cpu_seconds=float(answer["cpu_seconds"]),
        value=value,
        detail=detail,
    )


def _status(answer: Mapping[str, Any], limits: Limits, reports: list[dict[str, Any]]) -> tuple[Status, str]:
    reason, number, code = answer["reason"], answer["signal"], answer["exit_code"]
    too_slow = f"stopped after its {limits.seconds:g} s"
    if reason == "timeout":
        return "timeout", too_slow
    if reason == "memory":
        return "memory", f"stopped because it used more than {limits.memory_mb} MB of memory"
    if reason == "processes":
        return "error", f"stopped because it started more than {limits.processes} processes"
    if reason == "output":
        return "output", f"stopped because it wrote more than {limits.output_kb} KB"
    if number is not None:
        if number == signal.SIGXCPU or answer["cpu_seconds"] > _CPU_SLACK * (limits.seconds + 1):
            return "timeout", too_slow
        return "crash", f"killed by {_name(number)}"
    if code == 0:
        return "ok", ""
    if any(report.get("memory") is True for report in reports):
        return "memory", f"it ran out of its {limits.memory_mb} MB of memory"
    return "error", exit_detail(code)


def _reports(text: str) -> list[dict[str, Any]]:
    """The lines of the report that are objects."""
    reports = []
    for line in text.splitlines():
        try:
            message = read_json(line)
        except ValueError:
            continue
        if isinstance(message, dict):
            reports.append(message)
    return reports


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
