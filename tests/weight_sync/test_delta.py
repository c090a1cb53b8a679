"""Differences of weights: the same bits at the other end whatever the values are, and lost updates are found."""

from __future__ import annotations

import pytest
import torch

from verl.errors import RolloutError
from verl.weight_sync import DeltaDecoder, DeltaEncoder, WeightChunk, chunk_weights
from verl.weight_sync.checksum import WIDTH, as_integers, checksum

STRANGE = {
    torch.float32: [0x7FC00001, -0x3FFFFF, -(1 << 31), 1, 0x7F800000, 0x7F800001],
    torch.bfloat16: [0x7FC1, -0x3E, -(1 << 15), 1, 0x7F80, 0x7F81],
}
"""Bits of: a NaN with a payload, a negative NaN with one, -0.0, the smallest denormal, infinity, a signalling NaN."""


def random_bits(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    kind = torch.int32 if dtype == torch.float32 else torch.int16
    limits = torch.iinfo(kind)
    return torch.randint(limits.min, limits.max, shape, dtype=kind, generator=generator).view(dtype)


def changed(weights: dict[str, torch.Tensor], share: float, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """A copy in which that part of all elements has new bits, half of them one unit in the last place away."""
    found = {}
    for name, tensor in weights.items():
        bits = as_integers(tensor).clone()
        chosen = torch.rand(bits.shape, generator=generator) < share
        near = bits + torch.where(torch.rand(bits.shape, generator=generator) < 0.5, 1, -1).to(bits.dtype)
        other = as_integers(random_bits(tuple(bits.shape), tensor.dtype, generator))
        strange = torch.tensor(STRANGE[tensor.dtype], dtype=bits.dtype)
        some = strange[torch.randint(0, len(strange), bits.shape, generator=generator)]
        kind = torch.rand(bits.shape, generator=generator)
        new = torch.where(kind < 0.5, near, torch.where(kind < 0.75, some, other))
        found[name] = torch.where(chosen, new, bits).view(tensor.dtype).view(tensor.shape)
    return found


def received(chunks) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for chunk in chunks for name, tensor in chunk.tensors}


def same_bits(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(
        a[n].shape == b[n].shape and a[n].dtype == b[n].dtype and torch.equal(as_integers(a[n]), as_integers(b[n]))
        for n in a
    )


def start(generator: torch.Generator) -> dict[str, torch.Tensor]:
    return {
        "wide": random_bits((70, 300), torch.bfloat16, generator),
        "master": random_bits((33, 41), torch.float32, generator),
        "norm": random_bits((7,), torch.bfloat16, generator),
        "scalar": random_bits((), torch.float32, generator),
    }


def test_twenty_updates_in_a_row_are_exact_from_none_to_all_elements_changed():
    generator = torch.Generator().manual_seed(0)
    weights = start(generator)
    encoder, decoder = DeltaEncoder(), DeltaDecoder()
    for version, share in enumerate([1, 0, 0.001, 1, 0.01, 0.5, 0, 0.03, 0.014, 0.39, 0.41] * 2):
        if version:
            weights = changed(weights, share, generator)
        stream = encoder.encode(chunk_weights(weights.items(), 3000, version))
        assert same_bits(received(decoder.decode(stream)), weights), (version, share)
        assert decoder.version == version
        if version and share == 0:
            assert encoder.num_changed == 0 and encoder.num_bytes < 200


def test_only_what_changed_is_sent():
    generator = torch.Generator().manual_seed(1)
    weights = {"w": torch.randn(1000, 1000, generator=generator).bfloat16()}
    encoder = DeltaEncoder()
    list(encoder.encode(chunk_weights(weights.items(), 1 << 30, 0)))
    assert 0.99 < encoder.ratio <= 1 and encoder.num_changed == 1_000_000
    bits = as_integers(weights["w"])
    bits[torch.rand(bits.shape, generator=generator) < 0.014] += 1
    list(encoder.encode(chunk_weights(weights.items(), 1 << 30, 1)))
    # The entropy of the places is 0.106 bits an element, 16 bits / 0.106 = 151 times fewer.
    assert 13_000 < encoder.num_changed < 15_000 and 100 < encoder.ratio < 151


def test_master_weights_are_compared_in_the_samplers_dtype():
    weights = {"w": torch.randn(64, 64)}
    encoder = DeltaEncoder(torch.bfloat16)
    decoder = DeltaDecoder()
    received(decoder.decode(encoder.encode(chunk_weights(weights.items(), 1 << 20, 0))))
    weights["w"] += 1e-6
    found = received(decoder.decode(encoder.encode(chunk_weights(weights.items(), 1 << 20, 1))))
    assert torch.equal(found["w"], weights["w"].bfloat16()) and encoder.num_changed < 400


def test_a_lost_update_is_found_and_a_whole_one_heals():
    generator = torch.Generator().manual_seed(2)
    weights = start(generator)
    encoder, decoder = DeltaEncoder(), DeltaDecoder()
    received(decoder.decode(encoder.encode(chunk_weights(weights.items(), 1 << 20, 0))))
    for version in (1, 2):
        weights = changed(weights, 0.1, generator)
        stream = list(encoder.encode(chunk_weights(weights.items(), 1 << 20, version)))
    with pytest.raises(RolloutError, match=r"an update of the weights was lost: differences to version 1.*version 0"):
        received(decoder.decode(stream))
    with pytest.raises(RolloutError, match="no weights"):
        received(decoder.decode(encoder.encode(chunk_weights(weights.items(), 1 << 20, 3))))
    encoder.reset()
    assert same_bits(received(decoder.decode(encoder.encode(chunk_weights(weights.items(), 1 << 20, 4)))), weights)


def test_a_stream_cut_off_half_way_needs_a_whole_one_on_both_sides():
    generator = torch.Generator().manual_seed(3)
    weights = start(generator)
    encoder, decoder = DeltaEncoder(), DeltaDecoder()
    received(decoder.decode(encoder.encode(chunk_weights(weights.items(), 100, 0))))
    stream = encoder.encode(chunk_weights(changed(weights, 0.1, generator).items(), 100, 1))
    received(decoder.decode([next(stream)]))
    stream.close()
    assert decoder.version is None
    again = changed(weights, 0.1, generator)
    assert same_bits(received(decoder.decode(encoder.encode(chunk_weights(again.items(), 100, 2)))), again)


def test_damage_on_the_way_is_found():
    generator = torch.Generator().manual_seed(4)
    weights = start(generator)
    encoder, decoder = DeltaEncoder(), DeltaDecoder()
    received(decoder.decode(encoder.encode(chunk_weights(weights.items(), 1 << 20, 0))))
    decoder._kept["wide"].view(torch.int16)[3, 5] ^= 1
    with pytest.raises(RolloutError, match=r"wide: .*checksum differs"):
        received(decoder.decode(encoder.encode(chunk_weights(weights.items(), 1 << 20, 1))))
    with pytest.raises(RolloutError, match="not differences"):
        received(decoder.decode([WeightChunk(1, [("wide", weights["wide"])], last=True)]))


@pytest.mark.parametrize("numel", [0, 1, 5, WIDTH, 3 * WIDTH + 17])
def test_a_checksum_sees_every_flip_swap_and_loss(numel):
    generator = torch.Generator().manual_seed(numel)
    tensor = random_bits((numel,), torch.bfloat16, generator)
    assert checksum(tensor) == checksum(tensor.clone()) == checksum(tensor.view(-1, 1))
    for index in {0, numel // 2, numel - 1} & set(range(numel)):
        other = tensor.clone()
        other.view(torch.int16)[index] ^= 1 << 7
        assert checksum(other) != checksum(tensor)
    if numel > WIDTH:
        for a, b in ((0, 1), (0, WIDTH), (5, WIDTH + 9)):
            order = torch.arange(numel)
            order[a], order[b] = b, a
            assert checksum(tensor[order]) != checksum(tensor)
    if numel > 1:
        assert checksum(tensor[1:]) != checksum(tensor)
