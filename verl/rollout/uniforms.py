"""Uniform random numbers that are a function of (seed, uid, sample index, token position) and of nothing else.

A counter-based generator (Philox4x32 with 10 rounds; Salmon, Moraes, Dror, Shaw: "Parallel Random Numbers: As Easy as
1, 2, 3", SC 2011) has no state to carry along: the number for token 57 of a request is the same whether the request
runs alone, in a batch, after an interruption or on another machine.
"""

from __future__ import annotations

import hashlib

import numpy as np

ROUNDS = 10
_MULTIPLIER_0, _MULTIPLIER_1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_WEYL_0, _WEYL_1 = 0x9E3779B9, 0xBB67AE85
_LOW, _SHIFT = np.uint64(0xFFFFFFFF), np.uint64(32)


def stream_key(seed: int, uid: str, sample_index: int) -> tuple[int, int]:
    """Two 32-bit words that name the stream of one request."""
    name = f"{seed}\x1f{uid}\x1f{sample_index}".encode()
    digest = hashlib.blake2b(name, digest_size=8).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")


def philox4x32(counters: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """The Philox4x32-10 bijection.

    Args:
        counters: (N, 4) uint64, each below 2**32.
        keys: (N, 2) or (2,) uint64, each below 2**32.

    Returns:
        (N, 4) uint64, each below 2**32.
    """
    c0, c1, c2, c3 = (counters[..., i].astype(np.uint64) for i in range(4))
    k0, k1 = keys[..., 0].astype(np.uint64), keys[..., 1].astype(np.uint64)
    for round_ in range(ROUNDS):
        r0 = (k0 + np.uint64(round_ * _WEYL_0 & 0xFFFFFFFF)) & _LOW
        r1 = (k1 + np.uint64(round_ * _WEYL_1 & 0xFFFFFFFF)) & _LOW
        p0, p1 = c0 * _MULTIPLIER_0, c2 * _MULTIPLIER_1
        c0, c1, c2, c3 = (p1 >> _SHIFT) ^ c1 ^ r0, p1 & _LOW, (p0 >> _SHIFT) ^ c3 ^ r1, p0 & _LOW
    return np.stack((c0, c1, c2, c3), axis=-1)


def uniforms(keys: np.ndarray, starts: np.ndarray, count: int) -> np.ndarray:
    """Numbers for ``count`` positions of each stream.

    Args:
        keys: (R, 2) uint64 from `stream_key`.
        starts: (R,) first position of each stream.

    Returns:
        (R, count) float64 in [0, 1), multiples of 2**-53.
    """
    rows = len(keys)
    positions = np.add(starts.astype(np.uint64)[:, None], np.arange(count, dtype=np.uint64), dtype=np.uint64)
    counters = np.zeros((rows, count, 4), dtype=np.uint64)
    counters[..., 0], counters[..., 1] = positions & _LOW, positions >> _SHIFT
    words = philox4x32(counters, keys[:, None, :])
    high, low = words[..., 0] >> np.uint64(5), words[..., 1] >> np.uint64(6)
    return (high.astype(np.float64) * 2.0**26 + low.astype(np.float64)) * 2.0**-53
