"""`all_gather_data_proto` over gloo: two processes with different rows, widths and objects."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import torch.multiprocessing

from verl import distributed
from verl.protocol import DataProto, all_gather_data_proto


def one_rank(rank: int, store: str, world_size: int) -> None:
    """What each process does; an assertion that fails here fails the test."""
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    rows, width = rank + 1, 2 * rank + 1
    data = DataProto.from_dict(
        {"responses": torch.full((rows, width), rank + 1), "score": torch.full((rows,), float(rank)).bfloat16()},
        {"uid": [f"rank {rank} row {i}" for i in range(rows)], "ids": [[rank] * 20] * rows},
        {"mine": rank, "pad_token_id": 7},
    )
    all_gather_data_proto(data, dist.group.WORLD)
    assert data.batch["responses"].tolist() == [[1, 7, 7], [2, 2, 2], [2, 2, 2]]
    assert data.batch["score"].tolist() == [0.0, 1.0, 1.0] and data.batch["score"].dtype == torch.bfloat16
    assert data.non_tensor_batch["uid"].tolist() == ["rank 0 row 0", "rank 1 row 0", "rank 1 row 1"]
    assert data.non_tensor_batch["ids"][2] == [1] * 20
    assert data.meta_info == {"mine": rank, "pad_token_id": 7}
    dist.destroy_process_group()


@pytest.mark.slow
def test_two_processes_get_the_rows_of_both_in_rank_order(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [str(Path(__file__).parents[2]), str(Path(__file__).parent), *sys.path])
    torch.multiprocessing.spawn(one_rank, args=(str(tmp_path / "store"), 2), nprocs=2)


def test_one_process_has_everything_already(tmp_path):
    import torch.distributed as dist

    distributed.leave_group()  # one that other tests of this process have left
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        data = DataProto.from_dict({"x": torch.ones(2)})
        before = data.batch
        all_gather_data_proto(data)
        assert data.batch is before
    finally:
        dist.destroy_process_group()
