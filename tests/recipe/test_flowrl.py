"""FlowRL: the paper's balance in numpy, the distribution that it leads to, settings, learning."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from recipe.flowrl.core import flow_balance, group_partition, learned_partition
from recipe.flowrl.main_flowrl import main
from tests.harness.runs import logged
from verl.algorithms.aggregation import loss_norm

A, CORE = "actor_rollout_ref.actor", "recipe.flowrl.core"
ACTOR = SimpleNamespace(clip_ratio=0.2, clip_ratio_low=None, clip_ratio_high=0.3, clip_ratio_c=3.0)
CONFIG = SimpleNamespace(flowrl_beta=1.5)
INDEX = list("aabbbaa")


def answers(seed: int) -> tuple[dict[str, torch.Tensor], torch.Tensor, torch.Tensor]:
    """Log-probs (7, 5) of new, old and reference policy, the mask, and rewards of a token each."""
    draw = torch.Generator().manual_seed(seed)
    mask = (torch.rand(7, 5, generator=draw) < 0.6).double()
    mask[:, 0] = 1
    names = ("log_prob", "old_log_prob", "ref_log_prob")
    tensors = {name: -torch.rand(7, 5, generator=draw, dtype=torch.float64) for name in names}
    rewards = torch.zeros(7, 5, dtype=torch.float64)
    rewards[:, 0] = torch.rand(7, generator=draw)
    return tensors, mask, rewards


def pulls(rewards: np.ndarray) -> np.ndarray:
    """beta times the reward, normalised among the answers to a prompt."""
    made = np.zeros(len(rewards))
    for i, prompt in enumerate(INDEX):
        group = rewards[[j for j, other in enumerate(INDEX) if other == prompt]]
        made[i] = CONFIG.flowrl_beta * (rewards[i] - group.mean()) / (group.std(ddof=1) + 1e-6)
    return made


def per_token(values: torch.Tensor, mask: torch.Tensor) -> np.ndarray:
    return ((values * mask).sum(-1) / mask.sum(-1)).numpy()


@pytest.mark.parametrize("seed", range(3))
def test_the_advantage_is_the_reward_less_the_log_partition_of_the_group(seed):
    tensors, mask, rewards = answers(seed)
    old, reference = tensors["old_log_prob"], tensors["ref_log_prob"]
    advantages, returns = group_partition(rewards, old, reference, mask, INDEX, CONFIG)
    pull, drift = pulls(rewards.sum(-1).numpy()), per_token(old - reference, mask)
    for i, prompt in enumerate(INDEX):
        group = [j for j, other in enumerate(INDEX) if other == prompt]
        grid = np.linspace(-3, 3, 60_001)
        errors = ((grid[:, None] + drift[group] - pull[group]) ** 2).sum(-1)
        assert advantages[i, 0].item() == pytest.approx(pull[i] - grid[errors.argmin()], abs=1e-4)
    assert advantages is returns and (advantages[mask == 0] == 0).all()


@pytest.mark.parametrize("seed", range(3))
def test_the_loss_is_the_weighted_square_of_the_distance_from_balance(seed):
    tensors, mask, rewards = answers(seed)
    pull = pulls(rewards.sum(-1).numpy())
    log_partition = np.linspace(-1, 1, 7)
    advantages = torch.tensor((pull - log_partition)[:, None]) * mask
    loss, metrics = flow_balance(
        **tensors, advantages=advantages, response_mask=mask, config=ACTOR, norm=loss_norm(mask)
    )
    gap = log_partition + per_token(tensors["log_prob"] - tensors["ref_log_prob"], mask) - pull
    ratio = np.exp(((tensors["log_prob"] - tensors["old_log_prob"]) * mask).sum(-1).numpy())
    weight = np.clip(ratio, 0.8, 1.3)
    assert loss.item() == pytest.approx((weight * gap**2).mean(), rel=1e-9)
    assert metrics["flowrl_gap"].value == pytest.approx(np.abs(gap).mean())
    assert metrics["flowrl_weight"].value == pytest.approx(weight.mean())


def test_the_weight_has_no_gradient():
    """d L / d log pi of a token is 2 w gap / (l rows), with w as a number."""
    tensors, mask, _ = answers(1)
    policy = tensors["log_prob"].clone().requires_grad_()
    advantages = mask * 0.3
    inputs = {**tensors, "log_prob": policy}
    loss, _ = flow_balance(**inputs, advantages=advantages, response_mask=mask, config=ACTOR, norm=loss_norm(mask))
    (gradient,) = torch.autograd.grad(loss, policy)
    gap = per_token(tensors["log_prob"] - tensors["ref_log_prob"], mask) - 0.3
    ratio = np.exp(((tensors["log_prob"] - tensors["old_log_prob"]) * mask).sum(-1).numpy())
    slope = 2 * np.clip(ratio, 0.8, 1.3) * gap / mask.sum(-1).numpy() / 7
    np.testing.assert_allclose(gradient.numpy(), slope[:, None] * mask.numpy(), rtol=1e-9)


def test_micro_batches_add_up_and_rows_without_tokens_count_nowhere():
    tensors, mask, _ = answers(2)
    mask[3] = 0
    norm, advantages = loss_norm(mask), mask * 0.5

    def of(rows: slice) -> float:
        part = {name: x[rows] for name, x in tensors.items()}
        inputs = {"advantages": advantages[rows], "response_mask": mask[rows], "config": ACTOR, "norm": norm}
        return flow_balance(**part, **inputs)[0].item()

    assert of(slice(0, 3)) + of(slice(3, 4)) + of(slice(4, 7)) == pytest.approx(of(slice(0, 7)), rel=1e-12)
    assert of(slice(3, 4)) == 0


def test_the_critic_gives_the_partition_before_the_first_token():
    """Masked tokens before an answer have no value that counts, nor have later ones."""
    mask = torch.tensor([[0, 1, 1], [1, 1, 0]])
    rewards = torch.tensor([[0.0, 0.0, 1.0], [0.0, 0.0, 0.0]])
    values = torch.tensor([[9.0, 0.25, 9.0], [-0.5, 9.0, 9.0]])
    old, reference = torch.full((2, 3), -1.0), torch.full((2, 3), -1.2)
    advantages, returns = learned_partition(rewards, old, reference, values, mask, ["a", "a"], CONFIG)
    pull = 1.5 * 0.5 / np.sqrt(0.5)
    expected = np.array([[0, pull - 0.25, pull - 0.25], [-pull + 0.5, -pull + 0.5, 0]])
    np.testing.assert_allclose(advantages.numpy(), expected, atol=1e-5)
    np.testing.assert_allclose(returns[0, 1:].numpy(), pull - 0.2, atol=1e-5)


def test_an_answer_without_a_score_has_no_term_and_no_gradient():
    """Two of three answers are scored: the loss is the sum of their terms, over three rows, as without the third."""
    rewards = torch.tensor([[1.0], [float("nan")], [0.0]])
    old, reference, mask = torch.full((3, 1), -1.0), torch.tensor([[-1.5], [-9.0], [-1.2]]), torch.ones(3, 1)
    advantages, _ = group_partition(rewards, old, reference, mask, ["a"] * 3, CONFIG)
    assert (advantages == -torch.inf).flatten().tolist() == [False, True, False]
    policy = torch.tensor([[-1.1], [-0.5], [-0.9]], requires_grad=True)
    loss, metrics = flow_balance(old, policy, reference, advantages, mask, ACTOR, loss_norm(mask))
    (gradient,) = torch.autograd.grad(loss, policy)
    pull = 1.5 * 0.5 / np.sqrt(0.5)  # drifts 0.5 and 0.2, so log Z is -0.35
    gaps, weights = np.array([0.4 - pull - 0.35, 0.3 + pull - 0.35]), np.exp([-0.1, 0.1])
    assert loss.item() == pytest.approx((weights * gaps**2).sum() / 3, rel=1e-4)
    assert gradient.flatten().tolist() == pytest.approx(
        [2 * weights[0] * gaps[0] / 3, 0, 2 * weights[1] * gaps[1] / 3], rel=1e-4
    )
    assert metrics["flowrl_gap"].value == pytest.approx(np.abs(gaps).mean(), rel=1e-4)


def test_numbers_that_went_wrong_are_seen_in_the_loss():
    advantages, mask, log_prob = torch.tensor([[float("nan")], [0.5]]), torch.ones(2, 1), torch.full((2, 1), -1.0)
    loss, _ = flow_balance(log_prob, log_prob, log_prob, advantages, mask, ACTOR, loss_norm(mask))
    assert loss.isnan()


def test_the_critic_learns_nothing_from_an_answer_without_a_score():
    rewards, values = torch.tensor([[1.0], [float("nan")], [0.0]]), torch.tensor([[0.25], [0.75], [0.5]])
    old, mask = torch.full((3, 1), -1.0), torch.ones(3, 1)
    advantages, returns = learned_partition(rewards, old, old, values, mask, ["a"] * 3, CONFIG)
    pull = 1.5 * 0.5 / np.sqrt(0.5)
    assert returns.flatten().tolist() == pytest.approx([pull, 0.75, -pull], abs=1e-4)
    assert (advantages == -torch.inf).flatten().tolist() == [False, True, False]


def test_an_answer_alone_with_its_prompt_is_in_balance():
    rewards = torch.tensor([[1.0], [0.0], [5.0]])
    old, reference, mask = torch.full((3, 1), -1.0), torch.full((3, 1), -1.5), torch.ones(3, 1)
    advantages, _ = group_partition(rewards, old, reference, mask, ["a", "a", "b"], CONFIG)
    assert advantages[2].item() == pytest.approx(0.5)
    loss, _ = flow_balance(old[2:], old[2:], reference[2:], advantages[2:], mask[2:], ACTOR, loss_norm(mask[2:]))
    assert loss.item() == pytest.approx(0, abs=1e-12)


def test_descent_leads_to_the_reference_times_the_exponential_reward():
    """Three answers of one token, of which the policy is a softmax; in the limit it is ref exp(beta r) / Z."""
    reference, rewards = torch.tensor([0.5, 0.3, 0.2]).log().double(), torch.tensor([1.0, 0.0, 0.4]).double()
    logits, mask = torch.zeros(3, dtype=torch.float64, requires_grad=True), torch.ones(3, 1)
    optimizer = torch.optim.Adam([logits], lr=0.05)
    for _ in range(400):
        log_prob = logits.log_softmax(0)[:, None]
        old = log_prob.detach()
        advantages, _ = group_partition(rewards[:, None], old, reference[:, None], mask, ["a"] * 3, CONFIG)
        loss, _ = flow_balance(old, log_prob, reference[:, None], advantages, mask, ACTOR, loss_norm(mask))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    centred = np.array([1.0, 0.0, 0.4]) - 1.4 / 3
    target = np.array([0.5, 0.3, 0.2]) * np.exp(1.5 * centred / centred.std(ddof=1))
    np.testing.assert_allclose(logits.softmax(0).detach().numpy(), target / target.sum(), atol=1e-3)


REQUIRED = ("data.train_files=train.jsonl", "data.train_batch_size=8", "data.max_prompt_length=64",
            "data.max_response_length=6", "actor_rollout_ref.model.path=model", f"{A}.ppo_mini_batch_size=4",
            "reward.custom_reward_function.path=scorer.py", "actor_rollout_ref.rollout.n=4")  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("estimator", "critic"),
    [("group_partition", []), ("learned_partition", ["critic.cliprange_value=20", "critic.optim.lr=1e-2"])],
)
def test_a_run_by_the_recipe_raises_the_reward(lower_case_task: Path, estimator, critic):
    more = [f"{A}.optim.lr=3e-2", *critic, "trainer.logger=[file]", "trainer.resume_mode=disable",
            "trainer.total_training_steps=12", "trainer.experiment_name=flow",
            f"algorithm.adv_estimator={CORE}:{estimator}"]  # fmt: skip
    assert main([*REQUIRED, *more]) == 0
    means = [step["critic/score/mean"] for step in logged("logs/verl-flowrl", "flow")]
    assert len(means) == 12 and sum(means[-3:]) / 3 > sum(means[:2]) / 2 + 0.3, means
