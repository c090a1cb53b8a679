"""What a receiver checks: completeness, versions, shapes, tied weights."""

from __future__ import annotations

import pytest
import torch

from verl.errors import RolloutError
from verl.weight_sync import WeightChunk, WeightInventory, chunk_weights


def tied() -> tuple[WeightInventory, torch.Tensor, torch.Tensor]:
    embedding, norm = torch.zeros(3, 2), torch.zeros(2)
    return WeightInventory({"embed": embedding, "head": embedding, "norm": norm}), embedding, norm


def stream(version: int = 1, **tensors) -> list[WeightChunk]:
    return list(chunk_weights(tensors.items(), 8, version))


@pytest.mark.parametrize("name", ["embed", "head"])
def test_tied_weights_count_as_one_whichever_name_arrives(name):
    inventory, embedding, norm = tied()
    num_bytes = inventory.receive(stream(**{name: torch.ones(3, 2), "norm": torch.full((2,), 5.0)}), 1)
    assert num_bytes == 32
    assert embedding.tolist() == [[1, 1]] * 3 and norm.tolist() == [5, 5]


def test_tied_weights_that_arrive_twice_must_be_equal():
    inventory, *_ = tied()
    inventory.receive(stream(embed=torch.ones(3, 2), head=torch.ones(3, 2), norm=torch.ones(2)), 1)
    with pytest.raises(RolloutError, match=r"head: .*tied.*tie_word_embeddings"):
        inventory.receive(stream(embed=torch.ones(3, 2), head=torch.zeros(3, 2), norm=torch.ones(2)), 1)


def test_a_chunk_with_a_wrong_shape_changes_nothing_of_that_chunk():
    inventory, embedding, norm = tied()
    wrong = [WeightChunk(1, [("norm", torch.ones(2)), ("embed", torch.ones(2, 3))], last=True)]
    with pytest.raises(RolloutError, match=r"embed: .*another shape.*\(2, 3\).*\(3, 2\)"):
        inventory.receive(wrong, 1)
    assert norm.tolist() == [0, 0] and embedding.sum() == 0


def test_missing_unknown_mixed_and_unfinished_streams_are_errors():
    inventory, *_ = tied()
    with pytest.raises(RolloutError, match=r"1 weights did not arrive: embed"):
        inventory.receive(stream(norm=torch.ones(2)), 1)
    with pytest.raises(RolloutError, match=r"nrm: .*no such weight.*'norm'"):
        inventory.receive(stream(nrm=torch.ones(2)), 1)
    with pytest.raises(RolloutError, match=r"another version arrived.*Got 2.*Allowed: 1"):
        inventory.receive(stream(2, norm=torch.ones(2)), 1)
    full = stream(embed=torch.ones(3, 2), norm=torch.ones(2))
    with pytest.raises(RolloutError, match="interrupted"):
        inventory.receive(full[:-1], 1)
    with pytest.raises(RolloutError, match="after the last chunk"):
        inventory.receive([*full, *full], 1)
