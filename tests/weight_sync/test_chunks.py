"""Cutting a stream of weights into buckets."""

from __future__ import annotations

import weakref

import pytest
import torch

from verl.errors import RolloutError
from verl.weight_sync import DiskTransport, WeightInventory, chunk_weights


def weights(*sizes: int):
    for number, size in enumerate(sizes):
        yield f"w{number}", torch.zeros(size)


def test_buckets_hold_as_much_as_fits_and_a_large_tensor_travels_alone():
    chunks = list(chunk_weights(weights(10, 10, 5, 100, 1, 1), bucket_bytes=80, version=4))
    assert [[name for name, _ in c.tensors] for c in chunks] == [["w0", "w1"], ["w2"], ["w3"], ["w4", "w5"]]
    assert [c.num_bytes for c in chunks] == [80, 20, 400, 8]
    assert [c.last for c in chunks] == [False, False, False, True]
    assert {c.version for c in chunks} == {4}


def test_the_source_is_read_one_tensor_ahead_only():
    taken = []

    def source():
        for name, tensor in weights(4, 4, 4, 4):
            taken.append(name)
            yield name, tensor

    stream = chunk_weights(source(), bucket_bytes=16, version=0)
    next(stream)
    assert taken == ["w0", "w1"]


def test_nothing_to_send_and_buckets_without_room_are_errors():
    with pytest.raises(RolloutError, match="exported no weights"):
        list(chunk_weights([], 10, version=1))
    with pytest.raises(RolloutError, match="bucket"):
        list(chunk_weights(weights(1), 0, version=1))


class Watched:
    """Bytes of the tensors that are alive among those it made, and the most there ever were."""

    def __init__(self):
        self.alive = self.most = 0

    def make(self, numel: int) -> torch.Tensor:
        tensor = torch.zeros(numel)
        self.alive += tensor.nbytes
        self.most = max(self.most, self.alive)
        weakref.finalize(tensor, self._gone, tensor.nbytes)
        return tensor

    def _gone(self, num_bytes: int) -> None:
        self.alive -= num_bytes


@pytest.mark.parametrize("bucket", [400, 1000, 2400])
def test_the_peak_is_one_bucket_and_one_layer(bucket, tmp_path):
    layer = [100, 50, 30, 20]  # 800 bytes
    names = [f"layer{number}.{part}" for number in range(6) for part in range(len(layer))]
    watched = Watched()

    def gathered():
        """As the sharded engines export: a layer is whole at once, and gone before the next one is gathered."""
        for number in range(6):
            whole = {f"layer{number}.{part}": watched.make(numel) for part, numel in enumerate(layer)}
            yield from whole.items()
            del whole

    targets = {name: torch.empty(layer[index % 4]) for index, name in enumerate(names)}
    WeightInventory(targets).receive(chunk_weights(gathered(), bucket, 1), 1)
    assert 800 < watched.most <= bucket + 800
    watched.most = 0
    DiskTransport(tmp_path).send(chunk_weights(gathered(), bucket, 1))
    assert 800 < watched.most <= bucket + 800
    assert watched.alive == 0
