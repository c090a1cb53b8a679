"""Compiled layers give the numbers of the model as it is, for rows of changing lengths."""

from __future__ import annotations

import pytest
import torch

from tests.harness.models import tiny_model_dir
from verl.algorithms.losses import SFTLoss
from verl.config import FSDPEngineConfig, HFModelConfig, OptimizerConfig, replace
from verl.engines.plain import PlainEngine
from verl.models import compiled
from verl.protocol import DataProto


def batch(*lengths: int) -> DataProto:
    generator = torch.Generator().manual_seed(len(lengths))
    width = max(lengths)
    real = (torch.arange(width) < torch.tensor(lengths)[:, None]).long()
    ids = torch.randint(3, 200, (len(lengths), width), generator=generator) * real
    rows = {"input_ids": ids, "attention_mask": real, "responses": ids[:, 2:], "response_mask": real[:, 2:]}
    return DataProto.from_dict(tensors=rows)


def steps(folder, monkeypatch, setting: bool | None) -> tuple[list[float], torch.Tensor]:
    """Losses of three optimizer steps, and the log-probs after them."""
    monkeypatch.setattr(compiled, "BACKEND", "aot_eager")  # traces and cuts as inductor does, without a C compiler
    config = replace(FSDPEngineConfig(), use_torch_compile=setting)
    engine = PlainEngine(HFModelConfig(path=str(folder)), config, OptimizerConfig(lr=1e-2), total_training_steps=3)
    losses = []
    for rows in (batch(12, 7, 5), batch(9, 9), batch(17, 4, 3, 11)):
        losses.append(engine.train_batch(rows, SFTLoss()).values()["loss"])
        engine.step_scheduler()
    return losses, engine.infer(batch(8, 13))["log_probs"]


@pytest.mark.slow
def test_compiled_layers_train_as_the_others_do(tmp_path, monkeypatch):
    folder = tiny_model_dir(tmp_path / "model")
    plain, expected = steps(folder, monkeypatch, False)
    calls = torch._dynamo.utils.counters
    calls.clear()
    fast, found = steps(folder, monkeypatch, True)
    assert calls["frames"]["ok"] > 0, "something was compiled"
    assert calls["frames"]["ok"] < 20, "no step was compiled anew because its rows had other lengths"
    assert fast == pytest.approx(plain, rel=1e-5)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "setting, device, parameters, expected",
    [
        (None, "cuda", 1_500_000_000, True),
        (None, "cuda", 10_000_000, False),
        (None, "cpu", 1_500_000_000, False),
        (True, "cpu", 10_000_000, True),
        (False, "cuda", 1_500_000_000, False),
    ],
)
def test_unset_it_is_for_large_models_on_a_gpu(setting, device, parameters, expected):
    assert compiled.wants_compiling(setting, device, parameters) is expected
