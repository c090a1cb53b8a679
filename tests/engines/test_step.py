from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from tests.harness.engines import make_engine, model_dir, parameter, ragged_batch
from verl.algorithms.losses import PPOPolicyLoss
from verl.config import ActorConfig
from verl.engines.optimizer import move_optimizer_state
from verl.engines.step import clip_and_step, tell_broken_rows


def test_gradients_are_clipped_by_their_global_norm():
    """The norm of (3, 0) and (0, 4) is 5; clipped to 1 a plain step of 1.0 moves them by (0.6, 0) and (0, 0.8)."""
    first, second, unused = parameter([3.0, 0.0]), parameter([0.0, 4.0]), torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([first, second, unused], lr=1.0)
    report = clip_and_step(optimizer, [first, second, unused], max_norm=1.0)
    assert (report.grad_norm, report.lr, report.skipped_nonfinite) == (5.0, 1.0, False)
    torch.testing.assert_close(first.detach(), torch.tensor([-0.6, 0.0]))
    torch.testing.assert_close(second.detach(), torch.tensor([0.0, -0.8]))
    assert unused.item() == 1.0 and first.grad is None


@pytest.mark.parametrize("limit", [None, 0.0, 10.0])
def test_without_a_limit_or_below_it_nothing_is_scaled(limit):
    p = parameter([3.0, 4.0])
    clip_and_step(torch.optim.SGD([p], lr=1.0), [p], max_norm=limit)
    torch.testing.assert_close(p.detach(), torch.tensor([-3.0, -4.0]))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_norm_that_is_not_finite_skips_the_step(value):
    p = parameter([1.0, value])
    report = clip_and_step(torch.optim.SGD([p], lr=1.0), [p], max_norm=1.0)
    assert report.skipped_nonfinite and p.tolist() == [0.0, 0.0] and p.grad is None
    assert report.metrics(0.5).values()["skipped_nonfinite_step"] == 1.0


def test_a_sharded_backend_decides_by_its_own_norm():
    p = parameter([1.0, 1.0])
    report = clip_and_step(torch.optim.SGD([p], lr=1.0), [p], 1.0, total_norm=lambda grads: torch.tensor(torch.inf))
    assert report.skipped_nonfinite and p.tolist() == [0.0, 0.0]


def test_moving_the_optimizer_state_leaves_counters_on_the_host():
    p = parameter([1.0, 1.0])
    optimizer = torch.optim.AdamW([p], lr=0.1)
    optimizer.step()
    move_optimizer_state(optimizer, {"cpu": "meta"})
    places = {key: tensor.device.type for key, tensor in optimizer.state[p].items()}
    assert places == {"step": "cpu", "exp_avg": "meta", "exp_avg_sq": "meta"}


def test_the_rows_behind_a_loss_that_is_not_finite_are_named(tmp_path, caplog):
    batch = ragged_batch(rows=4)
    batch.non_tensor_batch["uid"] = np.array(["a", "b", "c", "d"], dtype=object)
    batch.batch["advantages"][3] = math.nan  # inside the mask too
    engine = make_engine(model_dir(tmp_path))
    with caplog.at_level("WARNING", logger="verl"):
        metrics = engine.train_batch(batch, PPOPolicyLoss(ActorConfig()), micro_batch_size=1).values()
    assert metrics["skipped_nonfinite_step"] == 1
    assert "micro-batch with uid d" in caplog.text and "uid a" not in caplog.text


def test_many_broken_rows_are_counted_and_rows_without_names_have_numbers(caplog):
    with caplog.at_level("WARNING", logger="verl"):
        tell_broken_rows(ragged_batch(), list(range(20)))
    assert "rows 0, 1, 2" in caplog.text and "15 and 4 more" in caplog.text
