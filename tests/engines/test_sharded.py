"""FSDP and FSDP2 in one process: a group of one, without a port."""

from __future__ import annotations

import json

import pytest
import torch
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from tests.dist.engine_cells import gathered_gradient
from tests.engines.builders import gradients, make_engine, model_dir, ragged_batch, relative_error
from verl.algorithms.losses import PPOPolicyLoss
from verl.checkpoint import CheckpointReader, CheckpointWriter
from verl.config import ActorConfig, FSDPEngineConfig, HFModelConfig, OptimizerConfig
from verl.engines import sharding
from verl.engines.fsdp import FSDPEngine
from verl.engines.fsdp2 import FSDP2Engine
from verl.errors import CheckpointError, ConfigError, EngineError, NotBuiltError
from verl.metrics import notices, reset_notices

pytestmark = pytest.mark.usefixtures("group")


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return model_dir(tmp_path_factory.mktemp("models"), "qwen2", tie_word_embeddings=True)


@pytest.fixture(params=[FSDPEngine, FSDP2Engine], ids=["fsdp", "fsdp2"])
def cls(request):
    return request.param


def engine_of(path, cls=FSDP2Engine, kind="causal_lm", optim=None, engine=None, trains=True, **arguments):
    return cls(
        HFModelConfig(path=str(path)),
        FSDPEngineConfig(**(engine or {})),
        OptimizerConfig(**{"lr": 1e-2, **(optim or {})}) if trains else None,
        kind=kind,
        **{"total_training_steps": 10, "seed": 3, **arguments},
    )


def policy_loss():
    return PPOPolicyLoss(ActorConfig())


def test_one_process_computes_what_the_plain_engine_computes(path, cls):
    ours, plain, batch = engine_of(path, cls), make_engine(path, seed=3), ragged_batch()
    torch.testing.assert_close(ours.infer(batch)["log_probs"], plain.infer(batch)["log_probs"], atol=1e-6, rtol=1e-6)
    loss, gradient = gathered_gradient(ours, batch, policy_loss())
    expected_loss, expected = gradients(plain, batch, policy_loss())
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    assert relative_error(gradient, expected) < 1e-6


def test_counts_parameters_and_names_them_as_the_plain_engine_does(path, cls):
    ours, plain = engine_of(path, cls), make_engine(path)
    assert ours.num_parameters == plain.num_parameters
    assert ours.train_flops([5, 7]) == plain.train_flops([5, 7])
    assert list(dict(ours.export_weights())) == list(dict(plain.export_weights()))


def test_tied_embeddings_are_one_sharded_parameter(path):
    engine = engine_of(path)
    model = engine.model
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert all(isinstance(p, DTensor) for p in model.parameters())
    assert engine.unit_names == ["model.layers.0", "model.layers.1"]


def test_tied_embeddings_are_in_one_flat_parameter(path):
    engine = engine_of(path, FSDPEngine)
    outside = [p for name, p in engine.blueprint.named_parameters() if "layers" not in name]
    assert len(outside) == 2  # embeddings and last norm; the head is the embeddings
    assert next(engine.model.parameters()).numel() == sum(p.numel() for p in outside)
    assert len(list(engine.model.parameters())) == 3


def test_exported_weights_come_one_layer_at_a_time(path, cls):
    ours, seen = engine_of(path, cls), []
    for unit in ours._units(first_only=True):
        seen.append({name.split(".")[2] if "layers" in name else "outside" for name in unit})
    assert seen == [{"outside"}, {"0"}, {"1"}, {"outside"}]


def test_a_checkpoint_loads_in_the_plain_engine_and_with_transformers(path, cls, tmp_path):
    ours = engine_of(path, cls)
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
def test_other_optimizers_resume_bitwise(path, cls, optim):
    first, second = engine_of(path, cls, optim=optim), engine_of(path, cls, optim=optim)
    first.train_batch(ragged_batch(seed=0), policy_loss())
    second.load_state(first.state())
    for engine in (first, second):
        engine.train_batch(ragged_batch(seed=1), policy_loss())
    a, b = first.state(), second.state()
    assert any(name.startswith("optimizer/") for name in a.tensors)
    assert all(torch.equal(tensor, b.tensors[name]) for name, tensor in a.tensors.items())


@pytest.mark.parametrize(
    ("cls", "name"), [(FSDP2Engine, "Adafactor"), (FSDP2Engine, "Rprop"), (FSDPEngine, "Adafactor")]
)
def test_an_optimizer_that_cannot_work_on_pieces_is_refused_before_training(path, cls, name):
    with pytest.raises(ConfigError, match=rf"optimizer.*sharded weights.*Got '{name}'"):
        engine_of(path, cls, optim={"optimizer": name})


def test_linear_maps_are_not_shared_with_the_first_form_of_fsdp(path):
    with pytest.raises(NotBuiltError, match="strategy=fsdp2"):
        engine_of(path, FSDPEngine, engine={"tensor_parallel_size": 2})


def test_a_state_of_another_optimizer_is_refused(path, cls):
    state = engine_of(path, cls, optim={"optimizer": "SGD", "override_optimizer_config": {"momentum": 0.9}}).state()
    with pytest.raises(CheckpointError, match="another optimizer"):
        engine_of(path, cls).load_state(state)


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


def test_settings_of_the_other_form_have_no_effect_and_say_so(path):
    reset_notices()
    engine_of(path, FSDP2Engine, trains=False, engine={"use_orig_params": True})
    assert "no effect" in notices()["use_orig_params"]
    engine_of(path, FSDPEngine, trains=False, engine={"offload_policy": True})
    assert "no effect" in notices()["offload_policy"]


def test_a_frozen_engine_does_not_train(path, cls):
    with pytest.raises(EngineError, match="frozen"):
        engine_of(path, cls, trains=False).train_batch(ragged_batch(), policy_loss())


def test_the_plain_engine_says_which_sharding_settings_it_leaves_without_effect(path):
    reset_notices()
    changed = {"reshard_after_forward": False, "fsdp_size": 8, "wrap_policy": {"min_num_params": 5}}
    make_engine(path, trains=False, engine=changed)
    assert set(notices()) == {*list(changed)[:2], "min_num_params"}
