"""Every command and program that a page prints is run by a test, or is here with the reason why it cannot be."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path

import pytest

from tests.docs.test_statements import IDS, PAGES, blocks
from tests.sanity.source_tree import ROOT

FILES = [import_module(f"tests.docs.{file.stem}") for file in sorted(Path(__file__).parent.glob("test_printed*.py"))]
PARTS = ("docs/start/", "docs/howto/")
NOT_RUN: dict[str, dict[str, str]] = {
    "CONTRIBUTING.md": {"make install": "the targets of the suite itself"},
    "README.md": {"make quickstart": "a package index"},
    "docs/index.md": {"make quickstart": "a package index", "Qwen/Qwen3-0.6B": "the hub"},
    "docs/concepts/contributing.md": {"python -m pytest": "the suite itself"},
    "docs/concepts/fsdp.md": {"torchrun": "tests/docs/test_printed_data.py runs the same on the page of fine-tuning"},
    "docs/concepts/megatron.md": {
        "pip install": "a package index, eight GPUs",
        "converter_hf_to_mcore": "tests/models/test_megatron_folder.py runs it on other models",
    },
    "docs/concepts/torchtitan.md": {"pip install": "a package index"},
    "docs/howto/rocm.md": {"docker build": "docker and AMD GPUs"},
    "docs/howto/sizes.md": {
        "qwen3-8b-grpo-8gpu": "the hub; tests/examples/test_models.py checks and starts every file"
    },
    "examples/README.md": {"qwen3-8b-grpo-8gpu": "eight GPUs; tests/examples/test_models.py starts every file"},
    "examples/rollout_importance_sampling/README.md": {
        "run_with_rollout_is.sh": "the hub and GPUs; tests/docs/test_printed_sampling.py runs it with TINY=1"
    },
    "examples/split_placement/README.md": {"run.sh": "eight GPUs; tests/examples/test_scripts.py runs it with TINY=1"},
    "recipe/deepeyes/README.md": {"recipe.deepeyes.trial": "minutes; tests/recipe/test_deepeyes.py trains in small"},
    "recipe/retool/README.md": {"recipe.retool.trial": "minutes; tests/recipe/test_trials.py makes its files"},
    "recipe/r1_style/README.md": {
        "--out outputs/r1_style": "minutes; tests/recipe/test_r1_style.py runs it in small",
        "--model Qwen": "the hub; tests/recipe/test_r1_style.py runs it in small",
    },
}
"""Page -> the beginning of a block -> why no test runs it; those of the files above come on top."""


def listed(name: str, page: str) -> list[str]:
    """What the test files say of a page's blocks: texts that stand in them."""
    return [text for file in FILES for text in getattr(file, name, {}).get(page, ())]


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_every_block_is_run_or_has_a_reason(page):
    name = str(page.relative_to(ROOT))
    known = [*listed("RUN", name), *listed("NOT_RUN", name), *NOT_RUN.get(name, ())]
    parts = [
        block for block in blocks(page, "bash", "sh", "python") if re.search(r"\.\.\. |\.\.\.$", block, re.MULTILINE)
    ]
    printed = [block for block in blocks(page, "bash", "sh", "python") if block not in parts]
    assert [block for block in printed if not any(text in block for text in known)] == []
    assert [text for text in known if not any(text in block for block in printed)] == [], "no block has these"


@pytest.mark.parametrize("page", [name for name in IDS if name.startswith(PARTS)])
def test_what_can_be_pasted_has_no_gaps(page):
    assert [block for block in blocks(ROOT / page, "bash", "sh") if "..." in block] == []
