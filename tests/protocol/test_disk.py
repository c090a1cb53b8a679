"""Batch files: exact round trips, refusals that name the place, and damaged or hostile files."""

from __future__ import annotations

import json
import pickle
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from safetensors import safe_open

from verl.errors import DataError
from verl.protocol import DataProto, deep_equal
from verl.protocol.codec import DTYPE_CODES
from verl.protocol.disk import deserialize, serialize


def round_trip(data: DataProto, folder: Path) -> DataProto:
    data.save_to_disk(str(folder / "batch.safetensors"))
    return DataProto.load_from_disk(str(folder / "batch.safetensors"))


def column_after(values: list, folder: Path) -> list:
    return round_trip(DataProto.from_dict(non_tensors={"c": values}), folder).non_tensor_batch["c"].tolist()


@pytest.mark.parametrize("rows", [0, 1, 2])
def test_a_column_of_every_third_row_survives(rows, tmp_path):
    back = round_trip(DataProto.from_dict({"t": torch.arange(9)})[::3][:rows], tmp_path)
    assert back.batch["t"].tolist() == [0, 3][:rows]


@pytest.mark.parametrize("dtype", DTYPE_CODES, ids=str)
def test_every_tensor_dtype_survives_bit_for_bit(dtype, tmp_path):
    raw = torch.randint(0, 2, (3, 4, dtype.itemsize), dtype=torch.uint8)
    tensor = raw.view(dtype).squeeze(-1)
    back = round_trip(DataProto.from_dict({"t": tensor, "empty": tensor[:, :0], "row": tensor[:, 0]}), tmp_path)
    assert back.batch["t"].dtype == dtype and back.batch["t"].shape == (3, 4)
    assert torch.equal(back.batch["t"].view(torch.uint8), tensor.view(torch.uint8))
    assert back.batch["empty"].shape == (3, 0) and back.batch["row"].shape == (3,)


def test_views_of_one_storage_are_written_each_for_itself(tmp_path):
    ids = torch.arange(8).reshape(2, 4)
    back = round_trip(DataProto.from_dict({"input_ids": ids, "responses": ids[:, 1:], "turned": ids.flip(1)}), tmp_path)
    assert back.batch["responses"].tolist() == [[1, 2, 3], [5, 6, 7]]
    assert back.batch["turned"].tolist() == [[3, 2, 1, 0], [7, 6, 5, 4]]


@pytest.mark.parametrize(
    "value",
    [
        True,
        False,
        0,
        -(10**30),
        1.0,
        1e-300,
        float("inf"),
        None,
        "",
        "umlaut ä, emoji \U0001f600, lone \ud800",
        b"",
        b"\x00\xff" * 40000,
        bytearray(b"abc"),
        [],
        (),
        {},
        [1, True, 1.0, "1", None],
        [[1, 2], [3, [4, {"a": (5, 6)}]]],
        {"$": 1},
        {"$": ["bytes", [0, 0, 10]]},
        {1: "int key", ("t", 2): None, None: 0},
        list(range(100)),
        [0.1] * 50,
        [2**70] * 20,
        np.float32(0.1),
        np.int64(-1),
        np.bool_(True),
        np.str_("word"),
        np.datetime64("2024-01-01"),
        np.arange(12, dtype=np.uint16).reshape(3, 4),
        np.array(["a", "bcd"]),
        np.array(2.5),
        np.zeros((0, 3), dtype=np.float32),
        torch.arange(6, dtype=torch.bfloat16).reshape(2, 3),
        torch.tensor(True),
    ],
    ids=lambda v: f"{type(v).__name__}-{str(v)[:20]!r}",
)
def test_every_value_comes_back_with_its_type(value, tmp_path):
    [back, other] = column_after([value, {"inside": [value]}], tmp_path)
    assert type(back) is type(value) and deep_equal(back, value)
    inner = other["inside"][0]
    assert type(inner) is type(value) and deep_equal(inner, value)
    if isinstance(value, np.ndarray):
        assert back.dtype == value.dtype and back.shape == value.shape


def test_nan_comes_back_as_nan(tmp_path):
    [single, many] = column_after([float("nan"), [float("nan")] * 20], tmp_path)
    assert np.isnan(single) and np.isnan(many).all() and len(many) == 20


def test_scalars_in_a_mixed_column_keep_their_types(tmp_path):
    values = [True, 1, 1.0, "1", None]
    assert [type(v) for v in column_after(values, tmp_path)] == [bool, int, float, str, type(None)]


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA"])
def test_images_come_back_with_the_same_pixels(mode, tmp_path):
    pixels = np.random.default_rng(0).integers(0, 255, (5, 7, 3), dtype=np.uint8)
    image = Image.fromarray(pixels).convert(mode)
    [[back]] = column_after([[image]], tmp_path)
    assert back.mode == mode and back.size == (7, 5)
    assert np.array_equal(np.asarray(back.convert("RGBA")), np.asarray(image.convert("RGBA")))


def test_numeric_and_nested_arrays_and_meta_info_come_back(tmp_path):
    data = DataProto.from_dict(
        {"x": torch.arange(2)},
        {
            "index": np.array([3, 4], dtype=np.int16),
            "grid": np.array([[1, "a"], [None, 2.0]], dtype=object),
            "names": np.array(["a", "bc"]),
        },
        {"temperature": 0.7, "flag": True, "step": 3, "shape": (1, 2), "table": {"w": np.eye(2)}},
    )
    back = round_trip(data, tmp_path)
    assert back.non_tensor_batch["index"].dtype == np.int16
    assert back.non_tensor_batch["grid"].tolist() == [[1, "a"], [None, 2.0]]
    assert back.non_tensor_batch["names"].tolist() == ["a", "bc"]
    assert deep_equal(back.meta_info, data.meta_info)


def test_batches_without_tensors_or_without_rows_come_back(tmp_path):
    assert round_trip(DataProto(), tmp_path).batch is None
    assert len(round_trip(DataProto.from_dict(non_tensors={"a": ["x"]}), tmp_path)) == 1
    empty = round_trip(DataProto.from_dict({"x": torch.zeros(0, 3)}, {"a": []}), tmp_path)
    assert len(empty) == 0 and empty.batch["x"].shape == (0, 3) and empty.non_tensor_batch["a"].dtype == object


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text() | st.integers(), inner),
    max_leaves=20,
)


@settings(max_examples=25, deadline=None)
@given(st.lists(json_values, min_size=1, max_size=4), st.dictionaries(st.text(), json_values, max_size=3))
def test_any_nested_value_survives(values, meta):
    data = DataProto.from_dict(non_tensors={"c": values}, meta_info=meta)
    back = deserialize(DataProto, b"".join(piece.tobytes() for piece in serialize(data)))
    assert deep_equal(back.non_tensor_batch["c"].tolist(), values) and deep_equal(back.meta_info, meta)


# ---- refusals --------------------------------------------------------------------------------------------------


class Thing:
    pass


@pytest.mark.parametrize(
    "value, reason",
    [
        (Thing(), "Thing"),
        ({1, 2}, "set"),
        (lambda: 0, "function"),
        (1j, "complex"),
        (Image.new("CMYK", (2, 2)), "CMYK"),
        (np.zeros(2, dtype=[("a", "i4")]), "dtype"),
    ],
    ids=lambda v: str(v)[:12],
)
def test_what_cannot_be_written_is_refused_with_key_row_and_place(value, reason, tmp_path):
    data = DataProto.from_dict(non_tensors={"info": [{"ok": 1}, {"deep": [0, value]}]})
    path = tmp_path / "batch"
    with pytest.raises(DataError, match=reason) as caught:
        data.save_to_disk(str(path))
    message = str(caught.value)
    assert "non_tensor_batch['info'] row 1" in message and "['deep'][1]" in message
    assert not path.exists() and not list(tmp_path.iterdir())


def test_meta_info_and_tensors_that_cannot_be_written_are_named(tmp_path):
    with pytest.raises(DataError, match=r"meta_info\['who'\]\[0\]"):
        DataProto(meta_info={"who": [Thing()]}).save_to_disk(str(tmp_path / "b"))
    sparse = DataProto.from_dict({"s": torch.eye(2).to_sparse()})
    with pytest.raises(DataError, match=r"batch\['s'\]"):
        sparse.save_to_disk(str(tmp_path / "b"))


def test_a_value_that_contains_itself_is_refused(tmp_path):
    endless: list = []
    endless.append(endless)
    with pytest.raises(DataError, match="nested"):
        DataProto.from_dict(non_tensors={"c": [endless]}).save_to_disk(str(tmp_path / "b"))


def test_a_failed_save_leaves_the_old_file(tmp_path):
    path = str(tmp_path / "b")
    DataProto.from_dict({"x": torch.ones(1)}).save_to_disk(path)
    with pytest.raises(DataError):
        DataProto.from_dict(non_tensors={"c": [Thing()]}).save_to_disk(path)
    assert DataProto.load_from_disk(path).batch["x"].tolist() == [1.0]


# ---- damaged and hostile files -----------------------------------------------------------------------------------


def saved(folder: Path) -> Path:
    path = folder / "batch"
    DataProto.from_dict({"x": torch.arange(4)}, {"c": [list(range(20)), b"bytes", "s", 1]}).save_to_disk(str(path))
    return path


def test_the_file_is_plain_safetensors(tmp_path):
    with safe_open(saved(tmp_path), framework="np") as file:
        assert file.get_tensor("batch.x").tolist() == [0, 1, 2, 3]
        assert json.loads(file.get_tensor("document").tobytes())["rows"] == 4


def test_a_missing_file_is_reported():
    with pytest.raises(DataError, match="no such file"):
        DataProto.load_from_disk("/nowhere/batch")


def test_a_file_cut_off_anywhere_is_reported(tmp_path):
    path = saved(tmp_path)
    whole = path.read_bytes()
    for length in (0, 4, 8, 60, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(DataError, match="not a whole batch file"):
            DataProto.load_from_disk(str(path))


class Exploding:
    def __reduce__(self):
        return pytest.fail, ("code of a batch file was run",)


@pytest.mark.parametrize("content", [pickle.dumps(Exploding()), b"\x93NUMPY" + bytes(64), zlib.compress(bytes(99))])
def test_other_formats_are_refused_and_nothing_in_them_runs(content, tmp_path):
    path = tmp_path / "batch"
    path.write_bytes(content)
    with pytest.raises(DataError, match="pickles are not read"):
        DataProto.load_from_disk(str(path))


def safetensors_bytes(metadata: dict, document: bytes, blob: bytes = b"") -> bytes:
    ends = len(document), len(document) + len(blob)
    header = {
        "__metadata__": metadata,
        "document": {"dtype": "U8", "shape": [ends[0]], "data_offsets": [0, ends[0]]},
        "bytes.0": {"dtype": "U8", "shape": [len(blob)], "data_offsets": list(ends)},
    }
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + document + blob


GOOD = {"format": "verl.DataProto", "version": "1"}


@pytest.mark.parametrize(
    "metadata, document, message",
    [
        ({"format": "pt"}, b"{}", "does not hold a batch"),
        ({**GOOD, "version": "9"}, b"{}", "another version"),
        (GOOD, b"{", "damaged"),
        (GOOD, b"{}", "contradicts itself"),
        (GOOD, b"[" * 100000, "damaged"),
        (GOOD, b'{"rows": 3, "columns": {"c": 1}, "meta_info": {}}', "not a numpy array"),
        (GOOD, b'{"rows": null, "columns": {}, "meta_info": {"a": {"$": ["import", "os"]}}}', "unknown kind"),
        (GOOD, b'{"rows": null, "columns": {}, "meta_info": {"a": {"$": ["bytes", [0, 0, 99]]}}}', "damaged"),
        (GOOD, b'{"rows": null, "columns": {}, "meta_info": {"a": {"$": ["bytes", [-1, 0, 1]]}}}', "damaged"),
        (GOOD, b'{"rows": null, "columns": {}, "meta_info": {"a": {"$": ["bytes", [0, -1, 1]]}}}', "damaged"),
        (GOOD, b'{"rows": null, "columns": {}, "meta_info": {"a": {"$": ["array", "|O", [1], [0, 0, 8]]}}}', "damaged"),
        (
            GOOD,
            b'{"rows": null, "columns": {}, "meta_info": {"a": {"$": ["array", "<f4", [9], [0, 0, 8]]}}}',
            "damaged",
        ),
        (
            GOOD,
            b'{"rows": null, "columns": {}, "meta_info": {"a": {"$": ["tensor", "F32", [9], [0, 0, 8]]}}}',
            "damaged",
        ),
        (GOOD, b'{"rows": null, "columns": {}, "meta_info": {"a": {"$": ["png", [0, 0, 8]]}}}', "damaged"),
        (GOOD, b'{"rows": null, "columns": {}, "meta_info": {"a": {"$": 5}}}', "damaged"),
    ],
)
def test_altered_contents_give_one_clear_error(metadata, document, message, tmp_path):
    path = tmp_path / "batch"
    path.write_bytes(safetensors_bytes(metadata, document, bytes(8)))
    with pytest.raises(DataError, match=message):
        DataProto.load_from_disk(str(path))


def test_images_that_rows_share_are_written_once_and_read_as_one(tmp_path):
    inputs = {"pixel_values": torch.arange(400_000, dtype=torch.float32)}
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (200, 200, 3), dtype=np.uint8))
    back = column_after([[inputs, image]] * 4, tmp_path)
    assert all(back[i][0] is back[0][0] and back[i][1] is back[0][1] for i in range(4))
    assert torch.equal(back[0][0]["pixel_values"], inputs["pixel_values"])
    written = sum(file.stat().st_size for file in tmp_path.rglob("*") if file.is_file())
    assert written < 2 * 1_600_000
