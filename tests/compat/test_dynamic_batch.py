import torch
from tensordict import TensorDict

from verl.compat.forms.dynamic_batch import restore_dynamic_batch, split_by_tokens

LENGTHS = [5, 1, 3, 2, 4, 1]
BATCH = TensorDict(
    {"attention_mask": (torch.arange(5) < torch.tensor(LENGTHS)[:, None]).long(), "row": torch.arange(6)},
    batch_size=[6],
)


def test_outputs_of_micro_batches_return_in_row_order():
    parts, rows = split_by_tokens(BATCH, 6)
    assert all(part["attention_mask"].sum() <= 6 for part in parts)
    assert [part["row"].tolist() for part in parts] == rows
    outputs = torch.cat([part["row"] * 10 for part in parts])
    assert restore_dynamic_batch(outputs, rows).tolist() == [0, 10, 20, 30, 40, 50]


def test_options_reach_the_plan():
    _, rows = split_by_tokens(BATCH, 16, min_count=3, count_multiple=2)
    assert len(rows) == 4
    _, rows = split_by_tokens(BATCH, 6, group_size=2, order_by_work=False)
    assert rows == [[0, 1], [2, 3], [4, 5]]
    _, rows = split_by_tokens(BATCH, 16, all_reduce_max=lambda count: max(count, 4))
    assert len(rows) == 4
