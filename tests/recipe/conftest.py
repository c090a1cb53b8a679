"""A task that a tiny model learns in seconds: answers of lower-case letters."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.models import tiny_model_dir
from tests.harness.rows import write_prompts
from tests.harness.scorers import scorer

SCORER = scorer("sum(c.islower() for c in solution_str) / max(len(solution_str), 1)")


@pytest.fixture
def lower_case_task(workplace: Path) -> Path:
    """The current folder, with ``model``, ``train.jsonl`` and ``scorer.py``; logs go to ``logs``."""
    tiny_model_dir("model", hidden=16, heads=2, kv_heads=1, layers=1)
    write_prompts(Path("train.jsonl"), 16)
    Path("scorer.py").write_text(SCORER)
    return workplace
