"""The random numbers: Philox by its published answers, and functions of their key and position only."""

from __future__ import annotations

import numpy as np
import pytest

from verl.rollout.uniforms import philox4x32, stream_key, uniforms

ALL_ONES = 0xFFFFFFFF


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    # The known answers of philox4x32-10 that the authors' library (Random123, kat_vectors) publishes.
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ALL_ONES,) * 4, (ALL_ONES,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_its_published_answers(counter, key, expected):
    found = philox4x32(np.array([counter], dtype=np.uint64), np.array([key], dtype=np.uint64))
    assert tuple(int(x) for x in found[0]) == expected


def test_a_number_depends_on_its_key_and_position_only():
    keys = np.array([stream_key(1, "a", 0), stream_key(1, "a", 1), stream_key(1, "b", 0)], dtype=np.uint64)
    together = uniforms(keys, np.array([5, 0, 100]), 40)
    alone = uniforms(keys[1:2], np.array([17]), 3)
    np.testing.assert_array_equal(together[1, 17:20], alone[0])
    assert len({stream_key(s, u, i) for s in (0, 1) for u in ("a", "b", "a1") for i in (0, 1, 11)}) == 18


def test_numbers_are_uniform_and_below_one():
    keys = np.array([stream_key(0, str(i), 0) for i in range(100)], dtype=np.uint64)
    found = uniforms(keys, np.zeros(100), 1000)
    assert found.dtype == np.float64 and found.min() >= 0 and found.max() < 1
    counts = np.histogram(found, bins=50, range=(0, 1))[0]
    chi_square = ((counts - 2000) ** 2 / 2000).sum()
    assert chi_square < 86  # 99.9 % quantile with 49 degrees of freedom is 85.4
    assert abs(np.corrcoef(found[:, :-1].ravel(), found[:, 1:].ravel())[0, 1]) < 0.01
    assert abs(np.corrcoef(found[:-1].ravel(), found[1:].ravel())[0, 1]) < 0.01


def test_positions_beyond_32_bits_go_on():
    key = np.array([stream_key(0, "a", 0)], dtype=np.uint64)
    assert uniforms(key, np.array([2**32 - 1]), 2)[0, 1] != uniforms(key, np.array([0]), 1)[0, 0]
