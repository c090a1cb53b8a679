import torch

from tests.harness.algorithms import outcome_batch, poison
from verl.algorithms.advantages.remax import remax


def test_worked_numbers():
    rewards, mask, _ = outcome_batch()
    greedy = torch.tensor([0.5, 0.5, 0.5, 0.5, 1, 1, 0])
    advantages, returns = remax(poison(rewards, mask), greedy, mask)
    expected = torch.tensor([0.5, -0.5, 0, -0.5, 0, 0, 0.7])[:, None] * mask
    torch.testing.assert_close(advantages, expected)
    assert returns[0].tolist() == [1, 1, 1, 0]
