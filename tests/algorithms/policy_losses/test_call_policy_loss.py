import pytest
import torch

from tests.harness.algorithms import actor_config, loss_batch, poison
from verl.algorithms.aggregation import loss_norm
from verl.algorithms.masked import masked_mean
from verl.algorithms.policy_losses import call_policy_loss
from verl.algorithms.policy_losses.vanilla import vanilla
from verl.errors import ConfigError
from verl.metrics import Metric, notices
from verl.trainer.ppo import core_algos


def over_micro_batches(policy_loss, mode="token-mean", dp_size=1):
    """The sum over two micro-batches of one row each, as an engine calls it."""
    batch, total, metrics = loss_batch(), 0.0, []
    norm = loss_norm(batch["response_mask"], dp_size)
    for row in (slice(0, 1), slice(1, 2)):
        part = {name: tensor[row] for name, tensor in batch.items()}
        loss, found = call_policy_loss(policy_loss, **part, loss_agg_mode=mode, config=actor_config(), norm=norm)
        total, metrics = total + loss, [*metrics, found]
    return total.item(), metrics


def through_agg_loss(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights=None):
    """A loss as users write it for upstream: no norm, metrics as floats under their full names."""
    loss_mat = -advantages * (log_prob - old_log_prob).exp()
    return core_algos.agg_loss(loss_mat, response_mask, loss_agg_mode), {"actor/mine": 3.0}


def by_itself(old_log_prob, log_prob, advantages, response_mask, **kwargs):
    return masked_mean(-advantages * (log_prob - old_log_prob).exp(), response_mask)


PLAIN = (-1 - 1.5 - 0.5 + 0.7 + 5) / 5  # token mean of -A r over both rows


def test_the_built_in_loss_is_normalised_over_the_mini_batch():
    total, metrics = over_micro_batches(vanilla)
    assert total == pytest.approx(0.204, abs=1e-6)
    assert metrics[0]["pg_clipfrac"].merge(metrics[1]["pg_clipfrac"]).value == pytest.approx(0.4)


def test_a_users_loss_that_calls_agg_loss_is_normalised_over_the_mini_batch():
    assert over_micro_batches(through_agg_loss)[0] == pytest.approx(PLAIN)
    assert over_micro_batches(through_agg_loss, dp_size=2)[0] == pytest.approx(2 * PLAIN)
    sequence_mean = ((-1 - 1.5 - 0.5) + (0.7 + 5)) / 2
    assert over_micro_batches(through_agg_loss, "seq-mean-token-sum")[0] == pytest.approx(sequence_mean)


def test_a_users_loss_that_averages_by_itself_is_weighted_by_tokens_and_told():
    assert over_micro_batches(by_itself)[0] == pytest.approx(PLAIN)
    assert "token mean" in notices()["actor_rollout_ref.actor.policy_loss.loss_mode"]


def test_junk_outside_the_mask_does_not_reach_a_users_product_with_the_mask():
    batch = loss_batch()
    batch = {name: x if name == "response_mask" else poison(x, batch["response_mask"]) for name, x in batch.items()}
    new = batch["log_prob"].detach().requires_grad_()

    def product(old_log_prob, log_prob, advantages, response_mask, rollout_is_weights, **_):
        x = -advantages * (log_prob - old_log_prob).exp() * rollout_is_weights
        return (x * response_mask).sum() / response_mask.sum(), {}

    loss, _ = call_policy_loss(
        product,
        **{**batch, "log_prob": new},
        loss_agg_mode="token-mean",
        config=None,
        norm=loss_norm(batch["response_mask"]),
        rollout_is_weights=poison(torch.ones(2, 3), batch["response_mask"]),
    )
    loss.backward()
    assert loss.item() == pytest.approx(PLAIN)
    assert torch.isfinite(new.grad).all()


def test_metrics_become_metrics_without_prefix_whatever_their_form():
    _, metrics = over_micro_batches(through_agg_loss)
    assert metrics[0] == {"mine": Metric(3.0, "mean", 3)}
    four = lambda log_prob, response_mask: (masked_mean(log_prob, response_mask), torch.tensor(0.1), 0.2, 0.3)
    _, metrics = over_micro_batches(four)
    assert {k: m.value for k, m in metrics[1].items()} == pytest.approx(
        {"pg_clipfrac": 0.1, "ppo_kl": 0.2, "pg_clipfrac_lower": 0.3}
    )


@pytest.mark.parametrize("result", [None, (1.0, {}), torch.ones(2), "loss"])
def test_another_result_is_refused(result):
    with pytest.raises(ConfigError, match=r"\(scalar tensor, dict of metrics\)"):
        over_micro_batches(lambda **kwargs: result)


@pytest.mark.parametrize(
    ("result", "got", "repair"),
    [
        (torch.zeros(2, 3), "Got ['a tensor of shape (2, 3)']", "agg_loss(loss_mat=losses, loss_mask=response_mask"),
        ((torch.zeros(2), {}), "a tensor of shape (2,)", "agg_loss(loss_mat=losses"),
        ((torch.tensor(1.0), 0.5), "a tensor of shape ()', 'float'", 'return loss, {"my_metric": number}'),
        (1.5, "'float'", "End it with: return loss, {}."),
    ],
)
def test_a_result_that_is_no_pair_says_what_to_return(result, got, repair):
    with pytest.raises(ConfigError) as caught:
        over_micro_batches(lambda log_prob: result)
    assert got in str(caught.value) and repair in str(caught.value)
