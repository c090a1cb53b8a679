"""Statistics of rows whose vocabulary is spread over ranks, against the whole vocabulary on one."""

import pytest
import torch

from tests.harness.ranks import run_cells
from verl.algorithms.logprob import (
    candidate_log_probs,
    entropy_from_logits,
    logprobs_from_logits,
    sum_pi_squared_from_logits,
    top_k_from_logits,
)
from verl.distributed.vocabulary import candidates_from_parts, statistics_from_parts, top_k_from_parts

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
        "gradient": _differs(mine.grad, reference.grad[:, low:high]),
        **lists_of_tokens(logits, low, high),
    }


LISTED = torch.tensor([[0, 7, 10], [5, 5, 6], [9, 1, 2], [10, 3, 0], [4, 6, 8]])


def lists_of_tokens(logits, low, high):
    """Of a part of the vocabulary: a gradient of -inf log-probs is left out, as losses do."""
    group = torch.distributed.group.WORLD
    reference, mine = logits.clone().requires_grad_(), logits[:, low:high].clone().requires_grad_()
    expected, found = candidate_log_probs(reference, LISTED), candidates_from_parts(mine, LISTED, low, group)
    for values in (expected, found):
        (values * torch.arange(15.0).view(5, 3)).sum().backward()
    log_probs, ids = top_k_from_logits(logits, 8)
    most_likely, their_ids = top_k_from_parts(logits[:, low:high], 8, low, group)
    return {
        "listed": _differs(found.detach(), expected.detach()),
        "listed gradient": _differs(mine.grad, reference.grad[:, low:high]),
        "most likely": _differs(most_likely, log_probs),
        "ids": float((their_ids != ids).any()),
    }


def _differs(values, expected):
    return float((values - expected).abs().max()) if expected.numel() else 0.0


@pytest.mark.slow
def test_parts_give_the_values_and_gradients_of_the_whole_vocabulary(tmp_path):
    for found in run_cells(3, [parts_of_a_vocabulary], tmp_path)["parts_of_a_vocabulary"]:
        assert all(error < 1e-5 for error in found.values()), found


def test_closed_form_gradients_equal_finite_differences():
    logits, labels = whole(7, rows=5)
    logits = logits.double()
    logits[1, 2] = 0.3
    logits.requires_grad_()
    torch.autograd.gradcheck(lambda x: tuple(statistics_from_parts(x, labels, 0, None)), logits)
    torch.autograd.gradcheck(lambda x: candidates_from_parts(x, LISTED % 7, 0, None), logits)
