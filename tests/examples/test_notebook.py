"""The notebook runs in a kernel from its first cell to its last, and leaves a trained model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.harness.programs import python

NOTEBOOK = "examples/ppo_trainer/verl_getting_started.ipynb"
KERNEL = """
import nbformat, sys
from nbclient import NotebookClient

page = nbformat.read(sys.argv[1], as_version=4)
NotebookClient(page, timeout=300, kernel_name="python3").execute()
nbformat.write(page, "executed.ipynb")
"""


def code(path: Path) -> list[dict[str, Any]]:
    """The cells with code."""
    page = json.loads(path.read_text(encoding="utf-8"))
    return [cell for cell in page["cells"] if cell["cell_type"] == "code"]


def kinds(cell: dict[str, Any]) -> set[str]:
    """In what forms a cell shows its results."""
    return {kind for output in cell["outputs"] for kind in output.get("data", {})}


def test_the_notebook_shows_what_it_printed_and_has_no_magic_commands(project_root):
    cells = code(project_root / NOTEBOOK)
    assert [cell["execution_count"] for cell in cells] == [*range(1, len(cells) + 1)]
    assert not [line for cell in cells for line in cell["source"] if line.lstrip().startswith(("!", "%"))]
    assert not [output for cell in cells for output in cell["outputs"] if output["output_type"] == "error"]
    assert "/work/" not in json.dumps(cells) and "/tmp/" not in json.dumps(cells)


@pytest.mark.slow
def test_the_notebook_runs_in_a_kernel_from_its_first_to_its_last_cell(project_root, tmp_path):
    for folder in ("quickstart", "data_preprocess"):
        shutil.copytree(project_root / "examples" / folder, tmp_path / "examples" / folder)
    (tmp_path / "execute.py").write_text(KERNEL, encoding="utf-8")
    python("execute.py", str(project_root / NOTEBOOK), cwd=tmp_path, TINY="1", NOTEBOOK_DIR="out")
    assert (tmp_path / "out/ppo/curve.png").is_file()
    assert (tmp_path / "out/ppo/global_step_2/actor/huggingface/config.json").is_file()
    committed, executed = code(project_root / NOTEBOOK), code(tmp_path / "executed.ipynb")
    assert [kinds(cell) for cell in executed] == [kinds(cell) for cell in committed], "run it again"
    assert any("image/png" in kinds(cell) for cell in executed)
    tables = [output["data"]["text/html"] for cell in executed for output in cell["outputs"]
              if "step 2 of 2" in "".join(output.get("data", {}).get("text/html", ""))]  # fmt: skip
    assert len(tables) == 2, "fine-tuning and PPO each have one table that updates"
