"""`ShardSpec` against torch's own placement and against cutting a real tensor."""

from __future__ import annotations

import itertools
import json

import pytest
import torch

from verl.errors import EngineError
from verl.protocol import REPLICATE, ShardSpec


def boxes(shape, axes, mesh, placements) -> list[ShardSpec]:
    return [ShardSpec.cut(shape, axes, mesh, placements, at) for at in itertools.product(*map(range, mesh))]


@pytest.mark.parametrize("rows", [1, 2, 7, 8, 9])
@pytest.mark.parametrize("parts", [1, 2, 3, 4])
def test_one_cut_is_what_torch_chunk_gives(rows, parts):
    whole = torch.arange(rows * 3).reshape(rows, 3)
    pieces = list(whole.chunk(parts))
    pieces += [whole[:0]] * (parts - len(pieces))
    for index, piece in enumerate(pieces):
        spec = ShardSpec.cut((rows, 3), ("fsdp",), (parts,), (0,), (index,))
        assert spec.shape == tuple(piece.shape) and torch.equal(whole[spec.slices()], piece)


@pytest.mark.parametrize("placements", [(0, 1), (1, 0), (0, 0), (REPLICATE, 1), (0, REPLICATE)])
def test_first_replicas_cover_every_entry_exactly_once(placements):
    whole = torch.zeros(7, 5, dtype=torch.int64)
    for spec in boxes((7, 5), ("dp", "tp"), (2, 3), placements):
        if spec.is_first_replica:
            whole[spec.slices()] += 1
    assert (whole == 1).all()


def test_two_cuts_of_one_axis_nest_as_dtensor_places_them():
    """10 rows over 4 parts: 3, 3, 3, 1; then each over 2: the third part is rows 6 to 9, its second half row 8."""
    spec = ShardSpec.cut((10,), ("a", "b"), (4, 2), (0, 0), (2, 1))
    assert (spec.offsets, spec.shape) == ((8,), (1,))
    last = ShardSpec.cut((10,), ("a", "b"), (4, 2), (0, 0), (3, 1))
    assert (last.offsets, last.shape, last.num_elements) == ((10,), (0,), 0)


def test_overlaps_move_a_tensor_from_one_sharding_to_another():
    whole = torch.arange(7 * 5).reshape(7, 5)
    sources = boxes((7, 5), ("fsdp",), (3,), (0,))
    for target in boxes((7, 5), ("tp", "dp"), (2, 2), (1, 0)):
        local = torch.full(target.shape, -1)
        for source in sources:
            common = source.overlap(target)
            if common is not None:
                local[common[1]] = whole[source.slices()][common[0]]
        assert torch.equal(local, whole[target.slices()])


def test_a_full_weight_and_json():
    full = ShardSpec.full((2, 3))
    assert full.is_full and full.is_first_replica and full.num_elements == 6
    cut = ShardSpec.cut((4, 4), ("tp",), (2,), (1,), (1,))
    assert not cut.is_full and ShardSpec.from_json(json.loads(json.dumps(cut.to_json()))) == cut


def test_impossible_placements_are_refused():
    with pytest.raises(EngineError, match="'tp'"):
        ShardSpec.cut((4,), ("tp",), (2,), (0,), (2,))
    with pytest.raises(EngineError, match="'tp'"):
        ShardSpec.cut((4,), ("tp",), (2,), (1,), (0,))
    with pytest.raises(EngineError, match="same length"):
        ShardSpec.cut((4,), ("tp",), (2, 2), (0,), (0,))
    with pytest.raises(EngineError, match="different weights"):
        ShardSpec.full((2,)).overlap(ShardSpec.full((3,)))
