"""`DataProto`: every member against small hand-made batches."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from verl.errors import BatchError, DataError
from verl.protocol import DataProto, DataProtoConfig, DataProtoItem


def batch(rows: int = 4, **meta) -> DataProto:
    """Rows 0, 1, 2, ...: ``x`` is (rows, 2) with 10*row and 10*row + 1, ``uid`` is u0, u1, ..."""
    x = torch.arange(rows)[:, None] * 10 + torch.arange(2)
    return DataProto.from_dict({"x": x}, {"uid": [f"u{i}" for i in range(rows)]}, meta_info=dict(meta))


def rows_of(data: DataProto) -> list[int]:
    """The original row numbers, from the tensor; the array must tell the same."""
    found = (data.batch["x"][:, 0] // 10).tolist()
    assert [f"u{i}" for i in found] == data.non_tensor_batch["uid"].tolist()
    return found


# ---- making ----------------------------------------------------------------------------------------------------


def test_lists_of_equal_length_become_one_object_per_row():
    data = DataProto.from_dict({"x": torch.zeros(2)}, {"ids": [[1, 2, 3], [4, 5, 6]]})
    assert data.non_tensor_batch["ids"].shape == (2,)
    assert data.non_tensor_batch["ids"][1] == [4, 5, 6]


def test_numeric_arrays_keep_their_dtype():
    data = DataProto.from_dict(non_tensors={"index": np.arange(3, dtype=np.int32)})
    assert data.non_tensor_batch["index"].dtype == np.int32 and len(data) == 3


def test_tensors_of_different_lengths_are_refused_with_their_shapes():
    with pytest.raises(BatchError, match=r"'b': \(3,\)"):
        DataProto.from_dict({"a": torch.zeros(2), "b": torch.zeros(3)})


def test_a_column_of_another_length_is_refused_by_name():
    with pytest.raises(BatchError, match="'uid'"):
        DataProto.from_dict({"a": torch.zeros(2)}, {"uid": ["x"]})


def test_a_string_is_not_a_column():
    with pytest.raises(BatchError, match="one value per row"):
        DataProto.from_dict({"a": torch.zeros(2)}, {"uid": "ab"})


@pytest.mark.parametrize("dims", [0, 2])
def test_more_than_one_batch_axis_is_an_assertion_error_too(dims):
    with pytest.raises(AssertionError):
        DataProto.from_dict({"a": torch.zeros(2, 2)}, num_batch_dims=dims)
    with pytest.raises(BatchError, match="one batch axis"):
        DataProto(batch=TensorDict({"a": torch.zeros(2, 2)}, batch_size=[2, 2]))


def test_from_single_dict_splits_by_type_and_refuses_others():
    data = DataProto.from_single_dict({"x": torch.zeros(2), "uid": np.array(["a", "b"], dtype=object)}, {"k": 1})
    assert list(data.batch.keys()) == ["x"] and list(data.non_tensor_batch) == ["uid"] and data.meta_info == {"k": 1}
    with pytest.raises(ValueError, match="'uid': 'list'"):
        DataProto.from_single_dict({"x": torch.zeros(2), "uid": ["a", "b"]})


def test_tensordict_round_trip_keeps_columns_and_meta_info():
    data = batch(3, temperature=0.5, names=["a"])
    back = DataProto.from_tensordict(data.to_tensordict())
    assert rows_of(back) == [0, 1, 2] and back.meta_info == {"temperature": 0.5, "names": ["a"]}


def test_a_name_used_twice_cannot_become_a_tensordict():
    data = batch(2)
    data.meta_info["x"] = 1
    with pytest.raises(BatchError, match="'x'"):
        data.to_tensordict()


# ---- looking ---------------------------------------------------------------------------------------------------


def test_length_falls_back_to_arrays_and_is_zero_when_empty():
    assert len(batch(5)) == 5
    assert len(DataProto(non_tensor_batch={"a": np.zeros(3)})) == 3
    assert len(DataProto()) == 0


def test_an_integer_gives_one_row_and_out_of_range_is_an_index_error():
    item = batch(3, k=1)[-1]
    assert isinstance(item, DataProtoItem)
    assert item.batch["x"].tolist() == [20, 21] and item.non_tensor_batch["uid"] == "u2" and item.meta_info == {"k": 1}
    with pytest.raises(IndexError):
        batch(3)[3]
    assert [item.non_tensor_batch["uid"] for item in batch(2)] == ["u0", "u1"]  # iteration ends by IndexError


@pytest.mark.parametrize(
    "index, expected",
    [
        (slice(1, 3), [1, 2]),
        (slice(None, None, 2), [0, 2]),
        ([3, 0], [3, 0]),
        ([True, False, False, True], [0, 3]),
        (np.array([1, -1]), [1, 3]),
        (np.array([False, True, True, False]), [1, 2]),
        (torch.tensor([2, 2]), [2, 2]),
        (torch.tensor([True, True, False, False]), [0, 1]),
        ([], []),
    ],
)
def test_rows_are_chosen_by_slices_indices_and_masks(index, expected):
    assert rows_of(batch(4)[index]) == expected


def test_a_mask_of_wrong_length_and_an_index_out_of_range_are_refused():
    with pytest.raises(BatchError, match="one entry per row"):
        batch(4)[[True, False]]
    with pytest.raises(IndexError):
        batch(4)[[0, 4]]
    with pytest.raises(TypeError):
        batch(4)["x"]


def test_data_info_names_every_column(capsys):
    text = batch(4, temperature=1.0).get_data_info()
    assert "x: (4, 2) int64 cpu" in text and "uid: (4,) object of str" in text and "temperature: float" in text
    batch(4).print_size("here")
    assert capsys.readouterr().out.startswith("here: tensors 0.0000")


# ---- columns ---------------------------------------------------------------------------------------------------


def test_select_keeps_the_listed_keys_and_shares_memory():
    data = batch(4, a=1, b=2)
    data.batch["y"] = torch.ones(4)
    chosen = data.select(batch_keys=["x"], non_tensor_batch_keys=[], meta_info_keys=["a"])
    assert list(chosen.batch.keys()) == ["x"] and not chosen.non_tensor_batch and chosen.meta_info == {"a": 1}
    assert chosen.batch["x"].data_ptr() == data.batch["x"].data_ptr()
    chosen.batch["z"] = torch.zeros(4)
    assert "z" not in data.batch.keys()
    everything = data.select(deepcopy=True)
    assert everything.batch["x"].data_ptr() != data.batch["x"].data_ptr() and everything.meta_info == data.meta_info


def test_a_missing_key_is_reported_with_the_nearest_name_or_its_producer():
    data = batch(2)
    data.batch["responses"] = torch.zeros(2, 3)
    with pytest.raises(BatchError, match="'responses'"):
        data.select(batch_keys=["response"])
    with pytest.raises(BatchError, match="compute_ref_log_prob"):
        data.select(batch_keys=["ref_log_prob"])


def test_pop_moves_keys_and_a_missing_key_removes_nothing():
    data = batch(2, a=1, b=2)
    popped = data.pop(batch_keys=["x"], meta_info_keys=["a"])
    assert list(popped.batch.keys()) == ["x"] and popped.meta_info == {"a": 1} and not popped.non_tensor_batch
    assert not list(data.batch.keys()) and data.meta_info == {"b": 2} and len(data) == 2
    with pytest.raises(AssertionError):
        popped.pop(batch_keys=["x", "y"])
    assert "x" in popped.batch.keys()


def test_rename_changes_tensor_keys_in_place():
    data = batch(2)
    data.batch["y"] = torch.ones(2)
    assert data.rename(["x", "y"], ["y", "x"]) is data  # a swap
    assert data.batch["x"].tolist() == [1, 1] and data.batch["y"].shape == (2, 2)
    data.rename("x", "z")
    assert set(data.batch.keys()) == {"y", "z"}
    with pytest.raises(BatchError, match="used already"):
        data.rename("y", "z")
    with pytest.raises(BatchError, match="no 'nothing'"):
        data.rename("nothing", "q")


def test_union_adds_columns_in_place_and_shared_ones_must_be_equal():
    data, other = batch(2, a=1), DataProto.from_dict({"x": batch(2).batch["x"].clone(), "y": torch.ones(2)})
    other.meta_info["b"] = 2
    assert data.union(other) is data
    assert set(data.batch.keys()) == {"x", "y"} and data.meta_info == {"a": 1, "b": 2}
    with pytest.raises(AssertionError, match="'x'"):
        data.union(DataProto.from_dict({"x": torch.zeros(2, 2, dtype=torch.int64)}))
    with pytest.raises(AssertionError, match="'a'"):
        data.union(DataProto(meta_info={"a": 5}))
    with pytest.raises(AssertionError, match="different sizes"):
        data.union(DataProto.from_dict({"q": torch.zeros(3)}))


def test_union_finds_nan_equal_to_nan_deep_inside_objects():
    def one() -> DataProto:
        info = [{"score": float("nan"), "path": [np.array([1.0, np.nan])]}]
        return DataProto.from_dict({"v": torch.tensor([float("nan")])}, {"info": info})

    assert len(one().union(one())) == 1
    other = one()
    other.non_tensor_batch["info"][0]["path"][0][0] = 2.0
    with pytest.raises(BatchError, match="'info'"):
        one().union(other)


# ---- rows ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cut", [lambda data: data[:], lambda data: data.chunk(1)[0], lambda data: data.split(9)[0]])
def test_a_slice_of_all_rows_has_columns_of_its_own(cut):
    data = batch(4)
    part = cut(data)
    part.rename("x", "y")
    part.pop(non_tensor_batch_keys=["uid"])
    assert list(data.batch.keys()) == ["x"] and rows_of(data) == [0, 1, 2, 3]
    assert part.batch["y"].data_ptr() == data.batch["x"].data_ptr(), "without a copy of the numbers"


def test_batches_whose_tensors_are_all_taken_out_are_joined():
    emptied = batch(2)
    emptied.pop(["x"])
    joined = DataProto.concat([emptied, batch(2).select([]), DataProto.from_dict(non_tensors={"uid": ["u0"]})])
    assert joined.non_tensor_batch["uid"].tolist() == ["u0", "u1", "u0", "u1", "u0"]


def test_chunk_slice_and_split_are_views():
    data = batch(6, k=1)
    base, row_bytes = data.batch["x"].data_ptr(), 2 * 8
    for start, part in zip((0, 2, 4), data.chunk(3)):
        assert part.batch["x"].data_ptr() == base + start * row_bytes and part.meta_info is data.meta_info
        assert np.shares_memory(part.non_tensor_batch["uid"], data.non_tensor_batch["uid"])
    assert data.slice(2, 5).batch["x"].data_ptr() == base + 2 * row_bytes
    assert data[1:].batch["x"].data_ptr() == base + row_bytes
    assert [part.batch["x"].data_ptr() - base for part in data.split(4)] == [0, 4 * row_bytes]
    assert [rows_of(part) for part in data.split(4)] == [[0, 1, 2, 3], [4, 5]]


def test_a_batch_that_does_not_divide_says_which_sizes_would_work():
    with pytest.raises(AssertionError) as caught:
        batch(6).chunk(4)
    assert "6 rows" in str(caught.value) and "3" in str(caught.value) and "divisible by 4" in str(caught.value)


def test_with_padding_enabled_chunks_differ_by_one_row():
    data = DataProto.from_dict({"x": torch.arange(7)}, auto_padding=True)
    assert [part.batch["x"].tolist() for part in data.chunk(3)] == [[0, 1, 2], [3, 4], [5, 6]]
    assert [len(part) for part in data.chunk(5)] == [2, 2, 1, 1, 1]


def test_padding_is_enabled_by_flag_setting_or_environment(monkeypatch):
    assert not batch().is_padding_enabled()
    assert DataProto.from_dict({"x": torch.zeros(1)}, auto_padding=True).is_padding_enabled()
    monkeypatch.setenv("VERL_AUTO_PADDING", "1")
    assert batch().is_padding_enabled()
    DataProtoConfig.auto_padding = False
    try:
        assert not batch().is_padding_enabled()
    finally:
        DataProtoConfig.auto_padding = None
    assert DataProtoConfig.auto_padding is True


@pytest.mark.parametrize("candidate, row", [("", 2), ("last", 2), ("first", 0)])
def test_padding_appends_copies_of_the_first_or_last_row_in_place(candidate, row):
    data = batch(3)
    data.padding(2, candidate)
    assert rows_of(data) == [0, 1, 2, row, row]
    with pytest.raises(BatchError, match="middle"):
        data.padding(1, "middle")


def test_repeat_interleaved_is_aabb_and_otherwise_abab():
    assert rows_of(batch(2).repeat(2)) == [0, 0, 1, 1]
    assert rows_of(batch(2).repeat(2, interleave=False)) == [0, 1, 0, 1]


def test_sample_level_repeat_takes_one_count_per_row():
    assert rows_of(batch(3).sample_level_repeat([2, 0, 3])) == [0, 0, 2, 2, 2]
    assert rows_of(batch(2).sample_level_repeat(torch.tensor([1, 2]))) == [0, 1, 1]
    with pytest.raises(BatchError):
        batch(3).sample_level_repeat([1, 2])


def test_unfold_column_chunks_cuts_axis_one_and_repeats_the_rest():
    data = DataProto.from_dict(
        {"pair": torch.arange(8).reshape(2, 4), "x": torch.tensor([7, 8])},
        {"uid": ["a", "b"], "both": np.array([[1, 2], [3, 4]], dtype=object)},
    )
    out = data.unfold_column_chunks(2, split_keys=["pair", "both"])
    assert out.batch["pair"].tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert out.batch["x"].tolist() == [7, 7, 8, 8]
    assert out.non_tensor_batch["uid"].tolist() == ["a", "a", "b", "b"]
    assert out.non_tensor_batch["both"].tolist() == [[1], [2], [3], [4]]
    with pytest.raises(BatchError, match="does not divide"):
        data.unfold_column_chunks(3, split_keys=["pair"])


def test_reorder_moves_tensors_and_arrays_in_place():
    data = batch(3)
    data.reorder(torch.tensor([2, 0, 1]))
    assert rows_of(data) == [2, 0, 1]
    with pytest.raises(BatchError):
        data.reorder([0, 1])


# ---- iterating -------------------------------------------------------------------------------------------------


def test_mini_batches_cover_every_row_once_per_epoch_and_repeat_by_seed():
    def order(seed: int) -> list[list[int]]:
        return [rows_of(p) for p in batch(6, k=1).make_iterator(2, 2, seed, {"shuffle": True})]

    found = order(1)
    for epoch in (found[:3], found[3:]):
        assert sorted(row for part in epoch for row in part) == list(range(6))
    assert found == order(1) and found != order(2) and found[:3] != found[3:]


def test_mini_batches_without_shuffling_are_in_order_and_draw_no_random_numbers():
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    parts = list(batch(4, k=1).make_iterator(2, 1))
    assert [rows_of(p) for p in parts] == [[0, 1], [2, 3]] and parts[0].meta_info == {"k": 1}
    assert torch.equal(torch.rand(1), expected)


def test_mini_batches_that_do_not_divide_fail_before_the_first_one():
    with pytest.raises(AssertionError, match=r"\[1, 2, 3, 6\]"):
        batch(6).make_iterator(4, 1)


def test_to_is_in_place_and_copies_are_independent():
    data = batch(2, k=[1])
    assert data.to("cpu") is data
    shallow, deep = copy.copy(data), copy.deepcopy(data)
    shallow.meta_info["new"] = 1
    shallow.batch["new"] = torch.zeros(2)
    assert "new" not in data.meta_info and "new" not in data.batch.keys()
    assert shallow.batch["x"].data_ptr() == data.batch["x"].data_ptr()
    deep.batch["x"][0] = 99
    deep.meta_info["k"].append(2)
    assert rows_of(data) == [0, 1] and data.meta_info == {"k": [1]}


def test_batch_error_is_a_data_error():
    assert issubclass(BatchError, DataError)
