"""FSDP2 in one process: a group of one, without a port."""

from __future__ import annotations

import json

import pytest
import torch
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from tests.dist.engine_cells import whole_gradient
from tests.harness.engines import gradients, make_engine, model_dir, policy_loss, ragged_batch, relative_error
from verl.checkpoint import CheckpointReader, CheckpointWriter
from verl.config import FSDPEngineConfig, HFModelConfig, OptimizerConfig
from verl.config.machine.topology import backend_of
from verl.engines import sharding
from verl.engines.fsdp2 import FSDP2Engine
from verl.errors import CheckpointError, ConfigError, EngineError
from verl.metrics import notices, reset_notices
from verl.registry import ENGINES

pytestmark = pytest.mark.usefixtures("group")


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return model_dir(tmp_path_factory.mktemp("models"), "qwen2", tie_word_embeddings=True)


def engine_of(path, kind="causal_lm", optim=None, engine=None, trains=True, **arguments):
    return FSDP2Engine(
        HFModelConfig(path=str(path)),
        FSDPEngineConfig(**(engine or {})),
        OptimizerConfig(**{"lr": 1e-2, **(optim or {})}) if trains else None,
        kind=kind,
        **{"total_training_steps": 10, "seed": 3, **arguments},
    )


def test_one_process_computes_what_the_plain_engine_computes(path):
    ours, plain, batch = engine_of(path), make_engine(path, seed=3), ragged_batch()
    torch.testing.assert_close(ours.infer(batch)["log_probs"], plain.infer(batch)["log_probs"], atol=1e-6, rtol=1e-6)
    loss, gradient = gradients(ours, batch, policy_loss(), whole_gradient)
    expected_loss, expected = gradients(plain, batch, policy_loss())
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    assert relative_error(gradient, expected) < 1e-6


def test_counts_parameters_and_names_them_as_the_plain_engine_does(path):
    ours, plain = engine_of(path), make_engine(path)
    assert ours.num_parameters == plain.num_parameters
    assert ours.train_flops([5, 7]) == plain.train_flops([5, 7])
    assert list(dict(ours.export_weights())) == list(dict(plain.export_weights()))


def test_tied_embeddings_are_one_sharded_parameter(path):
    engine = engine_of(path)
    model = engine.model
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert all(isinstance(p, DTensor) for p in model.parameters())
    assert engine.unit_names == ["model.layers.0", "model.layers.1"]


def test_exported_weights_come_one_layer_at_a_time(path):
    ours, seen = engine_of(path), []
    for unit in ours._units():
        seen.append({name.split(".")[2] if "layers" in name else "outside" for name in unit})
    assert seen == [{"outside"}, {"0"}, {"1"}, {"outside"}]


def test_a_checkpoint_loads_in_the_plain_engine_and_with_transformers(path, tmp_path):
    ours = engine_of(path)
    ours.train_batch(ragged_batch(), policy_loss())
    with CheckpointWriter(tmp_path) as writer:
        folder = writer.save(1, {"actor": ours.state()}, hf={"actor": ours.hf_writer()})
    expected = dict(ours.export_weights())
    plain = make_engine(path, seed=3)
    plain.load_state(CheckpointReader(folder).load("actor"))
    assert all(torch.equal(tensor, expected[name]) for name, tensor in plain.export_weights())
    config = json.loads((folder / "actor" / "huggingface" / "config.json").read_text())
    assert config["architectures"] == ["Qwen2ForCausalLM"]
    loaded = AutoModelForCausalLM.from_pretrained(folder / "actor" / "huggingface").state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize(
    "optim",
    [
        {"optimizer": "SGD", "override_optimizer_config": {"momentum": 0.9}},
        {"optimizer": "AdamW", "override_optimizer_config": {"foreach": True}},
        {"optimizer": "Adagrad"},
    ],
    ids=["SGD", "AdamW on the host's counter", "Adagrad"],
)
def test_other_optimizers_resume_bitwise(path, optim):
    first, second = engine_of(path, optim=optim), engine_of(path, optim=optim)
    first.train_batch(ragged_batch(seed=0), policy_loss())
    second.load_state(first.state())
    for engine in (first, second):
        engine.train_batch(ragged_batch(seed=1), policy_loss())
    a, b = first.state(), second.state()
    assert any(name.startswith("optimizer/") for name in a.tensors)
    assert all(torch.equal(tensor, b.tensors[name]) for name, tensor in a.tensors.items())


@pytest.mark.parametrize("name", ["Adafactor", "Rprop"])
def test_an_optimizer_that_cannot_work_on_pieces_is_refused_before_training(path, name):
    with pytest.raises(ConfigError, match=rf"optimizer.*sharded weights.*Got '{name}'"):
        engine_of(path, optim={"optimizer": name})


def test_a_state_of_another_optimizer_is_refused(path):
    state = engine_of(path, optim={"optimizer": "SGD", "override_optimizer_config": {"momentum": 0.9}}).state()
    with pytest.raises(CheckpointError, match="another optimizer"):
        engine_of(path).load_state(state)


def test_units_by_size_are_the_smallest_modules_that_are_large_enough(path):
    model = engine_of(path).blueprint
    sizes = {name: sum(p.numel() for p in m.parameters()) for name, m in model.named_modules()}
    half = [name for name, _ in sharding.unit_modules(model, sizes["model.layers.0.mlp"])]
    assert half == ["model.layers.0.mlp", "model.layers.1.mlp"]  # the rest of a layer is smaller; the head is tied
    assert sharding.unit_of("model.layers.1.mlp.up_proj.weight", half) == "model.layers.1.mlp"
    assert sharding.unit_of("model.layers.1.self_attn.q_proj.weight", half) == ""
    whole = [name for name, _ in sharding.unit_modules(model, sizes["model.layers.0"])]
    assert whole == ["model.layers.0", "model.layers.1"]
    reset_notices()
    assert sharding.unit_modules(model, 10 * sizes[""]) == [] and "gathered as a whole" in str(notices())


def test_the_first_form_of_fsdp_runs_on_the_second_and_says_so():
    assert (backend_of("fsdp", 1), backend_of("fsdp", 2), ENGINES.get("fsdp")) == ("fsdp2", "fsdp2", FSDP2Engine)
    assert "FSDP2" in notices()["strategy=fsdp"]


def test_a_frozen_engine_does_not_train(path):
    with pytest.raises(EngineError, match="frozen"):
        engine_of(path, trains=False).train_batch(ragged_batch(), policy_loss())


def test_the_plain_engine_says_which_sharding_settings_it_leaves_without_effect(path):
    changed = {"reshard_after_forward": False, "fsdp_size": 8, "wrap_policy": {"min_num_params": 5}}
    make_engine(path, trains=False, engine=changed)
    assert set(notices()) == {*list(changed)[:2], "min_num_params"}
