"""Sample order without a shuffled index: a keyed permutation computed where it is needed.

Sample ``i`` of a run is window ``permutation(seed, i // N)[i % N]`` of ``N`` windows: a pure
function of the seed and ``i``. So the order is the same for every number of processes, every
micro-batch and every resume point, and the state of a run is one integer. numpy only.
"""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

from bigtrain.data.samples import Indices

ROUNDS = 6
_SMALL = 64
"""Up to this many windows are sorted by their image instead: on so few bits a network reaches too
few of the permutations, and walking costs more than sorting."""


class SampleOrder:
    """The order in which a run reads `num_windows` windows, epoch after epoch.

    Every epoch is its own permutation: no window repeats in it and none is left out. `source`
    tells the datasets of a mixture apart (`bigtrain.data.mixture`).
    """

    def __init__(self, num_windows: int, seed: int, source: int = 0) -> None:
        assert num_windows >= 1
        self.num_windows = num_windows
        self.seed = seed
        self.source = source

    def windows(self, first_sample: int, count: int) -> Indices:
        """Windows of samples `first_sample` to `first_sample + count`, int64 [count]."""
        parts = [np.empty(0, np.int64)]
        position, end = first_sample, first_sample + count
        while position < end:
            epoch, offset = divmod(position, self.num_windows)
            length = min(end - position, self.num_windows - offset)
            samples = np.arange(offset, offset + length, dtype=np.int64)
            parts.append(permute(samples, self.num_windows, self.seed, epoch, self.source))
            position += length
        return np.concatenate(parts)


def permute(indices: Indices, size: int, seed: int, epoch: int, source: int = 0) -> Indices:
    """Where the permutation of ``range(size)`` of (seed, epoch, source) sends `indices`.

    A balanced Feistel network of `ROUNDS` rounds on the next even number of bits, walked along its
    cycle until it is back below `size` (Black and Rogaway 2002, "Ciphers with arbitrary finite
    domains"): at most four steps in the mean, and a bijection for any round function. Mixing by
    the constants of MurmurHash3's finaliser; not meant to resist an adversary.
    """
    assert 1 <= size <= 1 << 62
    label = f"bigtrain sample order 1, seed {seed}, epoch {epoch}"
    return _permute(indices, size, label + (f", source {source}" if source else ""))


def shuffle_block(size: int, seed: int, block: int) -> Indices:
    """The permutation of ``range(size)`` inside block `block` of a mixture, int64 [size]."""
    label = f"bigtrain mixture order 1, seed {seed}, block {block}"
    return _permute(np.arange(size, dtype=np.int64), size, label)


def _permute(indices: Indices, size: int, label: str) -> Indices:
    keys = _round_keys(label)
    if size <= _SMALL:
        images = _feistel(np.arange(size, dtype=np.uint64), 16, keys)
        return np.argsort(images)[indices].astype(np.int64)
    half_bits = ((size - 1).bit_length() + 1) // 2
    values = indices.astype(np.uint64)
    limit = np.uint64(size)
    values = _feistel(values, half_bits, keys)
    outside = np.flatnonzero(values >= limit)
    while len(outside):
        walked = _feistel(values[outside], half_bits, keys)
        values[outside] = walked
        outside = outside[walked >= limit]
    return values.astype(np.int64)


def _round_keys(label: str) -> npt.NDArray[np.uint64]:
    digest = hashlib.blake2b(label.encode(), digest_size=4 * ROUNDS).digest()
    return np.frombuffer(digest, dtype="<u4").astype(np.uint64)


def _feistel(
    values: npt.NDArray[np.uint64], half_bits: int, keys: npt.NDArray[np.uint64]
) -> npt.NDArray[np.uint64]:
    shift = np.uint64(half_bits)
    half = np.uint64((1 << half_bits) - 1)
    left, right = values >> shift, values & half
    for key in keys:
        left, right = right, left ^ (_mix(right ^ key) & half)
    return (left << shift) | right


def _mix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """MurmurHash3's 32-bit finaliser (public domain, Appleby), on 32 bits held in 64."""
    low = np.uint64(0xFFFFFFFF)
    values = values & low
    values ^= values >> np.uint64(16)
    values = (values * np.uint64(0x85EBCA6B)) & low
    values ^= values >> np.uint64(13)
    values = (values * np.uint64(0xC2B2AE35)) & low
    return values ^ (values >> np.uint64(16))
