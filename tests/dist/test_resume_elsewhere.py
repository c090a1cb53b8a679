"""A checkpoint of two ranks goes on, on one, two and four: the same data in the same order, the same numbers."""

from __future__ import annotations

import pytest
import torch

from tests.harness.engines import relative_error
from tests.harness.training_programs import PROGRAMS, SAVE_AT, STEPS

pytestmark = pytest.mark.slow

EXACT = 1e-5
SIZES = (1, 2, 4)


@pytest.fixture(scope="module", params=sorted(PROGRAMS))
def program(request):
    return PROGRAMS[request.param]


@pytest.fixture(scope="module")
def runs(program, tmp_path_factory):
    """Name -> folder of a run; ``one process`` never had another rank."""
    folder = tmp_path_factory.mktemp("runs")
    found = program.runs(folder, saved=2, resumed=SIZES)
    found["one process"] = folder / "one"
    program.launch(folder / "inputs", found["one process"], 1)
    return found


def flat(weights):
    return torch.cat([weights[name].flatten() for name in sorted(weights)])


def test_several_ranks_train_as_one_process_does(program, runs):
    found, expected = (program.metrics(runs[name]) for name in ("straight", "one process"))
    assert list(found) == list(expected) == list(range(1, STEPS + 1))
    for step, metrics in expected.items():
        timeless = {name: value for name, value in metrics.items() if "time" not in name}
        assert {name: found[step][name] for name in timeless} == pytest.approx(timeless, rel=EXACT, abs=1e-9)
    assert relative_error(*(flat(program.weights(runs[name])) for name in ("straight", "one process"))) < EXACT


def test_the_same_number_of_ranks_goes_on_bitwise(program, runs):
    found, expected = (program.metrics(runs[name]) for name in ("resumed on 2", "straight"))
    for step in range(SAVE_AT + 1, STEPS + 1):
        assert found[step][program.loss] == expected[step][program.loss]
    weights = program.weights(runs["straight"])
    assert all(torch.equal(tensor, weights[name]) for name, tensor in program.weights(runs["resumed on 2"]).items())


@pytest.mark.parametrize("size", SIZES)
def test_another_number_of_ranks_goes_on_with_the_same_rows_and_equal_losses(program, runs, size):
    found, expected = (program.metrics(runs[name]) for name in (f"resumed on {size}", "straight"))
    for step in range(SAVE_AT + 1, STEPS + 1):
        assert found[step][program.tokens] == expected[step][program.tokens]
        assert found[step][program.loss] == pytest.approx(expected[step][program.loss], rel=EXACT)
    assert program.controller(runs[f"resumed on {size}"])["data"] == program.controller(runs["straight"])["data"]


def test_the_batches_of_the_run_can_be_told_apart(program, runs):
    metrics = program.metrics(runs["straight"])
    assert len({metrics[step][program.tokens] for step in metrics}) > 1
