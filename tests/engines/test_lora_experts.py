"""Adapters on weights that are no linear module's: the stacked experts of a mixture, and its router."""

from __future__ import annotations

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from tests.harness.engines import make_engine, model_dir, ragged_batch, relative_error
from verl.algorithms.losses import SFTLoss
from verl.checkpoint.part import read_part, write_part
from verl.config import FSDPEngineConfig, HFModelConfig, OptimizerConfig
from verl.engines.adapters import AdapterBaseEngine
from verl.errors import ConfigError
from verl.models import lora
from verl.models.hf_folder import read_weights
from verl.models.lora import LoraSettings
from verl.models.merging import merge
from verl.registry import ENGINES
from verl.rollout.hf.adapter import AdapterBuffer
from verl.weight_sync import chunk_weights

EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
ON_EXPERTS = {"lora_rank": 2, "lora_alpha": 6, "target_modules": ["q_proj"], "target_parameters": EXPERTS}
FAMILIES = {
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2},
}


@pytest.fixture(scope="module", params=FAMILIES)
def path(request, tmp_path_factory):
    return model_dir(tmp_path_factory.mktemp("models"), request.param, **FAMILIES[request.param])


def trained(path, steps: int = 2, name: str = "plain", **model):
    """An engine whose adapter has moved away from zero."""
    settings = HFModelConfig(path=str(path), **{**ON_EXPERTS, **model})
    engine = ENGINES.get(name)(settings, FSDPEngineConfig(), OptimizerConfig(lr=1e-2), seed=3)
    for seed in range(steps):
        engine.train_batch(ragged_batch(seed=seed), SFTLoss())
    return engine


def same(mine, theirs):
    return mine.keys() == theirs.keys() and all(torch.equal(mine[name], tensor) for name, tensor in theirs.items())


def test_exported_experts_are_those_of_the_base_plus_the_product_of_their_own_factors(path):
    """Factor A has E blocks of r rows; B has r groups of E columns, as peft lays them out."""
    engine, base = trained(path), make_engine(path, trains=False)
    merged = make_engine(path, trains=False)
    merged.load_weights(engine.export_weights())
    mine, theirs = dict(merged.model.named_parameters()), dict(base.model.named_parameters())
    factors = dict(engine.export_adapter())
    start = "model.layers.1.mlp.experts"
    for kind, inner in (("gate_up_proj", "base_layer."), ("down_proj", "")):
        if f"{lora.PREFIX}{start}.{inner}lora_A.weight" not in factors:
            inner = ""
        owner = engine.model.get_submodule(f"{start}.{inner}".rstrip("."))
        assert owner.parameter_name == kind
        first, second = (factors[f"{lora.PREFIX}{start}.{inner}lora_{which}.weight"] for which in "AB")
        for expert in range(4):
            product = second[:, expert::4] @ first[2 * expert : 2 * expert + 2]
            before, after = theirs[f"{start}.{kind}"][expert], mine[f"{start}.{kind}"][expert]
            shape = product.t() if "gpt_oss" in str(path) else product
            torch.testing.assert_close(after, before + 3.0 * shape, rtol=0, atol=1e-6)
            assert relative_error(after, before) > 1e-3
    batch = ragged_batch()
    expected = engine.infer(batch)["log_probs"]
    torch.testing.assert_close(merged.infer(batch)["log_probs"], expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(AdapterBaseEngine(engine).infer(batch)["log_probs"], base.infer(batch)["log_probs"])


def test_its_checkpoint_resumes_is_loaded_by_peft_and_becomes_the_exported_model(path, tmp_path):
    engine, batch = trained(path), ragged_batch()
    write_part(tmp_path / "actor", engine.state(), hf=engine.hf_writer())
    folder = tmp_path / "actor" / "huggingface"
    other = trained(path, steps=0)
    other.load_state(read_part(tmp_path / "actor"))
    again = make_engine(path, model={"lora_adapter_path": str(folder)})
    expected = engine.infer(batch)["log_probs"]
    for one in (other, again):
        assert torch.equal(one.infer(batch)["log_probs"], expected)
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(path), folder).eval()
    engine.model.eval()
    ids = batch.batch["input_ids"][:2]
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, engine.model(ids).logits, atol=1e-5, rtol=1e-5)
    assert same(read_weights(merge(tmp_path / "actor", tmp_path / "merged")), dict(engine.export_weights()))


def test_the_sampler_merges_what_arrives_into_the_bits_that_the_trainer_would_have_sent(path):
    engine = trained(path)
    model = make_engine(path, trains=False).model
    buffer = AdapterBuffer(model, LoraSettings.of(HFModelConfig(path=str(path), **ON_EXPERTS)))
    for version in range(2):  # the second is merged into the base again
        buffer.receive(chunk_weights(engine.export_adapter(), 1 << 20, version), version)
    expected = make_engine(path, trains=False)
    expected.load_weights(engine.export_weights())
    assert same(dict(model.named_parameters()), dict(expected.model.named_parameters()))


def test_sharded_engines_train_the_same_adapter(path, group):
    plain, sharded = trained(path), trained(path, name="fsdp2")
    expected, found = plain.state().section("model"), sharded.state().section("model")
    assert set(found) == set(expected)
    assert all(torch.allclose(found[name], expected[name], atol=1e-5) for name in expected)
    weights = dict(plain.export_weights())
    assert all(torch.allclose(t, weights[name], atol=1e-5) for name, t in sharded.export_weights())


def test_a_name_that_no_such_weight_has_is_an_error_with_the_nearest_one(path):
    with pytest.raises(ConfigError, match=r"target_parameters.*Got 'mlp.experts.gate_up'.*'mlp.experts.gate_up_proj'"):
        trained(path, steps=0, target_parameters=["mlp.experts.gate_up"])
    with pytest.raises(ConfigError, match=r"no weight outside linear modules.*Got 'q_proj.weight'"):
        trained(path, steps=0, target_parameters=["q_proj.weight"])


def test_muon_leaves_the_factors_of_experts_to_adamw(path):
    """Those of all experts lie in one matrix."""
    engine = make_engine(path, model=ON_EXPERTS, optim={"optimizer": "Muon"})
    engine.train_batch(ragged_batch(), SFTLoss())
    names = [name for name in engine.state().tensors if name.startswith("optimizer/")]
    muon = {name for name in names if name.endswith("/momentum_buffer")}
    assert len(muon) == 4 and all(".q_proj." in name for name in muon)
    assert any(".experts." in name and name.endswith("/exp_avg") for name in names)


def test_everything_linear_is_the_experts_and_the_router_as_well(path):
    """peft's own reading of all-linear for families whose files hold experts as linear layers."""
    engine = trained(path, target_modules="all-linear", target_parameters=None)
    other = make_engine(path, trains=False)
    other.load_weights(engine.export_weights())
    batch = ragged_batch()
    torch.testing.assert_close(other.infer(batch)["log_probs"], engine.infer(batch)["log_probs"], atol=1e-5, rtol=1e-5)
