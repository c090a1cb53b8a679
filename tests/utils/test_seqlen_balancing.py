import pytest
import torch

from tests.harness.programs import python
from verl.protocol import DataProto
from verl.utils.seqlen_balancing import (
    get_reverse_idx,
    prepare_dynamic_batch,
    rearrange_micro_batches,
    restore_dynamic_batch,
)

MASK = (torch.arange(5) < torch.tensor([5, 1, 3, 2])[:, None]).long()


def batch():
    return DataProto.from_dict(
        tensors={"attention_mask": MASK, "row": torch.arange(4)}, non_tensors={"uid": list("abcd")}
    )


def test_a_batch_is_cut_by_tokens_and_its_outputs_restored():
    parts, rows = prepare_dynamic_batch(batch(), max_token_len=6)
    assert [part.batch["row"].tolist() for part in parts] == rows
    assert [part.non_tensor_batch["uid"].tolist() for part in parts] == [["abcd"[i] for i in part] for part in rows]
    outputs = torch.cat([part.batch["row"] * 10 for part in parts])
    assert restore_dynamic_batch(outputs, rows).tolist() == [0, 10, 20, 30]


def test_tensors_alone_are_cut_with_whole_groups_and_a_least_number():
    parts, rows = rearrange_micro_batches(batch().batch, 6, force_group_size=2)
    assert sorted(rows) == [[0, 1], [2, 3]] and len(parts) == 2
    _, rows = rearrange_micro_batches(batch().batch, 100, min_num_micro_batch=3, num_batches_divided_by=2)
    assert len(rows) == 4


def test_a_permutation_is_inverted():
    assert get_reverse_idx([2, 0, 1]) == [1, 2, 0]


def test_the_utils_package_loads_no_transformers_and_knows_its_names():
    code = "import sys, verl.utils; assert 'transformers' not in sys.modules and 'torch' not in sys.modules"
    python("-c", code)
    import verl.utils

    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = verl.utils.nothing
