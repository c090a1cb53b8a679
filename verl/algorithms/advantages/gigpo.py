"""Advantages of episodes and of their turns (GiGPO, arXiv 2505.10978): what an action is worth in the state it met."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl.algorithms.advantages.grpo import grpo
from verl.algorithms.groups import Groups, Singleton
from verl.algorithms.masked import zero_outside
from verl.config.schema.algorithm import AlgoConfig
from verl.errors import ConfigError
from verl.metrics import as_float, notice
from verl.protocol.fields import TURN_STATES

States = Sequence[Sequence[tuple[int, Hashable]]]


@torch.no_grad()
def gigpo(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Sequence[Hashable],
    gamma: float = 1.0,
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
    config: AlgoConfig | None = None,
    non_tensor_batch: Mapping[str, Any] | None = None,
    singleton: Singleton = "zero",
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """`grpo` over episodes, plus the same comparison among the actions that a prompt's episodes took in one state.

    With r_k the reward of turn k and G(s) the turns of a prompt's episodes that begin in state s, several of one
    episode included::

        R_t   = sum_{k >= t} gamma^(k - t) r_k
        a^S_t = (R_t - mean_G(s_t) R) / (std_G(s_t) R + epsilon)
        advantages[i, u] = a^E_i + w a^S_t                        for the tokens u of turn t; a^E is that of `grpo`

    The standard deviation is the sample's (n - 1), and divides only with norm_adv_by_std_in_grpo. A state that one
    action alone met has a^S = 0.

    Args:
        token_level_rewards, response_mask: (B, T).
        index: (B,) prompt id of each row.
        config: the section ``algorithm``, for w = ``algorithm.gigpo.step_advantage_w`` (1).
        non_tensor_batch: holds `TURN_STATES`, which environments record.

    Returns:
        advantages and returns, which are the same here: (B, T), at least float32.

    Raises:
        ConfigError: the agent loop records no states.
    """
    episodes = grpo(token_level_rewards, response_mask, index, epsilon, norm_adv_by_std_in_grpo, singleton=singleton)[0]
    states = _states(non_tensor_batch)
    turns = turn_of_tokens(states, response_mask)
    returns = turn_returns(token_level_rewards, response_mask, turns, as_float(gamma))
    sampled = torch.zeros_like(returns).scatter_add_(1, turns.clamp(min=0), response_mask.double() * (turns >= 0))
    played = [range(min(len(row), sampled.shape[1])) for row in states]  # later ones begin behind the response
    places = [(i, k) for i, numbers in enumerate(played) for k in numbers if sampled[i, k] > 0]
    if not places:
        return episodes, episodes
    rows, numbers = torch.tensor(places, device=returns.device).unbind(1)
    to_go = returns[rows, numbers]
    prompts = index.tolist() if isinstance(index, Tensor | np.ndarray) else index
    groups = Groups.of([(prompts[i], states[i][k][1]) for i, k in places], to_go.isfinite())
    centred = groups.centre(to_go)
    scale = groups.std(centred) + epsilon if norm_adv_by_std_in_grpo else 1.0
    of_turns = torch.zeros_like(returns)
    of_turns[rows, numbers] = torch.where(groups.counted, centred / scale, 0.0)
    if bool((groups.size() <= 1).all()):
        notice(
            "algorithm.adv_estimator=gigpo",
            "no state of this batch was met twice, and the advantages are those of grpo. Observations that contain the "
            "history or a counter do not recur: let the environment return info={'state': ...}.",
        )
    weight = 1.0 if config is None else config.gigpo.step_advantage_w
    of_tokens = torch.where(turns >= 0, of_turns.gather(1, turns.clamp(min=0)), 0.0)
    advantages = episodes + zero_outside(weight * of_tokens, response_mask).to(episodes.dtype)
    return advantages, advantages


def turn_of_tokens(states: States, response_mask: Tensor) -> Tensor:
    """(B, T) int64: the number of the turn that each token belongs to, -1 before the first action of its row."""
    begins = torch.zeros(response_mask.shape, dtype=torch.int64)
    for i, row in enumerate(states):
        for place, _ in row:
            if place < begins.shape[1]:  # an action may begin where a full response ends
                begins[i, place] += 1
    return begins.cumsum(dim=1).to(response_mask.device) - 1


def turn_returns(token_level_rewards: Tensor, response_mask: Tensor, turns: Tensor, gamma: float) -> Tensor:
    """(B, K) float64: the discounted rewards of every turn and those after it; K is the largest number of turns.

    A reward belongs to the turn of its token. As in `outcome_scores`, rewards outside the mask count if finite.
    """
    rewards = token_level_rewards.double()
    rewards = torch.where((turns >= 0) & (response_mask.bool() | rewards.isfinite()), rewards, 0.0)
    width = max(int(turns.max().item()) + 1, 1) if turns.numel() else 1
    returns = torch.zeros(len(turns), width, dtype=torch.float64, device=turns.device)
    returns.scatter_add_(1, turns.clamp(min=0), rewards)
    for number in range(width - 2, -1, -1):
        returns[:, number] += gamma * returns[:, number + 1]
    return returns


def _states(columns: Mapping[str, Any] | None) -> States:
    states = (columns or {}).get(TURN_STATES)
    if states is None or any(row is None for row in states):
        raise ConfigError(
            "gigpo compares actions that met the same state, and the agent loop of these rows records no states",
            key="algorithm.adv_estimator",
            got="gigpo",
            fix="Use verl.agent_loop.envs.loop.EnvironmentAgentLoop, or return extra_fields['turn_states']: "
            "(place in the response, state) of every action.",
        )
    unhashable = next((state for row in states for _, state in row if not isinstance(state, Hashable)), None)
    if unhashable is not None:
        kind = type(unhashable).__name__
        raise ConfigError(f"a state of type {kind} cannot be compared", key=f"extra_fields[{TURN_STATES!r}]",
                          got=unhashable, allowed="texts, numbers, or tuples of them")  # fmt: skip
    return [[(int(place), state) for place, state in row] for row in states]
