"""An engine that saved, loaded and went on is bitwise the engine that went on."""

from __future__ import annotations

import json

import pytest
import torch

from tests.harness.engines import make_engine, model_dir, train
from verl.checkpoint import CheckpointReader, CheckpointWriter, EngineState
from verl.errors import CheckpointError

SCHEDULE = {"lr": 1e-2, "lr_scheduler_type": "cosine", "lr_warmup_steps": 2}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    # Dropout makes the random generator part of the state.
    return model_dir(tmp_path_factory.mktemp("models"), "qwen2", attention_dropout=0.2, tie_word_embeddings=True)


def assert_same(found: EngineState, expected: EngineState) -> None:
    assert json.dumps(found.scalars, sort_keys=True) == json.dumps(expected.scalars, sort_keys=True)
    assert set(found.tensors) == set(expected.tensors)
    for name, tensor in expected.tensors.items():
        assert found.tensors[name].dtype == tensor.dtype and torch.equal(found.tensors[name], tensor), name


@pytest.mark.parametrize(
    "optim",
    [
        SCHEDULE,
        {**SCHEDULE, "optimizer": "SGD", "override_optimizer_config": {"momentum": 0.9}},
        {**SCHEDULE, "optimizer": "Adafactor", "override_optimizer_config": {"eps": [None, 1e-3]}},
    ],
    ids=["AdamW", "SGD with momentum", "Adafactor"],
)
@pytest.mark.parametrize("kind", ["causal_lm"])
def test_three_steps_equal_two_steps_a_checkpoint_and_one_step(path, tmp_path, optim, kind):
    torch.manual_seed(7)
    straight = make_engine(path, kind, optim=optim)
    expected = train(straight, range(3))

    torch.manual_seed(7)
    first = make_engine(path, kind, optim=optim)
    train(first, range(2))
    with CheckpointWriter(tmp_path) as writer:
        folder = writer.save(2, {"actor": first.state()}, hf={"actor": first.hf_writer()})
    torch.manual_seed(99)
    second = make_engine(path, kind, optim=optim, seed=5)
    second.load_state(CheckpointReader(folder).load("actor"))
    assert_same(second.state(), first.state())
    assert train(second, [2]) == expected
    assert_same(second.state(), straight.state())


def test_a_state_without_its_optimizer_section_loads_the_weights_alone(path):
    engine = make_engine(path)
    train(engine, range(2))
    fresh = make_engine(path)
    fresh.load_state(engine.state().only(["model"]))
    assert torch.equal(
        dict(fresh.export_weights())["model.norm.weight"], dict(engine.export_weights())["model.norm.weight"]
    )
    assert not fresh.optimizer.state


def test_bf16_training_resumes_bitwise_too(path):
    torch.manual_seed(7)
    engine = make_engine(path, engine={"dtype": "bfloat16"})
    train(engine, range(2))
    copy = {name: tensor.clone() for name, tensor in engine.state().tensors.items()}
    saved = EngineState(copy, json.loads(json.dumps(engine.state().scalars)))
    expected = train(engine, [2])
    again = make_engine(path, engine={"dtype": "bfloat16"})
    again.load_state(saved)
    assert train(again, [2]) == expected
    assert_same(again.state(), engine.state())


def test_a_checkpoint_of_another_architecture_is_refused(path, tmp_path):
    other = make_engine(model_dir(tmp_path, "llama"))
    with pytest.raises(CheckpointError, match=r"another architecture.*LlamaForCausalLM"):
        make_engine(path).load_state(other.state())


def test_a_checkpoint_of_another_size_is_refused_and_changes_nothing(path, tmp_path):
    other = make_engine(model_dir(tmp_path, "qwen2", hidden=64, tie_word_embeddings=True))
    engine = make_engine(path)
    before = [p.clone() for p in engine.model.parameters()]
    with pytest.raises(CheckpointError, match=r"another shape"):
        engine.load_state(other.state())
    assert all(torch.equal(a, b) for a, b in zip(before, engine.model.parameters()))


def test_the_state_of_another_optimizer_is_refused(path):
    adam = make_engine(path)
    train(adam, range(1))
    with pytest.raises(CheckpointError, match=r"another optimizer.*AdamW"):
        make_engine(path, optim={"optimizer": "SGD"}).load_state(adam.state())
