"""TorchTitan's models on one, two and four processes against the plain engine, and checkpoints between them."""

from __future__ import annotations

import importlib.util

import pytest

from tests.dist import resume_cells, titan_cells
from tests.harness.ranks import cells_on_demand

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("torchtitan") is None, reason="TorchTitan is not installed"),
]
SIZES = (1, 2, 4)
COMPARED = [titan_cells.parity, titan_cells.several_tokens]
CELLS = {size: [*COMPARED, titan_cells.resumed, titan_cells.moved] for size in SIZES}
NEEDS = {(2, "resumed"): [(1, "resumed")], (4, "resumed"): [(2, "resumed")]}
"""A cell reads the checkpoints of fewer ranks."""
EXACT = 1e-5


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def runs(folder):
    """World size -> cell -> what each rank returned; checkpoints wait in one folder for the other engines and sizes."""
    resume_cells.plain_saved(folder)
    # TorchTitan names the axes of its meshes: a process has one set of groups for all its models.
    with cells_on_demand(CELLS, folder, NEEDS, keep_groups=True) as answers:
        yield answers


@pytest.fixture(scope="module")
def plain(folder, runs):
    """What the plain engine makes of every checkpoint."""
    assert all(runs[size]["resumed"] for size in SIZES)
    return resume_cells.plain_loaded(folder)


@pytest.mark.parametrize("size", SIZES)
def test_outputs_loss_gradient_and_weights_equal_the_plain_engine(runs, size):
    cells, results = titan_cells.PARITY[size], runs[size]["parity"][0]
    for cell, result in zip(cells, results, strict=True):
        assert all(error <= EXACT for error in result["errors"].values()), (cell, result)


@pytest.mark.parametrize("size", SIZES)
def test_weights_leave_the_engine_under_the_names_and_with_the_bits_of_the_files(runs, size):
    assert all(result["same_names_and_bits"] for result in runs[size]["parity"][0])


@pytest.mark.parametrize("size", SIZES)
def test_several_tokens_per_position_are_those_of_the_plain_engine(runs, size):
    for of_layouts in runs[size]["several_tokens"]:
        assert all(error <= EXACT for errors in of_layouts for error in errors.values()), of_layouts


@pytest.mark.parametrize("size", SIZES)
def test_a_run_resumes_bit_for_bit_on_as_many_processes(runs, size):
    for rank in runs[size]["resumed"]:
        assert rank["different"] == []


@pytest.mark.parametrize("size", SIZES)
def test_a_checkpoint_of_any_layout_and_engine_goes_on_with_the_same_numbers(runs, size):
    loaded = {name: after for name, after in runs[size]["resumed"][0].items() if name.startswith("from-")}
    assert "from-plain-1 again" in loaded and f"from-torchtitan-{size} again" in loaded
    assert all(after["weights"] <= EXACT for after in loaded.values()), loaded


def test_other_engines_go_on_from_its_checkpoints(runs, plain):
    assert {name for name in plain if "titan" in name} == {f"from-torchtitan-{size}" for size in SIZES}
    assert all(after["weights"] <= EXACT for after in [*plain.values(), runs[2]["resumed"][0]["in fsdp2"]])


def test_a_reference_takes_over_weights_of_another_engine_and_writes_them_as_files(runs):
    assert runs[2]["resumed"][0]["copied"]


def test_a_mixture_in_stages_goes_on_in_every_layout_and_engine(runs):
    ranks = runs[4]["moved"]
    assert len(ranks[0]["after"]) == 5
    assert all(after["weights"] <= EXACT for after in ranks[0]["after"].values()), ranks[0]["after"]
    assert all(rank["different"] == [] and rank["copied"] for rank in ranks)
