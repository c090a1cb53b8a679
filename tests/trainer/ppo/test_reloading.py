"""A sampler with rounded weights is compared with the trainer after each weight sync; a run ends where it is wrong."""

from __future__ import annotations

import pytest
from safetensors.torch import load_file, save_file

from tests.harness.runs import prepare, train
from verl.errors import RolloutError
from verl.rollout.hf.quantized import QuantizedLinear, quantized_layers
from verl.rollout.hf.sampler import HFSampler

ROLLOUT = "actor_rollout_ref.rollout"
MEAN, MAX = (f"training/reload_log_probs_diff_{name}" for name in ("mean", "max"))
STEPS = "trainer.total_training_steps=2"


@pytest.fixture
def here(workplace):
    """A model whose log-probs depend on its layers: those of a new one are nearly uniform."""
    prepare(hidden=64, heads=4, kv_heads=2)
    weights = load_file("model/model.safetensors")
    save_file({n: t * 6 if t.dim() > 1 else t for n, t in weights.items()}, "model/model.safetensors")


@pytest.mark.parametrize("changes", [
    ("quantization=int8",), ("quantization=fp8", "checkpoint_engine.backend=shared_memory"),
], ids=["int8 in this process", "fp8 in another"])  # fmt: skip
def test_a_run_reports_after_each_weight_sync_how_far_the_sampler_is_from_the_trainer(here, changes):
    words = [f"{ROLLOUT}.{word}" for word in changes]
    seen = train(STEPS, "algorithm.rollout_correction.rollout_is=token", *words)
    for step, batch in zip(seen.metrics, seen.batches, strict=True):
        assert 1e-5 < step[MEAN] < 0.2 and step[MEAN] <= step[MAX]
        assert step["rollout/weights_mb"] > 0
        weights = batch.batch["rollout_is_weights"][batch.batch["response_mask"].bool()]
        assert 0 < (weights - 1).abs().max() < 0.5, "the correction sees the rounding"


def test_a_run_without_rounding_is_not_compared(here):
    assert MEAN not in train().metrics[0]


def test_an_adapter_is_rounded_with_the_base(here):
    adapter = [f"actor_rollout_ref.model.{word}" for word in ("lora_rank=4", "lora_alpha=8")]
    seen = train(STEPS, f"{ROLLOUT}.quantization=int8", *adapter)
    assert seen.metrics[1][MEAN] < 0.1


def test_a_wrong_scale_of_one_layer_ends_the_run(here, monkeypatch):
    update = HFSampler.update_weights

    async def damaged(self, chunks, version):
        await update(self, chunks, version)
        if version == 1:
            _, layer = list(quantized_layers(self.model))[-1]
            layer.scales.mul_(4)

    monkeypatch.setattr(HFSampler, "update_weights", damaged)
    with pytest.raises(
        RolloutError, match=r"quantization_tolerance: with the weights of step 1.*replica of rollout\[0\]"
    ):
        train(STEPS, f"{ROLLOUT}.quantization=int8")


def test_a_layer_that_keeps_its_old_weights_ends_the_run(here, monkeypatch):
    """Unnoticed where the weight arrives."""
    take = QuantizedLinear.take

    def stale(self, name, weight):
        if name.endswith("down_proj.weight") and self.is_loaded:
            return
        take(self, name, weight)
        self.is_loaded = True

    monkeypatch.setattr(QuantizedLinear, "is_loaded", False, raising=False)
    monkeypatch.setattr(QuantizedLinear, "take", stale)
    with pytest.raises(RolloutError, match=r"with the weights of step 1.*a scale or a layer of the sampler is wrong"):
        train(STEPS, f"{ROLLOUT}.quantization=int8", "actor_rollout_ref.actor.optim.lr=0.3")
