"""What every test came to, one line of JSON as it ends, so that a killed run loses nothing.

`scripts/run_tests.py` loads this plugin (``-p tests.outcomes --outcomes FILE``) and makes its table, its list of rules
broken and its ``--last-failed`` from the file. A line holds the test, its outcome, its seconds (setup and call), how
many processes it started, how many of them were ranks, its markers, and what it measured.
"""

from __future__ import annotations

import json
import multiprocessing.process
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

MARKERS = ("slow", "representative", "timed")
OWN_PROPERTIES = ("marks", "before", "after")
started = {"processes": 0, "ranks": 0}


def _count_starts() -> None:
    """Count programs by Python's own audit events, and what multiprocessing runs where it starts.

    Ranks are what a fork server starts: those of `tests/harness/ranks.py`.
    """
    start = multiprocessing.process.BaseProcess.start

    def counted(process: multiprocessing.process.BaseProcess) -> None:
        started["processes"] += 1
        started["ranks"] += getattr(process, "_start_method", None) == "forkserver"
        start(process)

    def audited(event: str, _: Any) -> None:
        started["processes"] += event == "subprocess.Popen"

    multiprocessing.process.BaseProcess.start = counted  # type: ignore[method-assign]
    sys.addaudithook(audited)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--outcomes", type=Path, help="the file that gets a line of JSON per test")
    parser.addoption("--without-passed", type=Path, help="such a file: leave out the tests that passed in it")
    parser.addoption("--again", type=Path, help="such a file: only what failed, and starts processes or is timed")


def pytest_configure(config: pytest.Config) -> None:
    _count_starts()
    if not hasattr(config, "workerinput"):  # a worker's reports reach the controller
        config.pluginmanager.register(Writer(config.getoption("--outcomes")))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    chosen = {item.nodeid for item in items}
    if file := config.getoption("--without-passed"):
        chosen -= {line["test"] for line in read(file) if line["outcome"] == "passed"}
    if file := config.getoption("--again"):
        chosen &= {line["test"] for line in read(file) if line["outcome"] == "failed" and may_run_again(line)}
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in chosen])
    items[:] = [item for item in items if item.nodeid in chosen]


def may_run_again(line: dict[str, Any]) -> bool:
    """Whether a test may fail by something else than a fault: it starts processes, or depends on a clock."""
    return bool(line["processes"]) or "timed" in line["marks"]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    item.user_properties += [("marks", [name for name in MARKERS if item.get_closest_marker(name)])]
    item.user_properties += [("before", dict(started))]
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Any:
    report = yield
    report.user_properties = [*item.user_properties, ("after", dict(started))]  # pytest-xdist sends these along
    return report


class Writer:
    """Joins the reports of a test's three parts and writes its line after the last one."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.parts: dict[str, list[pytest.TestReport]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        parts = self.parts.setdefault(report.nodeid, [])
        parts.append(report)
        if report.when == "teardown" or not report.when:
            del self.parts[report.nodeid]
            self.write(report.nodeid, parts)

    def write(self, name: str, parts: list[pytest.TestReport]) -> None:
        properties = dict(parts[-1].user_properties)
        outcomes = {part.outcome for part in parts}
        before, after = properties.get("before", {}), properties.get("after", {})  # neither, if the worker crashed
        line = {
            "test": name,
            "outcome": next(outcome for outcome in ("failed", "skipped", "passed") if outcome in outcomes),
            "seconds": round(sum(part.duration for part in parts if part.when != "teardown"), 3),
            **{kind: after.get(kind, 0) - before.get(kind, 0) for kind in started},
            "marks": properties.get("marks", []),
        }
        if measured := {name: value for name, value in properties.items() if name not in OWN_PROPERTIES}:
            line["measured"] = measured  # by `record_property`
        reasons = [part.longrepr[2] for part in parts if part.skipped and isinstance(part.longrepr, tuple)]
        if reasons and line["outcome"] == "skipped":
            line["reason"] = reasons[0].removeprefix("Skipped: ")
        with self.file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def read(file: Path) -> list[dict[str, Any]]:
    """The last line of each test; a line that a kill cut off is left out."""
    lines: dict[str, dict[str, Any]] = {}
    for text in file.read_text(encoding="utf-8").splitlines() if file.is_file() else ():
        if text.endswith("}"):
            line = json.loads(text)
            lines[line["test"]] = line
    return list(lines.values())
