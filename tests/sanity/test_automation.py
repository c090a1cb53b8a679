"""The project's automation calls the targets of the Makefile, on the Pythons that the package supports."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml

from tests.conftest import REPRESENTATIVES
from tests.sanity.source_tree import ROOT, read_toml

WORKFLOWS = {path.stem: path for path in (ROOT / ".github" / "workflows").glob("*.yml")}


def jobs(name: str) -> dict[str, Any]:
    return yaml.safe_load(WORKFLOWS[name].read_text(encoding="utf-8"))["jobs"]


def commands(name: str) -> set[str]:
    return {step["run"] for job in jobs(name).values() for step in job["steps"] if "run" in step}


def test_a_push_is_linted_and_tested_and_each_night_everything_is():
    assert commands("commit") == {"make lint", "make test"}
    assert commands("everything") == {"make test-all"}


def test_the_oldest_and_the_newest_python_that_is_supported_are_tested():
    oldest = read_toml(ROOT / "pyproject.toml")["project"]["requires-python"].removeprefix(">=")
    tested = jobs("commit")["test"]["strategy"]["matrix"]["python"]
    assert tested[0] == oldest and len(tested) == 2
    newest = re.findall(
        r"Python (3\.\d+) to (3\.\d+)", (ROOT / "docs" / "start" / "install.md").read_text(encoding="utf-8")
    )
    assert newest == [tuple(tested)]


def test_the_hooks_before_a_commit_are_the_targets_that_format_and_lint():
    settings = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))
    assert [hook["entry"] for repo in settings["repos"] for hook in repo["hooks"]] == ["make format", "make lint"]


@pytest.mark.parametrize("target", ["lint", "format", "test", "test-all"])
def test_every_target_that_automation_calls_is_one_of_the_makefile(target: str):
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)


def test_continuous_integration_lints_and_runs_the_command_that_the_readme_shows():
    called = re.findall(r"^make ([a-z-]+) ", (ROOT / ".ci" / "run").read_text(encoding="utf-8"), re.MULTILINE)
    assert {"lint", "test"} <= set(called)


def test_each_representative_names_a_test_file_and_what_it_represents():
    for name, meaning in REPRESENTATIVES.items():
        file, _, test = name.partition("::")
        assert f"def {test.partition('[')[0]}(" in (ROOT / file).read_text(encoding="utf-8"), name
        assert len(meaning.split()) >= 3, f"{name}: say what it represents"
