"""Statistics of rows whose vocabulary is spread over ranks, against the whole vocabulary on one."""

import pytest
import torch

from tests.harness.ranks import run_cells
from verl.algorithms.logprob import entropy_from_logits, logprobs_from_logits, sum_pi_squared_from_logits
from verl.distributed.vocabulary import statistics_from_parts

WEIGHTS = torch.tensor([0.5, -2.0, 3.0])


def whole(size, rows=5):
    generator = torch.Generator().manual_seed(1)
    logits = 3 * torch.randn(rows, size, generator=generator, dtype=torch.float64)
    logits[1, 2] = -torch.inf
    return logits.float(), torch.tensor([0, 1, size - 1, 3, 4])


def combined(statistics):
    return sum(weight * values.sum() for weight, values in zip(WEIGHTS, statistics))


def parts_of_a_vocabulary(ranks, folder):
    logits, labels = whole(11)
    reference = logits.clone().requires_grad_()
    expected = [
        logprobs_from_logits(reference, labels), entropy_from_logits(reference), sum_pi_squared_from_logits(reference),
    ]  # fmt: skip
    combined(expected).backward()
    cuts = [0, 6, 11, 11]  # the third rank holds nothing but filling
    low, high = cuts[ranks.rank], cuts[ranks.rank + 1]
    mine = logits[:, low:high].clone().requires_grad_()
    found = statistics_from_parts(mine, labels, low, torch.distributed.group.WORLD)
    combined(found).backward()
    return {
        "values": max(float((a - b).detach().abs().max()) for a, b in zip(found, expected)),
        "gradient": float((mine.grad - reference.grad[:, low:high]).abs().max()) if high > low else 0.0,
    }


@pytest.mark.slow
def test_parts_give_the_values_and_gradients_of_the_whole_vocabulary(tmp_path):
    for found in run_cells(3, [parts_of_a_vocabulary], tmp_path)["parts_of_a_vocabulary"]:
        assert found["values"] < 1e-5 and found["gradient"] < 1e-5


def test_closed_form_gradients_equal_finite_differences():
    logits, labels = whole(7, rows=5)
    logits = logits.double()
    logits[1, 2] = 0.3
    logits.requires_grad_()
    torch.autograd.gradcheck(lambda x: tuple(statistics_from_parts(x, labels, 0, None)), logits)
