"""Joining batches: widths, sides, padding values, meta_info; the numbers are written out by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from verl.errors import BatchError, ConfigError
from verl.protocol import DataProto, declare_field, declared_field
from verl.protocol.joining import LARGE_BYTES, cat_rows


def rollout(prompts: list[list[int]], responses: list[list[int]], pad: int = 0, **extra) -> DataProto:
    """A batch as the agent loop makes it: zeros in the arguments are padding, every other token is real."""
    p, r = torch.tensor(prompts), torch.tensor(responses)
    mask = torch.cat([p, r], dim=1).ne(0).long()
    swap = lambda t: torch.where(t == 0, pad, t)
    return DataProto.from_dict(
        {
            "prompts": swap(p),
            "responses": swap(r),
            "input_ids": swap(torch.cat([p, r], dim=1)),
            "attention_mask": mask,
            "position_ids": (mask.cumsum(-1) - 1).clamp(min=0),
            "response_mask": r.ne(0).long(),
            "values": r.float(),
            **extra,
        }
    )


A = ([[0, 5, 6]], [[7, 8]])
B = ([[9]], [[1, 2, 0, 0]])


def test_batches_of_different_widths_equal_one_batch_padded_at_once():
    joined = DataProto.concat([rollout(*A), rollout(*B)])
    together = rollout([[0, 5, 6], [0, 0, 9]], [[7, 8, 0, 0], [1, 2, 0, 0]])
    assert set(joined.batch.keys()) == set(together.batch.keys())
    for key, value in together.batch.items():
        assert torch.equal(joined.batch[key], value), key
        assert joined.batch[key].dtype == value.dtype


def test_equal_total_width_with_different_prompt_widths_is_padded_too():
    """3 + 2 and 1 + 4 tokens are both 5 wide; joined side by side the responses would start at different columns."""
    first, second = rollout([[4, 5, 6]], [[7, 8]]), rollout([[9]], [[1, 2, 3, 4]])
    joined = DataProto.concat([first, second])
    assert joined.batch["input_ids"].tolist() == [[4, 5, 6, 7, 8, 0, 0], [0, 0, 9, 1, 2, 3, 4]]
    assert joined.batch["attention_mask"].tolist() == [[1, 1, 1, 1, 1, 0, 0], [0, 0, 1, 1, 1, 1, 1]]
    assert joined.batch["position_ids"].tolist() == [[0, 1, 2, 3, 4, 4, 4], [0, 0, 0, 1, 2, 3, 4]]


def test_token_columns_are_padded_with_the_pad_token_of_meta_info():
    parts = [rollout(*A, pad=99), rollout(*B, pad=99)]
    for part in parts:
        part.meta_info["pad_token_id"] = 99
    joined = DataProto.concat(parts)
    assert joined.batch["prompts"].tolist() == [[99, 5, 6], [99, 99, 9]]
    assert joined.batch["responses"].tolist() == [[7, 8, 99, 99], [1, 2, 99, 99]]
    assert joined.batch["response_mask"].tolist() == [[1, 1, 0, 0], [1, 1, 0, 0]]
    assert joined.batch["values"][0].tolist() == [7.0, 8.0, 0.0, 0.0]


def test_position_ids_with_planes_are_padded_on_the_last_axis():
    planes = lambda p: p[:, None, :].expand(-1, 3, -1)
    first, second = rollout(*A), rollout(*B)
    for part in (first, second):
        part.batch["position_ids"] = planes(part.batch["position_ids"]).contiguous()
    joined = DataProto.concat([first, second])
    assert joined.batch["position_ids"].shape == (2, 3, 7)
    assert joined.batch["position_ids"][1, 2].tolist() == [0, 0, 0, 1, 2, 2, 2]


def test_supervised_batches_pad_on_the_right():
    """There T = L - 1 and no prompts column: the one column before the responses counts as the prompt."""

    def part(tokens: list[int]) -> DataProto:
        ids = torch.tensor([tokens])
        return DataProto.from_dict({"input_ids": ids, "responses": ids[:, 1:], "loss_mask": torch.ones_like(ids)})

    joined = DataProto.concat([part([1, 2, 3]), part([4, 5, 6, 7])])
    assert joined.batch["input_ids"].tolist() == [[1, 2, 3, 0], [4, 5, 6, 7]]
    assert joined.batch["responses"].tolist() == [[2, 3, 0], [5, 6, 7]]
    assert joined.batch["loss_mask"].tolist() == [[1, 1, 1, 0], [1, 1, 1, 1]]


def test_sequences_without_prompts_and_responses_are_refused_unless_equally_wide():
    part = lambda width: DataProto.from_dict({"input_ids": torch.ones(1, width)})
    assert DataProto.concat([part(3), part(3)]).batch["input_ids"].shape == (2, 3)
    with pytest.raises(BatchError, match="where responses start"):
        DataProto.concat([part(3), part(4)])


def test_undeclared_columns_of_different_widths_are_refused_and_a_declaration_helps():
    part = lambda width: DataProto.from_dict({"turn_ids_for_test": torch.zeros(1, width, dtype=torch.int32)})
    with pytest.raises(BatchError, match="declare_field"):
        DataProto.concat([part(1), part(2)])
    declare_field("turn_ids_for_test", torch.int32, ("B", "T"), "this test", padding_value=-1)
    assert DataProto.concat([part(1), part(2)]).batch["turn_ids_for_test"].tolist() == [[0, -1], [0, 0]]


def test_a_field_can_be_declared_twice_alike_but_not_differently():
    first = declare_field("declared_by_test", torch.int32, ("B", "P", "layers"), "test")
    assert declare_field("declared_by_test", torch.int32, ("B", "P", "layers"), "test") is first
    assert declared_field("declared_by_test").time_axis == -2 and declared_field("uid").time_axis is None
    with pytest.raises(ConfigError, match="declared already"):
        declare_field("declared_by_test", torch.int64, ("B", "P", "layers"), "test")
    with pytest.raises(ConfigError, match="start with B"):
        declare_field("declared_wrongly", torch.int32, ("T", "B"))


def test_arrays_are_joined_and_lists_stay_lists():
    parts = [DataProto.from_dict(non_tensors={"ids": [[1, 2]], "n": np.array([i])}) for i in range(2)]
    joined = DataProto.concat(parts)
    assert joined.non_tensor_batch["ids"].tolist() == [[1, 2], [1, 2]] and joined.non_tensor_batch["ids"].shape == (2,)
    assert joined.non_tensor_batch["n"].tolist() == [0, 1]


def test_meta_info_must_agree_and_metrics_are_gathered():
    part = lambda meta: DataProto.from_dict({"x": torch.zeros(1)}, meta_info=meta)
    joined = DataProto.concat(
        [
            part({"t": 1.0, "metrics": {"loss": 1, "len": 3}, "only": [1]}),
            part({"t": 1.0, "metrics": [{"loss": 2}, {"loss": 4}]}),
            part({"metrics": None}),
        ]
    )
    assert joined.meta_info == {"t": 1.0, "only": [1], "metrics": {"loss": [1, 2, 4], "len": [3]}}
    with pytest.raises(AssertionError, match="'t'"):
        DataProto.concat([part({"t": 1.0}), part({"t": 2.0})])
    nan = float("nan")
    assert np.isnan(DataProto.concat([part({"t": nan}), part({"t": float("nan")})]).meta_info["t"])


def test_batches_with_different_columns_are_refused_by_name():
    with pytest.raises(BatchError, match="'y'"):
        DataProto.concat(
            [
                DataProto.from_dict({"x": torch.zeros(1)}),
                DataProto.from_dict({"x": torch.zeros(1), "y": torch.zeros(1)}),
            ]
        )
    with pytest.raises(BatchError, match="without tensors"):
        DataProto.concat([DataProto.from_dict({"x": torch.zeros(1)}), DataProto(non_tensor_batch={"a": np.zeros(1)})])
    with pytest.raises(BatchError, match="no batch"):
        DataProto.concat([])


def test_empty_parts_do_not_change_the_result():
    whole = rollout(*A)
    assert torch.equal(DataProto.concat([whole[:0], whole]).batch["input_ids"], whole.batch["input_ids"])


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("dtype", [torch.int64, torch.bfloat16, torch.bool])
def test_the_fast_copy_gives_what_torch_cat_gives(dtype, threads, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr("verl.protocol.joining.PIECE_BYTES", 10001)
    width = LARGE_BYTES // 64
    parts = [torch.randint(0, 2, (rows, width)).to(dtype) for rows in (3, 0, 61)]
    parts[2] = parts[2].t().contiguous().t()  # not contiguous
    assert torch.equal(cat_rows(parts), torch.cat(parts))


def test_parts_of_mixed_dtypes_are_promoted_and_gradients_flow():
    a, b = torch.ones(2, dtype=torch.int64), torch.ones(2, dtype=torch.float32, requires_grad=True)
    joined = cat_rows([a, b])
    assert joined.dtype == torch.float32 and joined.requires_grad
