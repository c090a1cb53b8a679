from __future__ import annotations

import pytest
import torch

from tests.harness.engines import make_engine, model_dir, relative_error, train
from verl.checkpoint import EngineState
from verl.config import OptimizerConfig
from verl.engines.low_bit import narrowed, widened
from verl.engines.optimizer import build_optimizer

BYTES = {"AdamW8bit": 1, "AdamW4bit": 0.5, "AdamWFp8": 1}
"""Of a number of a moment, without the scale of its block."""


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return model_dir(tmp_path_factory.mktemp("model"), "qwen2", hidden=64)


def few_bits(name: str) -> dict[str, str]:
    return {"optimizer_impl": "torchao.optim", "optimizer": name, "lr_scheduler_type": "cosine", "lr": 1e-2}


@pytest.mark.parametrize("name", BYTES)
def test_moments_in_few_bits_train_near_float32_and_resume_bitwise(path, name):
    engine, wide = make_engine(path, optim=few_bits(name)), make_engine(path, optim={"lr_scheduler_type": "cosine"})
    train(engine, range(2))
    train(wide, range(2))
    held = [own["exp_avg"] for own in engine.optimizer.state.values() if hasattr(own["exp_avg"], "codes")]
    assert len(held) == 10
    assert all(m.codes.nbytes == BYTES[name] * m.numel() and m.scale.numel() <= m.numel() / 128 for m in held)
    state = engine.state()
    assert all(t.dtype == torch.float32 for n, t in state.tensors.items() if n.endswith("/exp_avg"))
    saved = EngineState({n: t.clone() for n, t in state.tensors.items()}, state.scalars)
    rate = train(engine, [2])["lr"]
    again = make_engine(path, optim=few_bits(name))
    again.load_state(saved)
    assert train(again, [2])["lr"] == rate < 1e-2
    expected, found = engine.state().tensors, again.state().tensors
    assert [n for n, t in expected.items() if not torch.equal(found[n], t)] == []
    train(wide, [2])
    names = [n for n in expected if n.startswith("model/")]
    one, other = (torch.cat([e.state().tensors[n].flatten() for n in names]) for e in (engine, wide))
    assert 0 < relative_error(one, other) < (0.1 if name == "AdamW4bit" else 0.05)


@pytest.mark.parametrize("name", BYTES)
def test_values_that_codes_stand_for_are_given_back_bit_for_bit(name):
    """Also of a block whose largest number is negative, which torchao would round to another scale, and of zeros."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.nn.Parameter(torch.zeros(64, 256))
    optimizer = build_optimizer([weight], OptimizerConfig(**few_bits(name)), "cpu")
    drawn = torch.randn(64, 256, generator=generator) * torch.logspace(-12, 0, 64)[:, None]
    drawn[5] = 0.0
    for key, values in (("exp_avg", drawn), ("exp_avg_sq", drawn.square())):
        moment = optimizer._new_buffer(weight, key == "exp_avg")
        moment.copy_(values)
        before = widened(moment)
        assert torch.equal(widened(narrowed(optimizer, weight, key, before.clone())), before)
