"""The guarantees of docs/howto/sandbox.md, on the kernels that most machines have; the script tries all of them."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from tests.harness.sandboxes import OFFERED
from tests.sandbox.guarantees import GUARANTEES, KERNELS, SLOW, measure

ROOT = Path(__file__).resolve().parents[2]
RESULTS = json.loads((ROOT / "docs" / "howto" / "sandbox_guarantees.json").read_text(encoding="utf-8"))
QUICK = tuple(name for name in GUARANTEES if name not in SLOW)
HERE = ("Landlock 4", "Landlock 1", "no namespaces, Landlock 4", "no namespaces, Landlock 2")


@pytest.mark.parametrize("kernel", [kernel for kernel in KERNELS if kernel.name in HERE], ids=lambda one: one.name)
def test_a_kernel_gives_the_guarantees_that_the_page_lists(kernel):
    if "whole" not in OFFERED:
        return
    listed = RESULTS["kernels"][kernel.name]
    assert measure(kernel, QUICK) == {name: listed[name] for name in QUICK}


def test_the_page_is_made_of_the_results_and_names_every_kernel_and_guarantee():
    spec = importlib.util.spec_from_file_location("made", ROOT / "scripts" / "sandbox_guarantees.py")
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    assert (ROOT / "docs" / "howto" / "sandbox.md").read_text(encoding="utf-8") == made.page(RESULTS)
    assert list(RESULTS["kernels"]) == [kernel.name for kernel in KERNELS]
    assert all(list(column) == list(GUARANTEES) for column in RESULTS["kernels"].values())


@pytest.mark.parametrize(
    "kernel", [name for name in RESULTS["kernels"] if name.startswith(("Landlock", "no Landlock"))]
)
def test_with_namespaces_and_the_filter_every_kernel_gives_every_guarantee(kernel: str):
    assert set(RESULTS["kernels"][kernel].values()) == {"yes"}
