"""A head that is tied to the embeddings gets the new ones too, and an engine in which it does not is found out."""

from __future__ import annotations

import asyncio

import pytest

from tests.harness.models import tiny_model_dir
from tests.harness.samplers import largest_difference, requests, sample
from verl.errors import RolloutError
from verl.rollout.hf.sampler import HFSampler
from verl.rollout.vllm import versions
from verl.rollout.vllm.sampler import VLLMSampler
from verl.weight_sync import chunk_weights

WANTED = requests([(40, 41, 42), (50, 51)], samples=2, max_tokens=8, ignore_eos=True)


@pytest.fixture
def folder(tmp_path):
    return tiny_model_dir(tmp_path, hidden=128, heads=4, kv_heads=2, tie_word_embeddings=True)


@pytest.fixture
def sampler(folder):
    made = VLLMSampler({"model": str(folder), "dtype": "float32", "enforce_eager": True, "max_num_seqs": 4})
    yield made
    made.close()


def updated(sampler, folder):
    """Both with other weights."""
    reference = HFSampler(str(folder), device="cpu")
    weights = [(n, v * 2) for n, v in reference.model.state_dict().items() if n != "lm_head.weight"]
    for receiver in (sampler, reference):
        asyncio.run(receiver.update_weights(chunk_weights(weights, 1 << 16, 1), 1))
    return reference.model


def test_a_tied_head_gets_the_new_embeddings(sampler, folder):
    model = updated(sampler, folder)
    assert largest_difference(model, WANTED, sample(sampler, WANTED)) < 1e-5


def test_a_tied_head_that_goes_on_with_the_old_embeddings_is_found_before_anything_is_trained(
    sampler, folder, monkeypatch
):
    monkeypatch.setattr(versions, "refresh_tied", lambda model: None)
    with pytest.raises(RolloutError, match="tied to the embeddings, still uses the old ones"):
        updated(sampler, folder)
