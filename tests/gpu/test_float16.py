"""float16 on CUDA: gradients keep their bits with a scaled loss, and a step that overflows changes nothing."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch

from tests.gpu.test_sharded import engine_of
from tests.harness.engines import gradients, make_engine, model_dir, ragged_batch, relative_error
from verl.algorithms.losses import PPOPolicyLoss
from verl.config import ActorConfig


def loss() -> PPOPolicyLoss:
    return PPOPolicyLoss(ActorConfig())


def test_gradients_are_those_of_float32() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path, batch = model_dir(Path(folder), hidden=64), ragged_batch()
        wide, half, bf16 = (
            gradients(make_engine(path, engine={"dtype": dtype}, device="cuda"), batch, loss())[1]
            for dtype in ("float32", "float16", "bfloat16")
        )
        assert relative_error(half, wide) < 5e-3
        assert relative_error(half, wide) < relative_error(bf16, wide) / 3


def test_an_overflow_is_skipped_and_halves_the_scale() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = model_dir(Path(folder))
        for engine in (
            make_engine(path, engine={"dtype": "float16"}, device="cuda"),
            engine_of(path, dtype="float16"),
        ):
            engine.loss_scale.value = 2.0**60
            before = {name: tensor.clone() for name, tensor in engine.export_weights()}
            metrics = engine.train_batch(ragged_batch(), loss()).values()
            assert metrics["skipped_overflow_step"] == 1 and engine.loss_scale.value == 2.0**59
            assert all(torch.equal(tensor, before[name]) for name, tensor in engine.export_weights())
            engine.loss_scale.value = 65536.0
            assert engine.train_batch(ragged_batch(), loss()).values()["skipped_overflow_step"] == 0
            assert not all(torch.equal(tensor, before[name]) for name, tensor in engine.export_weights())
