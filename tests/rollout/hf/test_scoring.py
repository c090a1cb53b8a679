"""Log-probs of tokens that are sent to the hf sampler: plain forward passes say the same."""

from __future__ import annotations

import asyncio

import pytest
import torch

from tests.harness.samplers import prompt, tiny_model
from verl.errors import RolloutError
from verl.rollout.hf.sampler import HFSampler
from verl.rollout.scores import ScoreRequest
from verl.rollout.threaded import threaded

ROWS = [(7, 2), (3, 1), (11, 4), (7, 6)]
"""Tokens of each row, and the first that is scored."""


def rows(**fields):
    return [ScoreRequest(f"row {n}", prompt(length, seed=n), start, **fields) for n, (length, start) in enumerate(ROWS)]


def scored(sampler, requests):
    async def run():
        return await asyncio.gather(*map(sampler.score, requests), return_exceptions=True)

    return asyncio.run(run())


def expected(model, request):
    """(T, V) from a pass over this row alone."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([request.token_ids])).logits[0, request.start - 1 : -1]
    return (logits / request.temperature).log_softmax(-1)


@pytest.mark.parametrize("family", ["qwen2", "gemma2", "mistral"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_rows_of_unequal_length_get_the_log_probs_of_single_passes(family, temperature):
    model = tiny_model(family)
    requests = rows(top_k=3, temperature=temperature)
    for request, scores in zip(requests, scored(HFSampler(model), requests)):
        table = expected(model, request)
        tokens = torch.tensor(request.scored)
        torch.testing.assert_close(torch.tensor(scores.log_probs), table.gather(-1, tokens[:, None])[:, 0])
        top = table.topk(3)
        assert scores.top_ids.tolist() == top.indices.tolist()
        torch.testing.assert_close(torch.tensor(scores.top_log_probs), top.values)


def test_rows_that_do_not_fit_one_pass_take_several():
    model, lengths = tiny_model(), []
    forward = model.forward
    model.forward = lambda **inputs: (lengths.append(inputs["input_ids"].shape), forward(**inputs))[1]
    sampler = HFSampler(model, max_num_seqs=1, max_num_batched_tokens=14)
    lengths.clear()
    together = scored(HFSampler(tiny_model()), rows())
    for one, other in zip(scored(sampler, rows()), together):
        torch.testing.assert_close(torch.tensor(one.log_probs), torch.tensor(other.log_probs))
    assert lengths == [(2, 7), (1, 11), (1, 7)]


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"start": 0}, "no token is scored"),
        ({"start": 4}, "no token is scored"),
        ({"token_ids": (1, 2, 99)}, "outside the vocabulary"),
        ({"token_ids": tuple(range(5, 9)) * 70}, "longer than the model's context"),
        ({"top_k": -1}, "not a number of tokens"),
        ({"temperature": 0.0}, "not a temperature"),
    ],
)
def test_what_cannot_be_scored_is_refused_and_the_others_are_answered(fields, says):
    bad = ScoreRequest(**{"id": "bad", "token_ids": (1, 2, 3, 4), "start": 1, **fields})
    good, refusal = scored(threaded(HFSampler(tiny_model())), [rows()[0], bad])
    assert isinstance(refusal, RolloutError) and says in str(refusal)
    assert len(good.log_probs) == 5


def test_logits_that_are_not_finite_are_an_error_of_their_row():
    model = tiny_model()
    with torch.no_grad():
        model.get_input_embeddings().weight[9] = float("nan")
    good = ScoreRequest("good", (7, 8, 10), 1)
    answers = scored(HFSampler(model), [ScoreRequest("bad", (9, 8, 7), 1), good])
    assert isinstance(answers[0], RolloutError) and "not finite (bad)" in str(answers[0])
    assert len(answers[1].log_probs) == 2
