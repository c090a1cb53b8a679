"""torch's generators in a state: by rank, and derived where a rank is new."""

from __future__ import annotations

import random

import numpy as np
import torch

from verl.distributed import Ranks
from verl.engines.rng import gather_rng_state, restore_rng_state


def state_of(seed: int) -> torch.Tensor:
    torch.manual_seed(seed)
    return torch.get_rng_state()


def drawn_on(rank: int, size: int, first: dict[str, torch.Tensor]) -> float:
    torch.manual_seed(99)
    restore_rng_state(first, "cpu", Ranks(rank, size))
    return torch.rand(1).item()


def first_number(seed: int) -> float:
    torch.manual_seed(seed)
    return torch.rand(1).item()


def test_one_process_goes_on_where_it_was():
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(4)
    draw_one_of_a_pair()
    state = {name: tensor.clone() for name, tensor in gather_rng_state("cpu", Ranks()).items()}
    expected = draw_one_of_a_pair()
    assert list(state) == ["rng/cpu", "rng/python", "rng/numpy"]
    draw_one_of_a_pair()
    restore_rng_state(state, "cpu", Ranks())
    assert draw_one_of_a_pair() == expected


def draw_one_of_a_pair() -> tuple[float, ...]:
    """Gaussians come in pairs in python and numpy, so that one waits; it belongs to the state."""
    return torch.rand(1).item(), random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn()


def test_each_rank_takes_its_own_state():
    first = {"rng/cpu": state_of(1), "rng/cpu/1": state_of(2)}
    assert drawn_on(0, 2, first) == first_number(1) and drawn_on(1, 2, first) == first_number(2)


def test_a_rank_that_the_checkpoint_does_not_know_gets_numbers_of_its_own_the_same_every_time():
    first = {"rng/cpu": state_of(1), "rng/cpu/1": state_of(2)}
    new = [drawn_on(rank, 4, first) for rank in (2, 3)]
    assert new == [drawn_on(rank, 4, first) for rank in (2, 3)]
    assert len({*new, first_number(1), first_number(2), first_number(99)}) == 5


def test_states_of_ranks_that_are_gone_are_left_out():
    assert drawn_on(0, 1, {"rng/cpu": state_of(1), "rng/cpu/1": state_of(2)}) == first_number(1)


def test_a_state_is_restored_from_a_view_into_the_memory_of_a_file():
    file = torch.cat([torch.zeros(64, dtype=torch.uint8), state_of(3)])
    restore_rng_state({"rng/cpu": file[64:]}, "cpu", Ranks())
    assert torch.rand(1).item() == first_number(3)
