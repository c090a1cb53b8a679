from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from verl.protocol.tensor_file import read_tensor_file


def test_tensors_are_those_that_the_library_reads(tmp_path):
    drawn = torch.Generator().manual_seed(0)
    tensors = {
        "f": torch.randn(3, 5, generator=drawn),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "none": torch.empty(0, 4),
        "bf": torch.randn(7, generator=drawn).bfloat16(),
        "bool": torch.tensor([True, False, True]),
        "bytes": torch.arange(5, dtype=torch.uint8),
    }
    save_file(tensors, tmp_path / "x.safetensors")
    read, expected = read_tensor_file(tmp_path / "x.safetensors"), load_file(tmp_path / "x.safetensors")
    assert read.keys() == expected.keys()
    for name, tensor in expected.items():
        assert read[name].dtype == tensor.dtype and torch.equal(read[name], tensor), name


def test_a_file_at_odd_offsets_is_read_and_writing_to_a_tensor_leaves_it_alone(tmp_path):
    header = {"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
              "b": {"dtype": "F32", "shape": [2], "data_offsets": [1, 9]}}  # fmt: skip
    text = json.dumps(header).encode()
    content = len(text).to_bytes(8, "little") + text + b"\x05" + torch.tensor([1.5, -2.0]).numpy().tobytes()
    (tmp_path / "x.safetensors").write_bytes(content)
    read = read_tensor_file(tmp_path / "x.safetensors")
    assert read["a"].tolist() == [5] and read["b"].tolist() == [1.5, -2.0]
    read["a"].zero_()
    read["b"].zero_()
    assert (tmp_path / "x.safetensors").read_bytes() == content


@pytest.mark.parametrize("change", [lambda c: c[:-1], lambda c: c + b"x", lambda c: b"", lambda c: b"\xff" * 8 + c[8:]])
def test_a_damaged_file_is_a_value_error(tmp_path, change):
    save_file({"a": torch.ones(3)}, tmp_path / "x.safetensors")
    (tmp_path / "x.safetensors").write_bytes(change((tmp_path / "x.safetensors").read_bytes()))
    with pytest.raises(ValueError):
        read_tensor_file(tmp_path / "x.safetensors")


def test_a_file_without_numbers_has_empty_tensors(tmp_path):
    save_file({"a": torch.empty(0, 3)}, tmp_path / "x.safetensors")
    assert read_tensor_file(tmp_path / "x.safetensors")["a"].shape == (0, 3)


def test_a_state_of_a_generator_that_was_read_can_be_set(tmp_path):
    before = torch.get_rng_state()
    save_file({"a": torch.zeros(3, dtype=torch.uint8), "rng": before}, tmp_path / "x.safetensors")
    state = read_tensor_file(tmp_path / "x.safetensors")["rng"]
    drawn = torch.rand(3)
    torch.set_rng_state(state)
    assert torch.equal(torch.rand(3), drawn) and state.storage_offset() == 0
