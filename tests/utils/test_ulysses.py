"""A packed row that two ranks cut, compute and put together is the row that one rank computes."""

from __future__ import annotations

import pytest
import torch

from tests.harness.ranks import run_cells
from verl.utils.ulysses import (
    gather_outputs_and_unpad,
    get_ulysses_sequence_parallel_world_size,
    set_ulysses_sequence_parallel_group,
    ulysses_pad_and_slice_inputs,
)

IDS = torch.tensor([[5, 6, 7, 8, 9]])
POSITIONS = torch.tensor([[0, 1, 2, 0, 1]])


def cut_and_gathered(ranks, folder):
    set_ulysses_sequence_parallel_group(torch.distributed.group.WORLD)
    ids, positions, added = ulysses_pad_and_slice_inputs(IDS, POSITIONS, sp_size=2, pad_value=1)
    _, whole_positions, _ = ulysses_pad_and_slice_inputs(IDS, POSITIONS, 2, skip_position_ids_rmpad=True)
    weight = torch.tensor(3.0, requires_grad=True)
    whole = gather_outputs_and_unpad(ids[0] * weight, gather_dim=0, unpad_dim=0, padding_size=added)
    (whole**2).sum().backward()
    averaged = torch.tensor(weight.grad.item())
    torch.distributed.all_reduce(averaged)
    unscaled = torch.ones(2, requires_grad=True)
    gather_outputs_and_unpad(unscaled, 0, grad_scaler=False).sum().backward()
    size = get_ulysses_sequence_parallel_world_size()
    set_ulysses_sequence_parallel_group(None)
    return {
        "ids": ids.tolist(),
        "positions": [positions.tolist(), whole_positions.tolist()],
        "added": added,
        "whole": whole.tolist(),
        "gradient": averaged.item() / ranks.size,
        "unscaled": unscaled.grad.tolist(),
        "sizes": [size, get_ulysses_sequence_parallel_world_size()],
    }


@pytest.mark.slow
def test_two_ranks_cut_a_row_and_put_it_together_with_the_gradient_of_the_whole(tmp_path):
    first, second = run_cells(2, [cut_and_gathered], tmp_path)["cut_and_gathered"]
    assert first["ids"] == [[5, 6, 7]] and second["ids"] == [[8, 9, 1]] and first["added"] == 1
    assert first["positions"] == [[[0, 1, 2]], [[0, 1, 2, 0, 1, 0]]] and second["positions"][0] == [[0, 1, 0]]
    for answer in (first, second):
        assert answer["whole"] == [15.0, 18.0, 21.0, 24.0, 27.0] and answer["sizes"] == [2, 1]
        # d/dw of sum((id * w)^2) is 2 w sum(id^2) = 6 * 255; the gradients of both ranks are averaged.
        assert answer["gradient"] == 1530.0 and answer["unscaled"] == [1.0, 1.0]


def test_a_row_that_nobody_shares_stays_as_it_is():
    ids, positions, added = ulysses_pad_and_slice_inputs(IDS, POSITIONS)
    assert ids.equal(IDS) and positions.equal(POSITIONS) and added == 0
    assert gather_outputs_and_unpad(IDS, gather_dim=1).equal(IDS)
    assert ulysses_pad_and_slice_inputs(IDS)[1] is None
