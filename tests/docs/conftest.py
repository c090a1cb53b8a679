"""The quickstart's model, which many pages continue from, is trained once per process."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.docs.printed import bash, block


@pytest.fixture(scope="session")
def quickstart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the page of the quickstart makes up to its fine-tuned model; it is not to be written to."""
    folder = tmp_path_factory.mktemp("quickstart")
    script = block("docs/start/quickstart.md", "python examples/data_preprocess/arithmetic.py")
    before, run, _ = script.partition("python -m verl.trainer.main_ppo")
    assert run, "the block ends with a run of its rewards"
    bash(folder, before)
    return folder


@pytest.fixture(scope="module")
def fine_tuned(quickstart: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of it for the tests of a file."""
    folder = tmp_path_factory.mktemp("fine_tuned")
    shutil.copytree(quickstart, folder, symlinks=True, dirs_exist_ok=True)
    return folder
