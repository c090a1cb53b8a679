"""A tiny random model of every family trains, and what is sampled from it is what is trained on."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
import torch

from tests.harness.engines import gradients, grouped_batch, make_engine, model_dir, relative_error
from verl.algorithms.losses import PPOPolicyLoss, SFTLoss
from verl.config import ActorConfig
from verl.engines.settings import PassSettings
from verl.models.routers import RouterStatistics, router_modules
from verl.rollout.base import Request, SamplingParams
from verl.rollout.hf.sampler import HFSampler

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = {
    "kv_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "q_lora_rank": 16,
    "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12, "moe_intermediate_size": 16,
    "first_k_dense_replace": 1, "n_shared_experts": 1,
}  # fmt: skip
ROPE = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64, "rope_theta": 10000.0}  # fmt: skip
FAMILIES = {
    "qwen2": {},
    "qwen3": {},
    "llama": {"rope_parameters": ROPE},
    "gemma2": {"sliding_window": 6},
    "mistral": {"sliding_window": 6},
    "qwen3_moe": EXPERTS,
    "deepseek_v3": LATENT,
}


@pytest.mark.parametrize("family", FAMILIES)
def test_it_trains_on_packed_rows_with_shared_prompts_as_on_padded_ones(tmp_path, family):
    """Sequences are longer than the windows of the families that have one."""
    path, batch = model_dir(tmp_path, family, **FAMILIES[family]), grouped_batch(prompts=2, samples=3)
    loss_fn, found = PPOPolicyLoss(ActorConfig()), []
    for passes in (PassSettings(packed=False), PassSettings(share_prompts=True)):
        engine = make_engine(path, passes=passes, optim={"lr": 3e-3})
        assert engine.forward.passes == passes
        found.append(gradients(engine, batch, loss_fn))
    assert found[1][0] == pytest.approx(found[0][0], rel=1e-5, abs=1e-7)
    assert relative_error(found[1][1], found[0][1]) < 1e-5
    losses = [engine.train_batch(batch, SFTLoss()).values()["loss"] for _ in range(8)]
    assert losses[-1] < losses[0] - 0.1


@pytest.mark.parametrize("family", FAMILIES)
def test_the_sampler_draws_from_what_was_trained(tmp_path, family):
    path = model_dir(tmp_path, family, **FAMILIES[family])
    engine = make_engine(path, optim={"lr": 3e-3})
    engine.train_batch(grouped_batch(prompts=2, samples=3), SFTLoss())
    engine.save_hf(tmp_path / "trained")
    sampler = HFSampler(str(tmp_path / "trained"), dtype="float32", device="cpu", max_num_seqs=4)
    parameters = SamplingParams(temperature=1.0, max_tokens=9, ignore_eos=True, seed=3)
    done = asyncio.run(sampler.generate(Request("0", (5, 6, 7, 8, 9), parameters, uid="0", sample_index=0)))
    ids = torch.tensor([[5, 6, 7, 8, 9, *done.token_ids]])
    engine.model.eval()
    with torch.no_grad():
        every = engine.model(input_ids=ids, attention_mask=None, use_cache=False).logits[0, 4:-1].log_softmax(-1)
    expected = every.gather(1, torch.tensor(done.token_ids)[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(list(done.log_probs)), expected, atol=3e-5, rtol=0)


@pytest.mark.parametrize(("family", "layers"), [("qwen3_moe", 2), ("deepseek_v3", 1), ("qwen2", 0)])
def test_routers_are_watched_while_a_mixture_trains(tmp_path, family, layers):
    engine = make_engine(model_dir(tmp_path, family, **FAMILIES[family]))
    assert len(router_modules(engine.model)) == layers
    values = engine.train_batch(grouped_batch(prompts=2, samples=3), SFTLoss()).values()
    assert ("moe/load_balance" in values) == (layers > 0)
    if layers:
        assert 0.9 < values["moe/load_balance"] <= 4.0 and 1.0 <= values["moe/max_load"] <= 2.0 + 1e-6


def test_a_router_that_is_a_linear_layer_is_known_by_its_name_and_not_watched():
    """So Jamba's is in transformers 5.17, where the kind of its routers is that of all its linear layers."""
    model = torch.nn.ModuleDict({"router": torch.nn.Linear(4, 2), "in_proj": torch.nn.Linear(4, 8)})
    model._can_record_outputs = {"router_logits": SimpleNamespace(target_class=torch.nn.Linear, layer_name="router")}
    assert router_modules(model) == [model["router"]] and not RouterStatistics(model).routers


def test_the_balance_of_a_router_that_always_takes_the_same_experts(tmp_path):
    """Two of four experts take all tokens: the busiest has half of all choices, twice its fair share."""
    engine = make_engine(model_dir(tmp_path, "qwen3_moe", **EXPERTS), optim={"lr": 0.0})
    for router in router_modules(engine.model):
        router.register_forward_pre_hook(lambda module, args: (torch.ones_like(args[0]),))
        with torch.no_grad():
            router.weight.zero_()
            router.weight[:2] = 100.0
    values = engine.train_batch(grouped_batch(prompts=2, samples=3), SFTLoss()).values()
    assert values["moe/max_load"] == pytest.approx(2.0)
    assert values["moe/load_balance"] == pytest.approx(2.0, rel=1e-3)  # 4 * (1/2 * 1/2 + 1/2 * 1/2)


def test_padding_and_sharing_are_told_as_shares_of_tokens(tmp_path):
    path = model_dir(tmp_path, "qwen2")
    batch = grouped_batch(prompts=2, samples=3)
    lengths = [int(row.sum()) for row in batch.batch["attention_mask"]]
    metrics = {
        name: make_engine(path, passes=passes).train_batch(batch, SFTLoss()).values()
        for name, passes in {
            "padded": PassSettings(packed=False),
            "packed": PassSettings(),
            "shared": PassSettings(share_prompts=True),
        }.items()
    }
    assert metrics["packed"]["padding_waste"] == metrics["packed"]["prompt_sharing"] == 0.0
    assert (
        0.0 < metrics["padded"]["padding_waste"] < 1.0 - 1.0 / len(lengths) and metrics["padded"]["prompt_sharing"] == 0
    )
    assert 0.1 < metrics["shared"]["prompt_sharing"] < 2 / 3 and metrics["shared"]["padding_waste"] == 0.0
