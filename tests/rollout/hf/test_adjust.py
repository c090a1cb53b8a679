"""The repetition penalty, the shortest response and raw log-probs: by hand, and against plain forward passes."""

from __future__ import annotations

import pytest
import torch

from tests.harness.samplers import EOS, largest_difference, prompt, renamed, requests, sample, tiny_model
from verl.errors import RolloutError
from verl.rollout import Request, SamplingParams
from verl.rollout.hf.adjust import Adjustment
from verl.rollout.hf.rows import Prompt, Row
from verl.rollout.hf.sampler import HFSampler

ADJUSTED = requests(
    [prompt(n, n) for n in (1, 5, 26, 30)],
    samples=3,
    max_tokens=[24, 9, 31],
    temperature=0.7,
    min_tokens=[6, 0, 0, 9],
    repetition_penalty=[1.0, 1.3, 0.8, 1.5, 1.0],
)


@pytest.fixture(scope="module")
def model():
    return tiny_model()


def row(stops=(), drawn=(), tokens=(0, 1), **sampling) -> Row:
    request = Request("r", tokens, SamplingParams(**sampling))
    made = Row(request, Prompt(tokens), frozenset(stops), key=None)  # type: ignore[arg-type]  # nothing is drawn
    made.tokens.extend(drawn)
    return made


def test_the_penalty_divides_positive_logits_and_multiplies_others_of_tokens_that_were_there():
    logits = torch.tensor([[2.0, -1.0, 0.5, -3.0], [2.0, -1.0, 0.5, -3.0]])
    adjust, rows = Adjustment(), [row(repetition_penalty=2.0), row()]
    assert adjust(rows, logits).tolist() == [[1.0, -2.0, 0.5, -3.0], [2.0, -1.0, 0.5, -3.0]]
    adjust.drew(torch.tensor([3, 2]))
    assert adjust(rows, logits).tolist()[0] == [1.0, -2.0, 0.5, -6.0]
    assert adjust([rows[1], rows[0]], logits).tolist()[1] == [1.0, -2.0, 0.5, -6.0]  # goes with its row
    assert logits[0].tolist() == [2.0, -1.0, 0.5, -3.0]


def test_no_end_token_has_a_probability_before_the_shortest_length():
    short, long = row([2, 9], drawn=[1], min_tokens=2), row([2, 9], drawn=[1, 1], min_tokens=2)
    logits = torch.zeros(2, 4)  # token 9 is beyond the vocabulary
    assert Adjustment()([short, long], logits).exp().tolist() == [[1, 1, 0, 1], [1, 1, 1, 1]]
    assert Adjustment()([long, row(min_tokens=3)], logits) is logits, "nothing to change, or nothing that ends it"


def test_log_probs_are_those_of_the_adjusted_distribution_whatever_else_is_in_the_batch(model):
    found = sample(HFSampler(model), ADJUSTED)
    assert largest_difference(model, ADJUSTED, found) < 2e-5
    crowded = sample(HFSampler(model, max_num_seqs=3), ADJUSTED[::-1])[::-1]
    assert [c.token_ids for c in crowded] == [c.token_ids for c in found]
    for request, done in zip(ADJUSTED, found):
        assert len(done.token_ids) >= request.sampling.min_tokens
        assert EOS not in done.token_ids[: request.sampling.min_tokens]
    assert any(len(done.token_ids) < 24 for done in found)


def test_a_continued_response_keeps_its_shortest_length_and_what_it_had(model):
    asked = Request("a", prompt(5, 1), SamplingParams(max_tokens=20, min_tokens=12, repetition_penalty=1.4), uid="u")
    sampler = HFSampler(model)
    (whole,) = sample(sampler, [asked])
    for cut in (1, 11):
        (rest,) = sample(sampler, [renamed(asked, generated_prefix=whole.token_ids[:cut])])
        assert (*whole.token_ids[:cut], *rest.token_ids) == whole.token_ids
    ignoring = SamplingParams(max_tokens=8, min_tokens=8, ignore_eos=True, repetition_penalty=1.0)
    plain = SamplingParams(max_tokens=8, ignore_eos=True)
    one, other = (sample(sampler, [renamed(asked, sampling=s)])[0].token_ids for s in (ignoring, plain))
    assert one == other, "no token ends it, so none is left out"


def test_raw_log_probs_are_the_models_at_temperature_1_and_change_no_token(model):
    plain = [renamed(r, sampling=SamplingParams(max_tokens=r.sampling.max_tokens)) for r in ADJUSTED]
    raw = sample(HFSampler(model, logprobs_mode="raw_logprobs"), ADJUSTED)
    assert [c.token_ids for c in raw] == [c.token_ids for c in sample(HFSampler(model), ADJUSTED)]
    assert largest_difference(model, plain, raw) < 2e-5 < 0.1 < largest_difference(model, ADJUSTED, raw)


@pytest.mark.parametrize(
    ("sampling", "said"),
    [
        ({"min_tokens": 17}, "0 to max_tokens=16"),
        ({"min_tokens": -1}, "0 to max_tokens=16"),
        ({"repetition_penalty": 0.0}, "not a penalty"),
        ({"repetition_penalty": float("nan")}, "not a penalty"),
    ],
)
def test_settings_that_describe_no_distribution_are_refused(model, sampling, said):
    with pytest.raises(RolloutError, match=said):
        sample(HFSampler(model), [Request("a", (6, 7), SamplingParams(**sampling))])
    with pytest.raises(RolloutError, match="processed_logprobs, raw_logprobs"):
        HFSampler(model, logprobs_mode="raw_logits")
