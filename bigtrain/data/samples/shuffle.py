"""Sample order without a shuffled index: a keyed permutation computed on demand.

Sample ``i`` of a run is window ``permutation(seed, i // N)[i % N]`` of ``N`` windows: a pure
function of the seed and ``i``. So the order does not depend on world size, micro-batch size and
resume point, and the state of a run is one integer. numpy only.

If the sequence length may change, chunks of the longest one are permuted and split into windows.
Chunks are read in groups, in permuted order: first the first window of every chunk of a group, then
the second window of every chunk, until the last. So only one group is partly read at any time, and
all chunks of this group up to one token, plus or minus one window.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bigtrain.data.samples.token_stream import Indices

ROUNDS = 6
_SMALL = 64
"""Up to this many windows are sorted by a hash instead: a Feistel network on so few bits reaches
too few permutations, and cycle walking costs more than sorting."""
_SHIFTS = np.uint32(16), np.uint32(13)
_FACTORS = np.uint32(0x85EBCA6B), np.uint32(0xC2B2AE35)
"""Constants of MurmurHash3's 32-bit finaliser."""

GROUP_CHUNKS = 4096
"""Maximum chunks of a group; in a small dataset a 64th of all chunks."""


@dataclass(frozen=True)
class SampleOrder:
    """Order in which a run reads `num_windows` windows, epoch after epoch.

    Every epoch is a permutation of all windows. `source` distinguishes the datasets of a mixture
    (`bigtrain.data.samples.mixture`). Windows are numbered in data order, `windows_per_chunk`
    windows in every chunk. `start` is the position in the order, including epochs, that counts as
    sample 0. Before it there are `num_joined` samples, which are
    numbered after the windows (`bigtrain.data.samples.phases`).
    """

    num_windows: int
    seed: int
    source: int = 0
    windows_per_chunk: int = 1
    start: int = 0
    num_joined: int = 0

    def __post_init__(self) -> None:
        assert self.num_windows >= 1
        assert self.num_windows % self.windows_per_chunk == 0

    def windows(self, first_sample: int, count: int) -> Indices:
        """Return the windows of samples `first_sample` to `first_sample + count`, int64 [count]."""
        # The samples joined from the remainder of an epoch come first.
        end_sample = first_sample + count
        joined = np.arange(first_sample, min(end_sample, self.num_joined), dtype=np.int64)
        parts = [self.num_windows + joined]
        position = self.start + max(0, first_sample - self.num_joined)
        end = self.start + max(0, end_sample - self.num_joined)
        while position < end:
            epoch, offset = divmod(position, self.num_windows)
            length = min(end - position, self.num_windows - offset)
            positions = np.arange(offset, offset + length, dtype=np.int64)
            position += length
            per_chunk = self.windows_per_chunk
            if per_chunk == 1:
                parts.append(permute(positions, self.num_windows, self.seed, epoch, self.source))
                continue
            # From a position follow its group, then the window within a chunk, and the chunk. The
            # remainder of dividing chunks into groups belongs to the last group.
            num_chunks = self.num_windows // per_chunk
            group_chunks = group_size(num_chunks)
            last_group = num_chunks // group_chunks - 1
            group = np.minimum(positions // (group_chunks * per_chunk), last_group)
            chunks_of_group = np.where(
                group < last_group, group_chunks, num_chunks - last_group * group_chunks
            )
            window, chunk = np.divmod(
                positions - group * (group_chunks * per_chunk), chunks_of_group
            )
            chunk += group * group_chunks
            permuted = permute(chunk, num_chunks, self.seed, epoch, self.source)
            parts.append(permuted * per_chunk + window)
        return np.concatenate(parts)


def group_size(num_chunks: int) -> int:
    """Return the chunks per group; the last group may have nearly twice as many."""
    return min(GROUP_CHUNKS, max(1, num_chunks // 64))


def convert_place(position: int, num_chunks: int, per_chunk: int, new_per_chunk: int) -> int:
    """Convert a position in the order of chunks of `per_chunk` windows to the next position in the
    order of chunks of `new_per_chunk` windows. Nothing that was read before `position` in its epoch
    is read after the result; at most one old and one new window of every chunk of a group are
    skipped."""
    if per_chunk == new_per_chunk:
        return position
    epoch, offset = divmod(position, num_chunks * per_chunk)
    group_chunks = group_size(num_chunks)
    last_group = num_chunks // group_chunks - 1
    group = min(offset // (group_chunks * per_chunk), last_group)
    chunks_of_group = group_chunks if group < last_group else num_chunks - last_group * group_chunks
    # Windows begun in every chunk of the group, then as many of the new ones, rounded up.
    windows_begun = -(-(offset - group * group_chunks * per_chunk) // chunks_of_group)
    new_begun = -(-windows_begun * new_per_chunk // per_chunk)
    return (epoch * num_chunks + group * group_chunks) * new_per_chunk + new_begun * chunks_of_group


def permute(indices: Indices, size: int, seed: int, epoch: int, source: int = 0) -> Indices:
    """Map `indices` by the permutation of ``range(size)`` of (seed, epoch, source).

    A balanced Feistel network of `ROUNDS` rounds on the next even number of bits, walked along its
    cycle until it is back below `size` (Black and Rogaway 2002, "Ciphers with arbitrary finite
    domains"): at most four steps in the mean, and a bijection for any round function. Mixing by
    the constants of MurmurHash3's finaliser; not meant to resist an adversary.
    """
    assert 1 <= size <= 1 << 62
    label = f"bigtrain sample order 1, seed {seed}, epoch {epoch}"
    return _permute(indices, size, label + (f", source {source}" if source else ""))


def shuffle_block(size: int, seed: int, block: int, first_sample: int = 0) -> Indices:
    """Return the permutation of ``range(size)`` inside block `block` of a mixture, int64 [size],
    counted from `first_sample` of the run."""
    label = f"bigtrain mixture order 1, seed {seed}, block {block}"
    label += f", from {first_sample}" if first_sample else ""
    return _permute(np.arange(size, dtype=np.int64), size, label)


def _permute(indices: Indices, size: int, label: str) -> Indices:
    """Map `indices` by the permutation of ``range(size)`` that `label` determines."""
    digest = hashlib.blake2b(label.encode(), digest_size=4 * ROUNDS).digest()
    keys = np.frombuffer(digest, dtype="<u4").astype(np.uint32)
    if size <= _SMALL:
        images = _feistel(np.arange(size, dtype=np.uint64), half_bits=16, keys=keys)
        return np.argsort(images)[indices].astype(np.int64)
    half_bits = ((size - 1).bit_length() + 1) // 2
    limit = np.uint64(size)
    values = _feistel(indices.astype(np.uint64), half_bits, keys)
    out_of_range = np.flatnonzero(values >= limit)
    while len(out_of_range):
        walked = _feistel(values[out_of_range], half_bits, keys)
        values[out_of_range] = walked
        out_of_range = out_of_range[walked >= limit]
    return values.astype(np.int64)


def _feistel(
    values: npt.NDArray[np.uint64], half_bits: int, keys: npt.NDArray[np.uint32]
) -> npt.NDArray[np.uint64]:
    """Return the images of `values`, two halves of `half_bits` bits, after a round for each key."""
    # Halves of at most 31 bits: a vector unit processes twice as many 32-bit as 64-bit values at
    # once. A round is (left, right) -> (right, left ^ mix(right ^ key)).
    shift = np.uint64(half_bits)
    half = np.uint32((1 << half_bits) - 1)
    left_half, right_half = (values >> shift).astype(np.uint32), values.astype(np.uint32) & half
    for key in keys:
        # MurmurHash3's 32-bit finaliser (public domain, Appleby), in place.
        mixed = right_half ^ key
        mixed ^= mixed >> _SHIFTS[0]
        mixed *= _FACTORS[0]
        mixed ^= mixed >> _SHIFTS[1]
        mixed *= _FACTORS[1]
        mixed ^= mixed >> _SHIFTS[0]
        mixed &= half
        mixed ^= left_half
        left_half, right_half = right_half, mixed
    return (left_half.astype(np.uint64) << shift) | right_half
