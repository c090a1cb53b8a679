"""The linter, the formatter and the type checker have nothing to say."""

from __future__ import annotations

import pytest

from tests.harness.programs import python
from tests.sanity.source_tree import ROOT


@pytest.mark.parametrize(
    "command",
    [["ruff", "check", "."], ["ruff", "format", "--check", "."], pytest.param(["mypy"], marks=pytest.mark.slow)],
    ids=["ruff-check", "ruff-format", "mypy"],
)
def test_tool_is_content(command):
    python("-m", *command, cwd=ROOT)
