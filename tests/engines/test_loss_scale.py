from __future__ import annotations

import math
from dataclasses import replace

import torch

from tests.harness.engines import gradients, make_engine, parameter, policy_loss, ragged_batch, relative_error
from verl.algorithms.losses import SFTLoss
from verl.engines.loss_scale import INTERVAL, MOST, LossScale
from verl.engines.step import clip_and_step


def half(qwen2, **arguments):
    return make_engine(qwen2, engine={"dtype": "float16"}, **arguments)


def test_the_scale_halves_with_each_overflow_down_to_one_where_it_cannot_help():
    scale = LossScale(torch.float16)
    assert [scale.overflowed() for _ in range(17)] == [True] * 16 + [False]
    assert scale.value == 1.0


def test_the_scale_doubles_after_a_row_of_steps_without_overflow():
    scale = LossScale(torch.float16)
    for _ in range(INTERVAL - 1):
        scale.taken()
    scale.overflowed()
    for _ in range(INTERVAL - 1):
        scale.taken()
    assert scale.value == 32768.0
    scale.taken()
    assert scale.value == 65536.0
    for _ in range(20 * INTERVAL):
        scale.taken()
    assert scale.value == MOST


def test_other_dtypes_have_no_scale_and_their_loss_is_the_same_tensor():
    for dtype in (torch.float32, torch.bfloat16):
        scale, loss = LossScale(dtype), torch.ones(())
        assert scale.times(loss) is loss and not scale.overflowed() and scale.value == 1.0 and scale.state() == {}


def test_gradients_are_divided_by_the_scale_before_they_are_clipped():
    """(3, 4) times 65,536 is a gradient of norm 5, clipped to 1."""
    p, scale = parameter([3 * 65536.0, 4 * 65536.0]), LossScale(torch.float16)
    report = clip_and_step(torch.optim.SGD([p], lr=1.0), [p], max_norm=1.0, scale=scale)
    assert (report.grad_norm, report.loss_scale, report.skipped_overflow) == (5.0, 65536.0, False)
    torch.testing.assert_close(p.detach(), torch.tensor([-0.6, -0.8]))


def test_an_overflow_changes_no_weight_and_is_counted_apart_from_a_step_that_is_broken():
    scale = LossScale(torch.float16)
    scale.value = 2.0
    for skipped in ("skipped_overflow_step", "skipped_nonfinite_step"):
        p = parameter([1.0, math.inf])
        metrics = clip_and_step(torch.optim.SGD([p], lr=1.0), [p], max_norm=1.0, scale=scale).metrics(0.5).values()
        assert p.tolist() == [0.0, 0.0] and p.grad is None
        assert {n for n in ("skipped_overflow_step", "skipped_nonfinite_step") if metrics[n]} == {skipped}
        assert metrics["loss_scale"] == (2.0 if skipped == "skipped_overflow_step" else 1.0)
    assert scale.value == 1.0


def test_float16_gradients_agree_with_float32_and_are_lost_without_a_scale(qwen2):
    """The loss divided by 2^20 stands for one that is a mean over a million tokens."""
    batch = ragged_batch()

    class TinyLoss:
        outputs = ("log_probs",)

        def __call__(self, outputs, batch, norm):
            loss, metrics = policy_loss()(outputs, batch, norm)
            return loss * 2.0**-20, metrics

    _, expected = gradients(make_engine(qwen2), batch, TinyLoss())
    scaled, unscaled = half(qwen2), half(qwen2)
    unscaled.loss_scale.value = 1.0
    _, ours = gradients(scaled, batch, TinyLoss())
    _, lost = gradients(unscaled, batch, TinyLoss())
    assert relative_error(ours, expected) < 5e-3
    assert relative_error(lost, expected) > 0.1


def test_slopes_that_the_fused_head_expects_are_scaled_with_the_loss(qwen2):
    """Its gradient is made in the forward pass: without the scale it would be subnormal there."""
    batch, fused = ragged_batch(), {"use_fused_kernels": True}
    _, expected = gradients(make_engine(qwen2), batch, SFTLoss())
    _, ours = gradients(half(qwen2, model=fused), batch, SFTLoss())
    assert relative_error(ours, expected) < 5e-3


def test_an_overflow_in_a_run_halves_the_scale_and_the_next_step_is_taken(qwen2):
    engine, batch = half(qwen2), ragged_batch()
    engine.loss_scale.value = 2.0**40
    before = {name: tensor.clone() for name, tensor in engine.export_weights()}
    first = engine.train_batch(batch, policy_loss()).values()
    assert first["skipped_overflow_step"] == 1 and first["skipped_nonfinite_step"] == 0
    assert all(torch.equal(tensor, before[name]) for name, tensor in engine.export_weights())
    for _ in range(40):
        metrics = engine.train_batch(batch, policy_loss()).values()
        if not metrics["skipped_overflow_step"]:
            break
    assert metrics["loss_scale"] < 2.0**39 and math.isfinite(metrics["grad_norm"])
    assert not all(torch.equal(tensor, before[name]) for name, tensor in engine.export_weights())


def test_a_run_in_float16_resumes_bitwise_with_its_scale(qwen2):
    batch, engine = ragged_batch(), half(qwen2)
    engine.loss_scale.value, engine.loss_scale.steps = 1024.0, INTERVAL - 2
    engine.train_batch(batch, policy_loss())
    state = engine.state()
    kept = {name: tensor.clone() for name, tensor in state.tensors.items()}
    engine.train_batch(batch, policy_loss())
    expected = engine.state()
    assert expected.scalars["extra"]["loss_scale"] == {"value": 2048.0, "steps": 0}
    again = half(qwen2, seed=7)
    again.load_state(replace(state, tensors=kept))
    again.train_batch(batch, policy_loss())
    found = again.state()
    assert found.scalars["extra"] == expected.scalars["extra"]
    assert all(torch.equal(found.tensors[name], tensor) for name, tensor in expected.tensors.items())
