"""A task that a tiny model learns in seconds: answers of lower-case letters."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.models import tiny_model_dir
from tests.harness.rows import write_prompts

SCORER = """def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return sum(c.islower() for c in solution_str) / max(len(solution_str), 1)
"""


@pytest.fixture
def lower_case_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with ``model``, ``train.jsonl`` and ``scorer.py``; logs go to ``logs``."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("VERL_FILE_LOGGER_ROOT", str(tmp_path / "logs"))
    tiny_model_dir("model", hidden=16, heads=2, kv_heads=1, layers=1)
    write_prompts(Path("train.jsonl"), 16)
    Path("scorer.py").write_text(SCORER)
    return tmp_path
