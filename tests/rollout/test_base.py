"""Requests that can only be mistakes are refused before anything is computed, by a message that names the field."""

from __future__ import annotations

import dataclasses

import pytest

from verl.errors import RolloutError
from verl.rollout import Request, SamplingParams, check_request

GOOD = Request("a", (1, 2, 3), SamplingParams(max_tokens=5))


def check(**changes) -> None:
    sampling = {k: changes.pop(k) for k in list(changes) if k in SamplingParams.__dataclass_fields__}
    request = dataclasses.replace(GOOD, sampling=dataclasses.replace(GOOD.sampling, **sampling), **changes)
    check_request(request, vocab_size=10, max_model_len=8)


def test_a_request_that_just_fits_is_accepted():
    check()
    check(token_ids=(0, 9, 9), temperature=0.0, top_p=1e-6, top_k=1, stop_token_ids=(9,))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"token_ids": ()}, "prompt is empty"),
        ({"token_ids": (1, 10, 2)}, r"outside the vocabulary.*Got 10.*0 to 9"),
        ({"token_ids": (1, -1)}, "Got -1"),
        ({"generated_prefix": (11,)}, "Got 11"),
        ({"token_ids": (1, 2, 3, 4)}, r"prompt \(4 tokens\).*longer than the model's context.*at most 8"),
        ({"max_tokens": 10**9}, "at most 8"),
        ({"max_tokens": 0}, "nothing to sample"),
        ({"generated_prefix": (1,) * 5}, r"fewer than max_tokens=5"),
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"temperature": 1e-300}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"stop_token_ids": (10,)}, "stop_token_ids"),
        ({"sample_index": -1}, "sample_index"),
    ],
)
def test_what_can_only_be_a_mistake_is_refused_by_name(changes, words):
    with pytest.raises(RolloutError, match=words):
        check(**changes)


def test_a_temperature_too_small_to_divide_by_is_greedy():
    assert SamplingParams(temperature=1e-9).is_greedy
    assert SamplingParams(do_sample=False, temperature=1.0).is_greedy
    assert not SamplingParams(temperature=0.01).is_greedy
