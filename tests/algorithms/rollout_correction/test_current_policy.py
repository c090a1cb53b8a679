"""What the actor reports during an update about the distance between the trained policy and the sampler."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from tests.harness.algorithms import actor_config, policy_loss_config
from verl.algorithms.aggregation import loss_norm
from verl.algorithms.losses import PPOPolicyLoss
from verl.metrics import MetricSet

MASK = torch.tensor([[1, 1, 0], [1, 0, 0]])
ROLLOUT = torch.tensor([[-1.0, -2.0, 9.0], [-3.0, 9.0, 9.0]])
NEW = torch.tensor([[-1.5, -2.0, torch.nan], [-2.0, torch.nan, torch.nan]])


def report(config, cuts=(slice(None),), **more):
    batch = {"response_mask": MASK, "advantages": torch.zeros(2, 3), "rollout_log_probs": ROLLOUT, **more}
    metrics, loss_fn = MetricSet(), PPOPolicyLoss(config)
    for rows in cuts:
        metrics.merge(loss_fn({"log_probs": NEW[rows]}, {k: v[rows] for k, v in batch.items()}, loss_norm(MASK))[1])
    return {name: value for name, value in metrics.values().items() if name.startswith("rollout_corr/")}


@pytest.mark.parametrize("cuts", [(slice(None),), (slice(0, 1), slice(1, 2))])
def test_the_distances_of_the_trained_policy_merge_over_micro_batches(cuts):
    found = report(actor_config(), cuts, rollout_is_weights=torch.ones(2, 3))
    # log-ratios -0.5, 0 and 1 over tokens; rows: mean rollout - mean new is 0.25 and -1
    k3 = sum(torch.tensor(x).exp().item() - 1 - x for x in (-0.5, 0.0, 1.0)) / 3
    assert found == pytest.approx(
        {
            "rollout_corr/current_kl": -0.5 / 3,
            "rollout_corr/current_k3_kl": k3,
            "rollout_corr/current_log_ppl_diff": (0.25 - 1) / 2,
            "rollout_corr/current_log_ppl_abs_diff": (0.25 + 1) / 2,
            "rollout_corr/current_ppl_ratio": (torch.tensor(0.25).exp() + torch.tensor(-1.0).exp()).item() / 2,
        },
        abs=1e-6,
    )


def test_they_are_reported_where_something_is_corrected_only():
    rejecting = SimpleNamespace(bypass_mode=False, rollout_rs="token_k1", rollout_rs_threshold=2.0)
    assert report(actor_config()) == {}
    assert report(actor_config(policy_loss=policy_loss_config(rollout_correction=rejecting)))
