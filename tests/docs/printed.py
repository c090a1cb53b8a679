"""Blocks of the pages, and a shell that runs them in a folder."""

from __future__ import annotations

import re
from pathlib import Path

from tests.docs.test_statements import blocks
from tests.harness.programs import run
from tests.sanity.source_tree import ROOT

WARMED_UP = "outputs/quickstart/sft/global_step_360/model/huggingface"


def block(page: str, start: str) -> str:
    """The block of a page that begins so."""
    (only,) = [one for one in blocks(ROOT / page, "bash", "python") if one.startswith(start)]
    return only


def bash(folder: Path, script: str, **shrink: str) -> str:
    """Run a block in a folder, where ``examples`` are; returns what it printed.

    Args:
        shrink: settings, by the end of their keys, that are made smaller; each has to be there.
    """
    for key, value in shrink.items():
        script, found = re.subn(rf"(?<=[.]){key}=\S+", f"{key}={value}", script)
        assert found, f"the block sets no {key}"
    if not (folder / "examples").exists():
        (folder / "examples").symlink_to(ROOT / "examples")
    return run(["bash", "-ec", script], cwd=folder, COLUMNS="120").stdout


def rewards(printed: str) -> list[float]:
    """The mean reward of each step."""
    return [float(value) for value in re.findall(r"critic/score/mean:([\d.e-]+)", printed)]
