from types import SimpleNamespace

import pytest
import torch

from tests.harness.algorithms import outcome_batch, poison
from verl.algorithms.advantages.gae import gae
from verl.algorithms.advantages.reinforce_plus_plus import reinforce_plus_plus


def test_worked_numbers_without_discount():
    rewards, mask, _ = outcome_batch()
    advantages, _ = reinforce_plus_plus(poison(rewards, mask), mask, gamma=1.0)
    expected = torch.tensor([0.887837, -1.624909, -0.368536, -1.624909, 0.887837, 0.887837, 0.134013])
    torch.testing.assert_close(advantages, expected[:, None] * mask, atol=1e-5, rtol=0)


def test_worked_numbers_with_discount():
    rewards, mask, _ = outcome_batch()
    advantages, returns = reinforce_plus_plus(rewards, mask, gamma=0.9)
    assert returns[0].tolist() == pytest.approx([0.81, 0.9, 1, 0])
    assert returns[2].tolist() == pytest.approx([0.3645, 0.405, 0.45, 0.5])
    assert advantages[0].tolist() == pytest.approx([0.566663, 0.804202, 1.068134, 0], abs=1e-5)
    assert advantages[2].tolist() == pytest.approx([-0.609156, -0.502263, -0.383494, -0.251527], abs=1e-5)


def test_a_turn_before_an_observation_is_credited_for_what_comes_after_it():
    rewards, mask = torch.tensor([[0.0, 0, 0, 0, 1]]), torch.tensor([[1, 1, 0, 1, 1]])
    _, returns = reinforce_plus_plus(rewards, mask, gamma=0.9)
    assert returns[0].tolist() == pytest.approx([0.729, 0.81, 0, 0.9, 1])


def test_the_discount_comes_from_the_configuration_where_it_is_not_given():
    rewards, mask, _ = outcome_batch()
    config = SimpleNamespace(gamma=0.9)
    assert reinforce_plus_plus(rewards, mask, config)[1][0, 0] == pytest.approx(0.81)
    assert reinforce_plus_plus(rewards, mask)[1][0, 0] == 1


def test_it_equals_gae_with_a_critic_that_says_zero():
    rewards, mask, _ = outcome_batch()
    critic, _ = gae(rewards, torch.zeros_like(rewards), mask, gamma=1.0, lam=1.0)
    torch.testing.assert_close(reinforce_plus_plus(rewards, mask, gamma=1.0)[0], critic)
