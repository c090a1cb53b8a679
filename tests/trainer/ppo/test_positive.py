"""The language-model loss on right answers: which rows it learns from, what it adds, and that no cut shows in it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.harness.algorithms import actor_config
from verl.algorithms.aggregation import loss_norm
from verl.algorithms.losses import PPOPolicyLoss
from verl.metrics import MetricSet
from verl.protocol import DataProto
from verl.trainer.ppo import learned_rows

MASK = torch.tensor([[1, 1, 0], [1, 1, 1], [1, 0, 0]])
LOG_PROB = torch.tensor([[-1.0, -2.0, torch.nan], [-4.0, -4.0, -4.0], [-6.0, torch.nan, torch.nan]])


def samples(scores, **columns) -> DataProto:
    tensors = {"response_mask": MASK, "token_level_scores": torch.tensor(scores)[:, None] * torch.eye(3)[:1]}
    made = {name: np.array(values, dtype=object) for name, values in columns.items()}
    return DataProto.from_dict(tensors=tensors, non_tensors={"uid": np.array(list("aab"), dtype=object), **made})


def test_right_is_a_score_above_zero_or_what_the_scorer_says_and_never_a_sample_without_a_score():
    assert learned_rows.right_answers(samples([0.5, 0.0, -1.0])).tolist() == [1, 0, 0]
    assert learned_rows.right_answers(samples([-0.5, 0.0, 1.0], acc=[1.0, None, 0.0])).tolist() == [1, 0, 0]
    assert learned_rows.right_answers(samples([0.5, 0.0, 1.0], unscorable=[True, False, False])).tolist() == [0, 0, 1]


def trained_on(marks, dp_size=1, cuts=(slice(None),)):
    """Loss, gradient and metrics with coefficient 0.1 and no advantages, micro-batch by micro-batch."""
    data = samples([0.0, 0.0, 0.0])
    data.tensors["positive"] = torch.tensor(marks)
    learned_rows.weigh_right_answers(data)
    log_prob = LOG_PROB.double().requires_grad_()
    loss_fn, norm = PPOPolicyLoss(actor_config(positive_lm_coef=0.1)), loss_norm(MASK, dp_size)
    total, metrics = torch.zeros((), dtype=torch.float64), MetricSet()
    for rows in cuts:
        batch = {"response_mask": MASK[rows], "advantages": torch.zeros(3, 3)[rows],
                 "positive_lm_weights": data.tensors["positive_lm_weights"][rows]}  # fmt: skip
        loss, found = loss_fn({"log_probs": log_prob[rows]}, batch, norm)
        total = total + loss / dp_size
        metrics.merge(found)
    total.backward()
    return total.item(), log_prob.grad, metrics.values()


def test_it_is_the_mean_over_the_tokens_of_right_answers():
    loss, gradient, metrics = trained_on([1.0, 0.0, 1.0])
    assert loss == pytest.approx(0.1 * (1 + 2 + 6) / 3)
    expected = torch.tensor([[-0.1 / 3, -0.1 / 3, 0], [0, 0, 0], [-0.1 / 3, 0, 0]], dtype=torch.float64)
    torch.testing.assert_close(gradient, expected, atol=1e-8, rtol=0)
    assert metrics["positive_nll"] == pytest.approx(3.0)


def test_neither_micro_batches_nor_ranks_show():
    cuts = (slice(0, 1), slice(1, 2), slice(2, 3))
    whole, parts = trained_on([1.0, 0.0, 1.0]), trained_on([1.0, 0.0, 1.0], dp_size=2, cuts=cuts)
    assert parts[0] == pytest.approx(whole[0]) and parts[2] == pytest.approx(whole[2])
    torch.testing.assert_close(parts[1], whole[1], atol=1e-8, rtol=0)


def test_without_a_right_answer_it_adds_nothing():
    loss, gradient, metrics = trained_on([0.0, 0.0, 0.0])
    assert loss == 0 and (gradient == 0).all() and np.isfinite(list(metrics.values())).all()
