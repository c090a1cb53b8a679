"""A LoRA adapter that is sent alone: a few bytes, the same weights as if they had been sent merged."""

from __future__ import annotations

import asyncio
import dataclasses

import numpy as np
import pytest
import torch

from tests.harness.engines import make_engine, ragged_batch
from tests.harness.models import tiny_model_dir
from tests.harness.samplers import largest_difference, prompt, requests, sample
from verl import metrics
from verl.algorithms.losses import SFTLoss
from verl.config import HFModelConfig, RolloutConfig
from verl.config.schema.model import MegatronLoraConfig
from verl.config.schema.rollout import CheckpointEngineConfig
from verl.errors import ModelError, RolloutError
from verl.models import load_causal_lm, lora
from verl.rollout.adapters import separate_adapter
from verl.rollout.hf.adapter import AdapterBuffer
from verl.rollout.hf.sampler import HFSampler
from verl.rollout.hosted import HostedSampler, WeightIntake
from verl.rollout.place import transport_of
from verl.rollout.scores import ScoreRequest
from verl.single_controller.local import LocalHandle
from verl.weight_sync import chunk_weights
from verl.workers.sending import SyncResult, WeightSender

LORA = {"lora_rank": 4, "lora_alpha": 8}
SAMPLED = requests([prompt(5, 1), prompt(28, 2)], samples=3, max_tokens=10, ignore_eos=True)
ROLLOUT = RolloutConfig(prompt_length=64, response_length=64)


@pytest.fixture(scope="module")
def engine(qwen2):
    """Its adapter has moved away from zero."""
    made = make_engine(qwen2, model=LORA)
    for seed in range(3):
        made.train_batch(ragged_batch(seed=seed), SFTLoss())
    return made


def sampler_of(qwen2, **model) -> HFSampler:
    return HFSampler.from_config(ROLLOUT, HFModelConfig(path=str(qwen2), **LORA, **model))


def push(sampler, weights, version=1):
    asyncio.run(sampler.update_weights(chunk_weights(weights, 2000, version), version))


def merged_model(qwen2, engine):
    model = load_causal_lm(str(qwen2), torch.float32).eval()
    model.load_state_dict(dict(engine.export_weights()))
    return model


def test_an_adapter_alone_makes_the_weights_that_the_trainer_would_have_merged(qwen2, engine):
    alone, whole = sampler_of(qwen2), sampler_of(qwen2, lora=MegatronLoraConfig(merge=True))
    before = sample(alone, SAMPLED)
    push(alone, engine.export_adapter())
    push(whole, engine.export_weights())
    for name, tensor in whole.model.state_dict().items():
        assert torch.equal(alone.model.state_dict()[name], tensor), name
    found, trainer = sample(alone, SAMPLED), merged_model(qwen2, engine)
    assert [c.token_ids for c in found] == [c.token_ids for c in sample(whole, SAMPLED)]
    assert largest_difference(trainer, SAMPLED, found) < 1e-5
    assert largest_difference(trainer, SAMPLED, before) > 1e-2
    # 2 layers of 7 maps, each with a factor of rank 4 on either side of it
    maps = [t.shape for name, t in alone.model.named_parameters() if name.endswith("proj.weight")]
    assert alone.stats()["weight_bytes_received"] == 4 * 4 * sum(sum(shape) for shape in maps)
    assert whole.stats()["weight_bytes_received"] == sum(t.nbytes for t in alone.model.state_dict().values())


def test_the_base_under_an_adapter_is_the_memory_of_a_trainer_in_the_process(qwen2, engine):
    """Of the weights that the adapter changes the sampler has one copy, merged; of the others none."""
    sampler, model = sampler_of(qwen2), HFModelConfig(path=str(qwen2), **LORA)
    sender = WeightSender(ROLLOUT, model, {"here": sampler}, shares=True)
    adapter_bytes = sum(t.nbytes for _, t in engine.export_adapter())
    for version in (1, 2):
        assert sender.send(engine, version) == SyncResult(adapter_bytes)
        base = engine.export_base()
        kept, weights = sampler._weights._adapter._base, dict(sampler.model.named_parameters())
        assert {t.data_ptr() for t in kept.values()} < {t.data_ptr() for t in base.values()}
        for name, tensor in base.items():
            assert (weights[name].data_ptr() == tensor.data_ptr()) == (not name.endswith("proj.weight")), name
        assert largest_difference(merged_model(qwen2, engine), SAMPLED, sample(sampler, SAMPLED)) < 1e-5
        engine.train_batch(ragged_batch(seed=version), SFTLoss())


def test_a_base_of_another_dtype_is_rounded_where_it_is_merged_as_if_it_was_sent(qwen2, engine):
    rollout, model = dataclasses.replace(ROLLOUT, dtype="bfloat16"), HFModelConfig(path=str(qwen2), **LORA)
    shared, separate = (HFSampler.from_config(rollout, model) for _ in range(2))
    WeightSender(rollout, model, {"here": shared}, shares=True).send(engine, 1)
    push(separate, engine.export_adapter())
    base = {tensor.data_ptr() for tensor in engine.export_base().values()}
    assert {tensor.data_ptr() for tensor in shared._weights._adapter._base.values()} < base
    for name, tensor in separate.model.state_dict().items():
        assert tensor.dtype == torch.bfloat16 and torch.equal(shared.model.state_dict()[name], tensor), name


def test_an_adapter_that_came_later_does_not_add_up_with_the_one_before(qwen2, engine):
    sampler = sampler_of(qwen2)
    for version, factor in enumerate((3.0, 0.5, 1.0)):
        push(sampler, [(name, tensor * factor) for name, tensor in engine.export_adapter()], version)
    assert largest_difference(merged_model(qwen2, engine), SAMPLED, sample(sampler, SAMPLED)) < 1e-5


def test_what_sleep_gives_back_comes_again_with_the_next_adapter(qwen2, engine):
    sampler = sampler_of(qwen2)
    for version in (1, 2):
        asyncio.run(sampler.sleep(level=2))
        changed = [t for name, t in sampler.model.named_parameters() if name.endswith("proj.weight")]
        assert {t.untyped_storage().nbytes() for t in changed} == {0}
        asyncio.run(sampler.wake())
        push(sampler, engine.export_adapter(), version)
        assert largest_difference(merged_model(qwen2, engine), SAMPLED, sample(sampler, SAMPLED)) < 1e-5


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="products read the weights themselves")
def test_merged_weights_are_freed_once_products_have_their_copies(qwen2, engine):
    sampler = sampler_of(qwen2)
    push(sampler, engine.export_adapter())
    changed = [t for name, t in sampler.model.named_parameters() if name.endswith("proj.weight")]
    merged = sampler.stats()["weight_bytes"]
    first = sample(sampler, SAMPLED)
    assert sampler.stats()["weight_bytes"] == merged - sum(t.nbytes for t in changed)
    assert {t.untyped_storage().nbytes() for t in changed} == {0}
    asyncio.run(sampler.sleep())
    asyncio.run(sampler.wake())
    again = sample(sampler, SAMPLED)  # with copies that were made once more
    assert [c.log_probs for c in again] == [c.log_probs for c in first]
    assert largest_difference(merged_model(qwen2, engine), SAMPLED, first) < 1e-5
    assert {t.untyped_storage().nbytes() for t in changed} == {0}
    request, answer = SAMPLED[0], first[0]
    scored = ScoreRequest("a", (*request.token_ids, *answer.token_ids), len(request.token_ids))
    scores = asyncio.run(sampler.score(scored))
    assert np.abs(scores.log_probs - np.array(answer.log_probs)).max() < 1e-5
    push(sampler, engine.export_adapter(), 2)
    assert [c.log_probs for c in sample(sampler, SAMPLED)] == [c.log_probs for c in first]


@pytest.mark.parametrize("backend", ["shared_memory", "disk", "gloo"])
def test_an_adapter_comes_over_every_transport_again_and_again(qwen2, engine, backend):
    """Both ends in this process; the transport does not know."""
    transport = CheckpointEngineConfig(backend=backend, engine_kwargs={"timeout": 20})
    rollout, model = dataclasses.replace(ROLLOUT, checkpoint_engine=transport), HFModelConfig(path=str(qwen2), **LORA)
    host = WeightIntake(HFSampler.from_config(rollout, model, device="cpu"))
    sampler = HostedSampler(LocalHandle(host), *transport_of(rollout, model, "cpu"))
    for version, factor in ((1, 0.5), (2, 1.0)):
        push(sampler, [(name, tensor * factor) for name, tensor in engine.export_adapter()], version)
    assert largest_difference(merged_model(qwen2, engine), SAMPLED, sample(sampler, SAMPLED)) < 1e-5
    assert sampler.stats()["weight_bytes_sent"] == 2 * sum(t.nbytes for _, t in engine.export_adapter())
    sampler.close()


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda factors: factors[:-1], "did not arrive"),
        (lambda factors: [*factors, ("base_model.model.lm_head.lora_A.weight", torch.ones(4, 32))], "no such weight"),
        (lambda factors: [(factors[0][0], factors[0][1][:2]), *factors[1:]], "another shape"),
    ],
)
def test_an_adapter_that_is_not_the_sampler_s_is_refused(qwen2, engine, spoil, said):
    sampler = sampler_of(qwen2)
    with pytest.raises(RolloutError, match=said):
        push(sampler, spoil(list(engine.export_adapter())))
    with pytest.raises(RolloutError, match="send them again"):
        sample(sampler, SAMPLED[:1])


def test_a_sampler_that_lacks_a_weight_of_the_adapter_says_which(qwen2):
    model = load_causal_lm(str(qwen2), torch.float32)
    model.model.layers[1].mlp.up_proj = torch.nn.Identity()
    with pytest.raises(ModelError, match=r"has no model\.layers\.1\.mlp\.up_proj\.weight, which.*Set it to true"):
        AdapterBuffer(model, lora.LoraSettings(rank=4))


@pytest.mark.parametrize("given", [{}, {"target_modules": ["q_proj"], "target_parameters": ["mlp.experts.down_proj"]}])
def test_an_adapter_on_experts_goes_alone_to_transformers_and_merged_to_others(tmp_path, given):
    mixture = tiny_model_dir(tmp_path / "mixture", "qwen3_moe", num_experts=4, moe_intermediate_size=16)
    model = HFModelConfig(path=str(mixture), lora_rank=4, **given)
    assert separate_adapter(ROLLOUT, model) == lora.LoraSettings.of(model)
    assert separate_adapter(dataclasses.replace(ROLLOUT, name="vllm"), model) is None
    assert "it adapts experts" in metrics.notices()["actor_rollout_ref.model.lora.merge"]


@pytest.mark.parametrize(
    ("rollout", "model", "said"),
    [
        ({}, {}, None),
        ({}, {"lora": MegatronLoraConfig(merge=True)}, ""),
        ({"name": "server"}, {}, "whole weights only"),
        ({"checkpoint_engine": CheckpointEngineConfig(backend="delta")}, {}, "differences"),
        ({}, {"lora_rank": 0}, ""),
    ],
)
def test_an_adapter_goes_alone_unless_somebody_cannot_take_it_and_then_it_is_said(qwen2, rollout, model, said):
    given = {**LORA, **model}
    found = separate_adapter(dataclasses.replace(ROLLOUT, **rollout), HFModelConfig(path=str(qwen2), **given))
    assert found == (lora.LoraSettings(rank=4, alpha=8) if said is None else None)
    told = metrics.notices().get("actor_rollout_ref.model.lora.merge", "")
    assert bool(told) == bool(said) and (said or "") in told
