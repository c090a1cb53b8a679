"""LoRA in the engine: what is trained, what is saved, what the sampler gets, and the base as the reference policy."""

from __future__ import annotations

import json

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from tests.harness.engines import (
    gradients,
    grouped_batch,
    make_engine,
    model_dir,
    policy_loss,
    ragged_batch,
    relative_error,
)
from verl.algorithms.losses import PPOValueLoss, SFTLoss
from verl.checkpoint.part import read_part, write_part
from verl.config import CriticConfig, FSDPEngineConfig, HFModelConfig, OptimizerConfig
from verl.engines.adapters import AdapterBaseEngine
from verl.errors import CheckpointError, ConfigError, ModelError
from verl.models import lora
from verl.models.loading import load_causal_lm
from verl.registry import ENGINES

LORA = {"lora_rank": 4, "lora_alpha": 8}


def trained(qwen2, steps: int = 3, **arguments):
    """An engine whose adapter has moved away from zero."""
    engine = make_engine(qwen2, model={**LORA, **arguments.pop("model", {})}, **arguments)
    for seed in range(steps):
        engine.train_batch(ragged_batch(seed=seed), SFTLoss())
    return engine


def test_only_the_adapter_is_trained_and_it_starts_as_no_change(qwen2):
    plain, engine = make_engine(qwen2), make_engine(qwen2, model=LORA)
    batch = ragged_batch()
    assert torch.equal(engine.infer(batch)["log_probs"], plain.infer(batch)["log_probs"])
    names = {name for name, p in engine.model.named_parameters() if p.requires_grad}
    assert names and all(".lora_" in name for name in names)
    assert sum(len(group["params"]) for group in engine.optimizer.param_groups) == len(names) == 2 * 7 * 2
    before = {name: p.detach().clone() for name, p in engine.model.named_parameters()}
    engine.train_batch(batch, SFTLoss())
    changed = {name for name, p in engine.model.named_parameters() if not torch.equal(p, before[name])}
    assert changed and changed <= names


def test_an_adapter_over_a_base_of_16_bits_keeps_updates_that_16_bits_would_lose(qwen2):
    """An update of 1e-6 of factors of about 0.1 is 1e-5 of them; bfloat16 rounds away what is below 2e-3."""
    engine = make_engine(qwen2, model=LORA, engine={"model_dtype": "bfloat16"}, optim={"lr": 1e-6})
    assert {p.dtype for p in engine.model.parameters() if not p.requires_grad} == {torch.bfloat16}
    factors = {name: p for name, p in engine.model.named_parameters() if p.requires_grad}
    assert {p.dtype for p in factors.values()} == {torch.float32}
    before = {name: p.detach().clone() for name, p in factors.items()}
    for seed in range(2):  # the first factors move once the second are not zero
        engine.train_batch(ragged_batch(seed=seed), SFTLoss())
    assert all((p != before[name]).any() for name, p in factors.items())


@pytest.mark.parametrize(("dtype", "read"), [("bfloat16", torch.bfloat16), ("float32", torch.float32)])
def test_the_input_of_an_adapter_is_cast_by_autocast_where_it_is_on(qwen2, dtype, read):
    """Hidden states of a bfloat16 base are bfloat16; without autocast a product with float32 factors needs float32."""
    engine, reads = make_engine(qwen2, model=LORA, engine={"model_dtype": "bfloat16", "dtype": dtype}), set()
    for name, module in engine.model.named_modules():
        if name.endswith("lora_A.default"):
            module.register_forward_pre_hook(lambda _, inputs: reads.add(inputs[0].dtype))
    assert torch.isfinite(engine.infer(ragged_batch())["log_probs"]).all()
    assert reads == {read}


def test_the_gradient_is_that_of_the_two_factors_written_out(qwen2):
    """For W + s B A with B = 0: dB = s dW A^T, dA = 0, with dW from a model without adapter."""
    batch = ragged_batch()
    engine, plain = make_engine(qwen2, model=LORA, grad_clip=None), make_engine(qwen2, grad_clip=None)
    for one in (engine, plain):
        one.optimizer.step, one.optimizer.zero_grad = (lambda *a, **k: None), (lambda *a, **k: None)
        one.train_batch(batch, policy_loss())
    layer = engine.model.model.layers[1].mlp.up_proj
    whole = plain.model.model.layers[1].mlp.up_proj.weight.grad
    factor = layer.lora_A["default"].weight.detach()
    torch.testing.assert_close(layer.lora_B["default"].weight.grad, 2.0 * whole @ factor.t(), atol=1e-7, rtol=1e-4)
    assert layer.lora_A["default"].weight.grad.abs().max() == 0


def test_what_goes_to_the_sampler_is_a_plain_model_with_the_adapter_merged(qwen2, tmp_path):
    engine, batch = trained(qwen2), ragged_batch()
    other = make_engine(qwen2, trains=False)
    other.load_weights(engine.export_weights())
    expected = engine.infer(batch)["log_probs"]
    torch.testing.assert_close(other.infer(batch)["log_probs"], expected, atol=1e-5, rtol=1e-5)
    assert relative_error(expected, make_engine(qwen2).infer(batch)["log_probs"]) > 1e-3
    engine.save_hf(tmp_path / "whole")
    again = make_engine(tmp_path / "whole", trains=False)
    torch.testing.assert_close(again.infer(batch)["log_probs"], expected, atol=1e-5, rtol=1e-5)


def test_the_reference_policy_is_the_base_and_no_second_copy(qwen2):
    engine, batch = trained(qwen2), ragged_batch()
    reference = AdapterBaseEngine(engine)
    assert torch.equal(reference.infer(batch)["log_probs"], make_engine(qwen2).infer(batch)["log_probs"])
    assert relative_error(engine.infer(batch)["log_probs"], reference.infer(batch)["log_probs"]) > 1e-3
    engine.train_batch(batch, SFTLoss())  # what is trained did not change with the switch
    assert sum(p.requires_grad for p in engine.model.parameters()) == 28


def test_a_checkpoint_holds_the_adapter_alone_and_resumes_bitwise(qwen2, tmp_path):
    engine = trained(qwen2)
    state = engine.state()
    assert set(state.section("model")) == set(lora.adapter_names(engine.model).values())
    write_part(tmp_path / "actor", state, hf=engine.hf_writer())
    folder = tmp_path / "actor" / "huggingface"
    assert sorted(f.name for f in folder.iterdir()) >= ["adapter_config.json", "adapter_model.safetensors"]
    assert not (folder / "model.safetensors").exists()
    other = make_engine(qwen2, model=LORA, seed=9)
    other.load_state(read_part(tmp_path / "actor"))
    for one in (engine, other):
        one.train_batch(ragged_batch(seed=7), SFTLoss())
    a, b = engine.state(), other.state()
    assert all(torch.equal(tensor, b.tensors[name]) for name, tensor in a.tensors.items())


def test_peft_loads_the_adapter_of_a_checkpoint(qwen2, tmp_path):
    engine, batch = trained(qwen2), ragged_batch()
    write_part(tmp_path / "actor", engine.state(), hf=engine.hf_writer())
    base = AutoModelForCausalLM.from_pretrained(qwen2)
    model = PeftModel.from_pretrained(base, tmp_path / "actor" / "huggingface").eval()
    engine.model.eval()
    ids = batch.batch["input_ids"][:2]
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, engine.model(ids).logits, atol=1e-5, rtol=1e-5)


def test_training_goes_on_from_an_adapter_with_its_own_settings(qwen2, tmp_path):
    engine, batch = trained(qwen2), ragged_batch()
    write_part(tmp_path / "actor", engine.state(), hf=engine.hf_writer())
    again = make_engine(qwen2, model={"lora_adapter_path": str(tmp_path / "actor" / "huggingface")})
    assert torch.equal(again.infer(batch)["log_probs"], engine.infer(batch)["log_probs"])
    assert again.model.peft_config["default"].r == 4 and again.model.peft_config["default"].lora_alpha == 8
    again.train_batch(batch, SFTLoss())
    with pytest.raises(ConfigError, match=r"lora_rank.*another rank.*Got 16.*4"):
        folder = str(tmp_path / "actor" / "huggingface")
        make_engine(qwen2, model={"lora_adapter_path": folder, "lora_rank": 16})


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ({"target_modules": ["q_proj", "v_prj"]}, r"target_modules.*Got 'v_prj'.*Did you mean 'v_proj'"),
        ({"exclude_modules": ["lmhead"]}, r"exclude_modules.*Got 'lmhead'.*Did you mean 'lm_head'"),
        ({"lora_rank": -1}, r"lora_rank.*positive"),
        ({"target_modules": "nothing_at_all"}, r"target_modules"),
    ],
    ids=["target", "exclude", "rank", "pattern"],
)
def test_names_that_match_nothing_are_an_error_with_the_nearest_name(qwen2, setting, says):
    with pytest.raises(ConfigError, match=says):
        make_engine(qwen2, model={**LORA, **setting})


@pytest.mark.parametrize("kind", ["cpu", "meta"])
@pytest.mark.parametrize(
    ("targets", "says"),
    [
        (("q_proj", "lm_head"), r"adapter on lm_head.*is that of model\.embed_tokens\.weight.*Leave lm_head out"),
        (".*(q_proj|lm_head)", r"target_modules: an adapter on lm_head cannot be merged.*Got '\.\*"),
        (".*(q_proj|embed_tokens)", r"this one trains model\.embed_tokens\.lora_embedding_A too"),
    ],
)
def test_an_adapter_on_a_weight_of_two_names_is_refused_by_both(tmp_path, kind, targets, says):
    path = model_dir(tmp_path, "qwen2", tie_word_embeddings=True)
    with pytest.raises(ConfigError, match=says):
        lora.add_adapter(load_causal_lm(str(path), device=kind), lora.LoraSettings(4, target_modules=targets), seed=0)
    lora.add_adapter(load_causal_lm(str(path), device=kind), lora.LoraSettings(4), seed=0)  # all-linear has no head


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"target_modules": ["q_proj", "lm_head"]}, r"lora_adapter_path: an adapter on lm_head cannot be merged"),
        ({"layer_replication": [[0, 2], [0, 2]]}, r"layers\.0\.self_attn\.q_proj.*is that of model\.layers\.2"),
        ({"modules_to_save": ["lm_head"]}, r"this one trains lm_head\.modules_to_save\.weight too"),
        ({"use_dora": True}, r"this one trains .*q_proj\.lora_magnitude_vector"),
        ({"bias": "lora_only"}, r"this one trains .*q_proj\.base_layer\.bias too"),
        ({"trainable_token_indices": [3]}, r"this one trains model\.embed_tokens\.token_adapter"),
        ({"alora_invocation_tokens": [3]}, r"no LoRA adapter.*Got 'aLoRA'"),
    ],
    ids=lambda given: next(iter(given)) if isinstance(given, dict) else "",
)
def test_an_adapter_of_peft_that_no_plain_weight_could_hold_is_refused(tmp_path, given, says):
    path = model_dir(tmp_path, "qwen2", tie_word_embeddings=True)
    config = LoraConfig(**{"r": 2, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM", **given})
    get_peft_model(AutoModelForCausalLM.from_pretrained(path), config).save_pretrained(tmp_path / "adapter")
    with pytest.raises((ConfigError, ModelError), match=says):
        make_engine(path, model={"lora_adapter_path": str(tmp_path / "adapter")})


def test_only_the_named_modules_get_an_adapter(qwen2):
    engine = make_engine(qwen2, model={**LORA, "target_modules": ["q_proj", "v_proj"]})
    names = list(lora.adapter_names(engine.model))
    assert len(names) == 2 * 2 * 2 and all(".q_proj." in name or ".v_proj." in name for name in names)
    fewer = make_engine(qwen2, model={**LORA, "exclude_modules": ["q_proj"]})
    assert len(lora.adapter_names(fewer.model)) == 2 * 6 * 2


def test_a_folder_without_an_adapter_and_one_of_another_model_are_told(qwen2, tmp_path):
    with pytest.raises(ModelError, match=r"adapter_config\.json.*lora_adapter_path|lora_adapter_path.*adapter_config"):
        make_engine(qwen2, model={"lora_adapter_path": str(tmp_path)})
    engine = trained(model_dir(tmp_path, "qwen2", hidden=64), steps=1)
    write_part(tmp_path / "actor", engine.state(), hf=engine.hf_writer())
    with pytest.raises(ModelError, match=r"belongs to another model"):
        make_engine(qwen2, model={"lora_adapter_path": str(tmp_path / "actor" / "huggingface")})


def test_a_whole_model_does_not_fit_into_one_with_an_adapter(qwen2):
    engine = make_engine(qwen2, model=LORA)
    with pytest.raises(ModelError, match=r"takes over adapters"):
        engine.load_weights(make_engine(qwen2).export_weights())
    with pytest.raises(CheckpointError, match=r"do not fit"):
        engine.load_state(make_engine(qwen2).state())


def test_the_head_of_a_value_model_is_trained_and_saved_as_a_whole(qwen2):
    engine = make_engine(qwen2, kind="value", model=LORA)
    assert engine.model.score.weight.requires_grad and "score" not in str(engine.model.peft_config["default"].r)
    engine.train_batch(ragged_batch(), PPOValueLoss(CriticConfig()))
    names = set(engine.state().section("model"))
    assert "base_model.model.score.weight" in names
    other = make_engine(qwen2, kind="value", model=LORA, seed=5)
    other.load_state(engine.state())
    batch = ragged_batch()
    assert torch.equal(other.infer(batch, ("values",))["values"], engine.infer(batch, ("values",))["values"])


@pytest.mark.parametrize("extra", [{"use_fused_kernels": True}, {"enable_gradient_checkpointing": True}], ids=str)
def test_it_works_with_the_fused_head_and_with_gradient_checkpointing(qwen2, extra):
    head = {"target_modules": ["q_proj", "lm_head"]}
    batch, found = grouped_batch(), []
    for settings in ({}, extra):
        engine = trained(qwen2, model={**head, **settings})
        found.append(gradients(engine, batch, policy_loss()))
    assert found[1][0] == pytest.approx(found[0][0], rel=1e-4) and relative_error(found[1][1], found[0][1]) < 1e-3


def test_sharded_engines_train_save_and_export_the_same_adapter(qwen2, group):
    engines = []
    for name in ("plain", "fsdp2"):
        engine = ENGINES.get(name)(
            HFModelConfig(path=str(qwen2), **LORA), FSDPEngineConfig(), OptimizerConfig(lr=1e-2), seed=3
        )
        for seed in range(2):
            engine.train_batch(ragged_batch(seed=seed), SFTLoss())
        engines.append(engine)
    plain, ours = engines
    batch = ragged_batch()
    expected, found = plain.state().section("model"), ours.state().section("model")
    assert set(found) == set(expected)
    assert all(torch.allclose(found[name], expected[name], atol=1e-5) for name in expected)
    weights = dict(plain.export_weights())
    assert all(torch.allclose(t, weights[name], atol=1e-5) for name, t in ours.export_weights())
    base, other = AdapterBaseEngine(plain).infer(batch), AdapterBaseEngine(ours).infer(batch)
    torch.testing.assert_close(other["log_probs"], base["log_probs"], atol=1e-5, rtol=1e-5)
    ours.load_state(plain.state())
    torch.testing.assert_close(ours.infer(batch)["log_probs"], plain.infer(batch)["log_probs"], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_sharded_engines_train_an_adapter_over_a_base_of_16_bits(qwen2, group, dtype):
    """In float32 the sharded engine's activations are float32 and the plain one's 16 bits: they agree to 16 bits."""
    section, batch = FSDPEngineConfig(model_dtype="bfloat16", dtype=dtype), ragged_batch()
    log_probs = []
    for name in ("plain", "fsdp2"):
        engine = ENGINES.get(name)(HFModelConfig(path=str(qwen2), **LORA), section, OptimizerConfig(lr=1e-2), seed=3)
        assert {p.dtype for p in engine.model.parameters() if p.requires_grad} == {torch.float32}
        before = engine.infer(batch)["log_probs"]
        for seed in range(2):
            engine.train_batch(ragged_batch(seed=seed), SFTLoss())
        log_probs.append(engine.infer(batch)["log_probs"])
        assert (log_probs[-1] - before).abs().max() > 0.1
        assert {tensor.dtype for name, tensor in engine.state().section("model").items()} == {torch.float32}
    torch.testing.assert_close(log_probs[1], log_probs[0], atol=0.05, rtol=0)


def test_the_adapter_knows_its_base(qwen2, tmp_path):
    engine = trained(qwen2, steps=1)
    write_part(tmp_path / "actor", engine.state(), hf=engine.hf_writer())
    config = json.loads((tmp_path / "actor" / "huggingface" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(qwen2) and config["task_type"] == "CAUSAL_LM" and config["r"] == 4
