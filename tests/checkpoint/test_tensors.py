from __future__ import annotations

import zlib

import pytest
import torch
from safetensors import safe_open

from verl.checkpoint.files import FileRecord
from verl.checkpoint.tensors import DTYPE_NAMES, read_tensors, write_tensors
from verl.errors import CheckpointError


def examples() -> dict[str, torch.Tensor]:
    found = {f"of {dtype}": torch.arange(6).reshape(2, 3).to(dtype) for dtype in DTYPE_NAMES}
    found["scalar"] = torch.tensor(1.5)
    found["empty"] = torch.zeros(0, 4)
    found["transposed"] = torch.arange(6.0).reshape(2, 3).T
    found["part"] = torch.arange(10)[3:5]
    found["nan"] = torch.tensor([torch.nan, torch.inf, -0.0])
    return found


def test_every_dtype_and_layout_comes_back_bit_for_bit(tmp_path):
    write_tensors(tmp_path / "x.safetensors", examples())
    found = read_tensors(tmp_path / "x.safetensors")
    assert set(found) == set(examples())
    for name, tensor in examples().items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape, name
        assert torch.equal(
            found[name].view(torch.uint8) if tensor.dim() else found[name],
            tensor.contiguous().view(torch.uint8) if tensor.dim() else tensor,
        ), name


def test_the_record_is_that_of_the_file(tmp_path):
    path = tmp_path / "x.safetensors"
    record = write_tensors(path, examples())
    data = path.read_bytes()
    assert record == FileRecord(len(data), f"{zlib.crc32(data):08x}") == FileRecord.of(path)


def test_the_library_reads_the_file_and_finds_its_format(tmp_path):
    write_tensors(tmp_path / "x.safetensors", {"w": torch.ones(2)})
    with safe_open(tmp_path / "x.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"} and torch.equal(file.get_tensor("w"), torch.ones(2))


def test_a_dtype_without_a_name_is_an_error_that_names_the_tensor(tmp_path):
    with pytest.raises(CheckpointError, match=r"w: safetensors has no such dtype.*complex64"):
        write_tensors(tmp_path / "x.safetensors", {"w": torch.ones(2, dtype=torch.complex64)})


def test_a_truncated_file_is_an_error_that_names_it(tmp_path):
    path = tmp_path / "x.safetensors"
    write_tensors(path, {"w": torch.ones(100)})
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(CheckpointError, match=r"x\.safetensors"):
        read_tensors(path)
