"""No test file lies where pytest does not look, and each that tests/conftest.py sorts is there."""

from __future__ import annotations

import fnmatch
from pathlib import Path

from tests.conftest import ALONE, ONE_WORKER, WAITING
from tests.sanity.source_tree import read_toml


def test_no_folder_with_tests_is_passed_over(project_root: Path):
    settings = read_toml(project_root / "pyproject.toml")["tool"]["pytest"]["ini_options"]
    assert "norecursedirs" in settings, "pytest's own list holds 'dist' and 'build'"
    folders = {file.parent.relative_to(project_root) for file in (project_root / "tests").rglob("test_*.py")}
    passed = [
        str(folder)
        for folder in sorted(folders)
        if any(fnmatch.fnmatch(part, pattern) for part in folder.parts for pattern in settings["norecursedirs"])
    ]
    assert Path("tests/dist") in folders and not passed


def test_what_waits_or_runs_alone_or_in_one_worker_is_there(project_root: Path):
    tests = project_root / "tests"
    files = {str(file.relative_to(tests)) for file in tests.rglob("test_*.py")}
    named = [*WAITING, *ALONE, *(start for starts in ONE_WORKER.values() for start in starts)]
    assert [start for start in named if not any(file.startswith(start) for file in files)] == []
