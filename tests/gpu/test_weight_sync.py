"""Weights on a GPU: from process to process over CUDA IPC, and differences that are found on the device."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.multiprocessing as processes

from verl.weight_sync import CudaIpcTransport, DeltaDecoder, DeltaEncoder, chunk_weights


def weights_of(version: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(version)
    return {name: torch.randn(100, 37, generator=generator).bfloat16().cuda() for name in "abcdefgh"}


def _sampler(address: dict, folder: str) -> None:
    theirs = CudaIpcTransport(**address, timeout=60)
    for version in (1, 2):
        found = {name: tensor.clone() for chunk in theirs.receive() for name, tensor in chunk.tensors}
        assert all(tensor.is_cuda and torch.equal(tensor, found[name]) for name, tensor in weights_of(version).items())
    theirs.close()
    Path(folder, "done").touch()


def test_weights_reach_another_process_in_device_memory() -> None:
    ours = CudaIpcTransport(bucket_bytes=20000, timeout=60)
    with TemporaryDirectory() as folder:
        worker = processes.get_context("spawn").Process(target=_sampler, args=(ours.address, folder))
        worker.start()
        for version in (1, 2):
            ours.send(chunk_weights(weights_of(version).items(), 16000, version))
        worker.join(60)
        assert worker.exitcode == 0 and Path(folder, "done").exists()
    ours.close()


def test_differences_on_the_device_are_exact() -> None:
    encoder, decoder = DeltaEncoder(), DeltaDecoder()
    weights = weights_of(0)
    for version in range(4):
        stream = encoder.encode(chunk_weights(weights.items(), 1 << 20, version))
        found = {name: tensor.clone() for chunk in decoder.decode(stream) for name, tensor in chunk.tensors}
        assert all(torch.equal(found[name], tensor) for name, tensor in weights.items())
        for tensor in weights.values():
            tensor.view(torch.int16)[version, :7] += 1
    assert encoder.num_changed == 8 * 7
