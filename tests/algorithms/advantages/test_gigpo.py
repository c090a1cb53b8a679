"""Turns are compared where episodes of one prompt met the same state."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from verl.algorithms.advantages import call_estimator
from verl.algorithms.advantages.gigpo import gigpo, turn_of_tokens, turn_returns
from verl.config.schema.algorithm import AlgoConfig, GiGPOConfig
from verl.errors import ConfigError
from verl.metrics import notices, reset_notices

MASK = torch.tensor([[1, 0, 1, 0, 1], [1, 0, 1, 0, 0]])
"""Actions of one token with an observation after each: three turns and two."""
STATES = [[(0, "door"), (2, "door"), (4, "hall")], [(0, "door"), (2, "hall")]]
REWARDS = torch.tensor([[0.0, 0.0, 0.0, 0.0, 1.0], [0.0, 0.0, 1.0, 0.0, 0.0]], dtype=torch.float64)


def column(states):
    cells = np.empty(len(states), dtype=object)
    cells[:] = states
    return {"turn_states": cells}


def estimate(states=STATES, index=("p", "p"), rewards=REWARDS, **more):
    options = {"gamma": 0.5, "norm_adv_by_std_in_grpo": False, "non_tensor_batch": column(states), **more}
    index = index if isinstance(index, torch.Tensor) else list(index)
    return call_estimator(gigpo, token_level_rewards=rewards, response_mask=MASK, index=index, **options)[0]


def test_an_action_is_compared_with_all_that_met_its_state():
    """Both episodes score 1. At the door the returns are 1/4, 1/2 and 1/2, their mean 5/12; in the hall 1 and 1."""
    expected = torch.tensor([[-1 / 6, 0, 1 / 12, 0, 0], [1 / 12, 0, 0, 0, 0]], dtype=torch.float64)
    torch.testing.assert_close(estimate(), expected)


def test_states_of_different_prompts_are_not_compared():
    """Each prompt has one episode: the door of the first was met twice by itself, with returns 1/4 and 1/2."""
    expected = torch.tensor([[-1 / 8, 0, 1 / 8, 0, 0], [0, 0, 0, 0, 0]], dtype=torch.float64)
    torch.testing.assert_close(estimate(index=("p", "q")), expected)


def test_the_weight_scales_the_turns_and_not_the_episodes():
    rewards = REWARDS * torch.tensor([[1.0], [3.0]], dtype=torch.float64)
    alone = estimate(rewards=rewards, config=AlgoConfig())
    weighted = estimate(rewards=rewards, config=AlgoConfig(gigpo=GiGPOConfig(step_advantage_w=3.0)))
    episodes = torch.tensor([[-1.0], [1.0]], dtype=torch.float64) * MASK
    torch.testing.assert_close(weighted - episodes, 3 * (alone - episodes))


def test_a_sample_without_a_score_takes_no_part_in_its_states():
    rewards = torch.tensor([[0.0, 0.0, 0.0, 0.0, 1.0], [0.0, 0.0, torch.nan, 0.0, 0.0]], dtype=torch.float64)
    expected = torch.tensor([[-1 / 8, 0, 1 / 8, 0, 0], [0, 0, 0, 0, 0]], dtype=torch.float64)
    torch.testing.assert_close(estimate(rewards=rewards), expected)


def test_states_that_never_recur_leave_grpo_and_a_notice():
    states = [[(0, "a"), (2, "b"), (4, "c")], [(0, "d"), (2, "e")]]
    rewards = REWARDS * torch.tensor([[1.0], [3.0]], dtype=torch.float64)
    reset_notices()
    advantages = estimate(states, rewards=rewards)
    torch.testing.assert_close(advantages, torch.tensor([[-1.0], [1.0]], dtype=torch.float64) * MASK)
    text = notices()["algorithm.adv_estimator=gigpo"]
    assert "no state of this batch was met twice" in text and "info={'state': ...}" in text


def test_an_agent_loop_without_states_is_refused():
    with pytest.raises(ConfigError, match=r"records no states.*EnvironmentAgentLoop.*turn_states"):
        estimate(non_tensor_batch={})


def test_prompt_ids_may_be_a_tensor():
    states = [[(0, "door")], [(0, "door")]]
    rewards = torch.tensor([[3.0, 0.0, 0.0, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(estimate(states, torch.tensor([5, 5]), rewards), estimate(states, "pp", rewards))
    assert estimate(states, torch.tensor([5, 5]), rewards)[0, 0] == 2.0, "1 of the episode and 1 of the turn"


def test_an_action_behind_the_end_of_the_response_is_left_out():
    longer = [[*STATES[0], (5, "roof"), (9, "roof")], STATES[1]]
    torch.testing.assert_close(estimate(longer), estimate())


def test_a_state_that_has_no_hash_is_refused_with_its_type():
    with pytest.raises(ConfigError, match=r"turn_states.*a state of type list cannot be compared.*tuples"):
        estimate([[(0, ["door"])], STATES[1]])


def test_tokens_belong_to_the_last_action_that_began_before_them():
    turns = turn_of_tokens([[(1, "x"), (3, "x"), (5, "x")], []], MASK)
    assert turns.tolist() == [[-1, 0, 0, 1, 1], [-1] * 5]
    rewards = torch.tensor([[9.0, 1.0, 0.0, 2.0, 4.0], [1.0] * 5])
    assert turn_returns(rewards, torch.ones(2, 5), turns, 0.5).tolist() == [[4.0, 6.0], [0.0, 0.0]]
