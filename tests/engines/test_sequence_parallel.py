"""How a packed micro-batch is cut over the ranks that share it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from tests.harness.engines import ragged_batch
from verl.distributed import Ranks
from verl.engines.packing import pack
from verl.engines.rows import AlignedRows, MicroBatch
from verl.engines.sequence_parallel import check_heads, part_of, pooled, sequence_peers
from verl.errors import ConfigError, NotBuiltError


@pytest.mark.parametrize("size", [2, 3, 4])
def test_parts_are_equally_long_and_together_the_whole_row(size):
    rows = AlignedRows.of(ragged_batch(rows=5))
    whole = pack(rows, [0, 1, 3], "cpu")
    parts = [part_of(whole, Ranks(rank, size)) for rank in range(size)]
    length = parts[0].input_ids.shape[1]
    total = whole.input_ids.shape[1]
    assert {tuple(part.input_ids.shape) for part in parts} == {(1, length)} and total <= size * length < total + size
    assert torch.equal(torch.cat([part.input_ids for part in parts], 1)[:, :total], whole.input_ids)
    assert torch.equal(torch.cat([part.position_ids for part in parts], 1)[:, :total], whole.position_ids)
    at = torch.cat([part.positions + rank * length for rank, part in enumerate(parts)])
    order = at.argsort(stable=True)
    expected = whole.positions.argsort(stable=True)
    for name in ("labels", "places"):
        found = torch.cat([getattr(part, name) for part in parts])
        assert torch.equal(found[order], getattr(whole, name)[expected])
    for part in parts:
        assert ((part.positions >= 0) & (part.positions < length)).all()
        assert part.attention.whole.segments.num_tokens == size * length


def test_the_filler_of_ranks_without_rows_is_not_cut():
    filler = MicroBatch.filler("cpu")
    assert part_of(filler, Ranks(1, 2)) is filler


def test_alone_there_is_nothing_to_share(caplog):
    peers = sequence_peers(Ranks(), 1)
    batch = ragged_batch(rows=3)
    batch.non_tensor_batch["uid"] = ragged_batch(rows=3).batch["responses"][:, 0].numpy().astype(object)
    whole, mine = pooled(batch, peers)
    assert mine == slice(0, 3) and list(whole.non_tensor_batch["uid"]) == [
        str(x) for x in batch.non_tensor_batch["uid"]
    ]
    for name, tensor in batch.batch.items():
        torch.testing.assert_close(whole.batch[name], tensor, equal_nan=True, rtol=0, atol=0)


def test_images_are_refused():
    batch = ragged_batch(rows=2)
    batch.non_tensor_batch["multi_modal_inputs"] = batch.batch["responses"][:, 0].numpy().astype(object)
    with pytest.raises(NotBuiltError, match="image"):
        pooled(batch, Ranks())


def test_heads_and_ranks_must_divide():
    config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(num_attention_heads=12))
    check_heads(config, 4)
    with pytest.raises(ConfigError, match=r"12 attention heads.*Got 8.*1, 2, 3, 4, 6, 12"):
        check_heads(config, 8)
    with pytest.raises(ConfigError, match=r"6 processes.*Got 4.*1, 2, 3, 6"):
        sequence_peers(Ranks(0, 6), 4)
