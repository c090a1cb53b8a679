"""The notebook's cells run one after the other, from the root of the checkout, and leave a trained model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.harness.programs import python

NOTEBOOK = "examples/ppo_trainer/verl_getting_started.ipynb"


def cells(root: Path, kind: str) -> list[str]:
    """The text of every cell of one kind."""
    page = json.loads((root / NOTEBOOK).read_text(encoding="utf-8"))
    return ["".join(cell["source"]) for cell in page["cells"] if cell["cell_type"] == kind]


def test_the_notebook_is_committed_without_outputs_and_has_no_magic_commands(project_root):
    page = json.loads((project_root / NOTEBOOK).read_text(encoding="utf-8"))
    code = [cell for cell in page["cells"] if cell["cell_type"] == "code"]
    assert page["nbformat"] == 4 and code
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)
    assert not [line for cell in code for line in cell["source"] if line.lstrip().startswith(("!", "%"))]


@pytest.mark.slow
def test_the_notebook_runs_from_its_first_to_its_last_cell(project_root, tmp_path):
    for folder in ("quickstart", "data_preprocess"):
        shutil.copytree(project_root / "examples" / folder, tmp_path / "examples" / folder)
    script = tmp_path / "notebook.py"
    script.write_text("\n\n".join(cells(project_root, "code")), encoding="utf-8")
    python(str(script), cwd=tmp_path, TINY="1", NOTEBOOK_DIR="out", VERL_FILE_LOGGER_ROOT=".")
    assert (tmp_path / "out/curve.png").is_file()
    assert (tmp_path / "out/ppo/global_step_2/actor/huggingface/config.json").is_file()
