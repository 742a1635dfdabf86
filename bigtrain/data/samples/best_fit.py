"""Best-fit-decreasing packing of complete documents into samples. numpy only.

A sample of sequence length T has space for T + 1 tokens, T inputs and the last label. Documents are
placed by decreasing length, and each goes into the fullest sample in which it fits (Johnson 1973;
for training, Ding et al. 2024, "Fewer Truncations Improve Language Modeling", arXiv 2404.10830). A
longer document is truncated, or split into pieces that share one token, so that every target
is predicted once. About a million pieces are packed at a time, so memory is bounded for any number
of documents, and the result depends only on the dataset and T.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from bigtrain.data.shards.format import TokenShard

LongDocuments = Literal["cut", "truncate"]

BLOCK_PIECES = 1 << 20
"""Pieces packed together: about 0.1 GiB of memory, and negligible padding."""

READ_DOCUMENTS = 1 << 16
MASK_READ_BYTES = 1 << 22

Integers = npt.NDArray[np.int64]


@dataclass
class PackingCounts:
    """Statistics of packing a split. A document of 0 or 1 token has no target, nor has a piece
    whose targets are all masked: they are dropped. `truncated_tokens` are the tokens beyond the end
    of truncated documents."""

    documents: int = 0
    tokens: int = 0
    cut_documents: int = 0
    truncated_documents: int = 0
    truncated_tokens: int = 0
    dropped_pieces: int = 0
    dropped_tokens: int = 0
    packed_tokens: int = 0


@dataclass(frozen=True)
class PackBlock:
    """Packs of a block in CSR form. Pack ``p`` is the pieces ``row_ends[p - 1]`` to
    ``row_ends[p]`` (from 0 for the first), which are the tokens ``starts`` to ``starts + lengths``
    of the stream. All int64."""

    row_ends: Integers
    starts: Integers
    lengths: Integers


def pack_blocks(
    shards: Sequence[TokenShard],
    sequence_length: int,
    long_documents: LongDocuments,
    counts: PackingCounts,
    *,
    packs: bool = True,
) -> Iterator[PackBlock]:
    """Yield the packs of the documents of `shards`, block by block; update `counts`. `packs`:
    False puts each piece in a pack. Raises DataError if an index is corrupt."""
    pieces = _pieces(shards, sequence_length, long_documents, counts)
    for starts, lengths in _blocks(pieces):
        counts.packed_tokens += int(lengths.sum())
        if not packs:
            yield PackBlock(np.arange(1, len(lengths) + 1), starts, lengths)
            continue
        pack_of_item, num_packs = best_fit_decreasing(lengths, sequence_length + 1)
        order = np.argsort(pack_of_item, kind="stable")
        row_ends = np.cumsum(np.bincount(pack_of_item, minlength=num_packs))
        yield PackBlock(row_ends, starts[order], lengths[order])


def best_fit_decreasing(lengths: Integers, capacity: int) -> tuple[Integers, int]:
    """Return the pack of every item, int64 [items], and the number of packs. `lengths` are 1 to
    `capacity`. Items of equal length are placed together: the fullest pack that has space for one
    gets as many as fit, with the result of placing them one by one."""
    num_items = len(lengths)
    assert not num_items or 1 <= lengths.min() <= lengths.max() <= capacity
    packs_with: dict[int, list[int]] = {}  # packs by their room, the space that is free
    rooms: list[int] = []  # keys of `packs_with`, ascending
    placed: list[int] = []  # packs of the items by decreasing length
    num_packs = 0

    def add_room(packs: list[int], room: int) -> None:
        """List `packs` by their room, unless they are full."""
        if not room:
            return
        packs_of_room = packs_with.get(room)
        if packs_of_room is None:
            packs_with[room] = packs
            insort(rooms, room)
        else:
            packs_of_room += packs

    counts = np.bincount(lengths, minlength=1)
    for length in np.flatnonzero(counts)[::-1].tolist():
        remaining = int(counts[length])
        while remaining:
            # Take the fullest packs with space for an item, or new packs if none has space.
            room_index = bisect_left(rooms, length)
            has_space = room_index < len(rooms)
            room = rooms[room_index] if has_space else capacity
            items_per_pack = room // length
            num_packs_needed = -(-remaining // items_per_pack)
            if has_space:
                available = packs_with[room]
                filled_packs = available[-num_packs_needed:]
                del available[-num_packs_needed:]
                if not available:
                    del packs_with[room], rooms[room_index]
            else:
                filled_packs = list(range(num_packs, num_packs + num_packs_needed))
                num_packs += num_packs_needed
            if items_per_pack == 1:
                placed += filled_packs
                remaining -= len(filled_packs)
                add_room(filled_packs, room - length)
                continue
            # Every pack gets as many items as fit, and the last pack the remaining items.
            num_placed = min(remaining, len(filled_packs) * items_per_pack)
            num_in_last = num_placed - (len(filled_packs) - 1) * items_per_pack
            placed += np.repeat(filled_packs, items_per_pack).tolist()[:num_placed]
            remaining -= num_placed
            if num_in_last < items_per_pack:
                add_room([filled_packs.pop()], room - num_in_last * length)
            if filled_packs:
                add_room(filled_packs, room - items_per_pack * length)
    pack_of_item = np.empty(num_items, np.int64)
    pack_of_item[np.argsort(-lengths, kind="stable")] = placed
    return pack_of_item, num_packs


def _blocks(pieces: Iterable[tuple[Integers, Integers]]) -> Iterator[tuple[Integers, Integers]]:
    """Yield `pieces` in blocks of `BLOCK_PIECES`."""
    waiting: list[tuple[Integers, Integers]] = []  # starts and lengths of pieces
    count = 0
    for starts_and_lengths in pieces:
        waiting.append(starts_and_lengths)
        count += len(starts_and_lengths[0])
        if count >= BLOCK_PIECES:
            starts, lengths = (np.concatenate(arrays) for arrays in zip(*waiting, strict=True))
            while len(starts) >= BLOCK_PIECES:
                yield starts[:BLOCK_PIECES], lengths[:BLOCK_PIECES]
                starts, lengths = starts[BLOCK_PIECES:], lengths[BLOCK_PIECES:]
            waiting, count = [(starts, lengths)], len(starts)
    if count:
        starts, lengths = (np.concatenate(arrays) for arrays in zip(*waiting, strict=True))
        yield starts, lengths


def _pieces(
    shards: Sequence[TokenShard],
    sequence_length: int,
    long_documents: LongDocuments,
    counts: PackingCounts,
) -> Iterator[tuple[Integers, Integers]]:
    """Yield first token in the stream and length of every piece with a target, in order."""
    room = sequence_length + 1
    shard_begin = 0
    for shard in shards:
        for begins, lengths in _documents(shard):
            counts.documents += len(lengths)
            counts.tokens += int(lengths.sum())
            # Truncate documents that are longer than a sample, or count those to be split.
            is_long = lengths > room
            if long_documents == "truncate":
                counts.truncated_documents += int(is_long.sum())
                counts.truncated_tokens += int((lengths[is_long] - room).sum())
                lengths = np.minimum(lengths, room)
            else:
                counts.cut_documents += int(is_long.sum())
            is_short = lengths < 2
            counts.dropped_pieces += int(is_short.sum())
            counts.dropped_tokens += int(lengths[is_short].sum())
            # Split documents into pieces of at most `sequence_length` + 1 tokens. A piece begins
            # with the last token of the previous piece, so that each target is predicted once.
            num_pieces = np.maximum(lengths - 2, -1) // sequence_length + 1
            document_of_piece = np.repeat(np.arange(len(lengths)), num_pieces)
            first_pieces = np.repeat(np.cumsum(num_pieces) - num_pieces, num_pieces)
            offsets = (np.arange(len(document_of_piece)) - first_pieces) * sequence_length
            starts = begins[document_of_piece] + offsets
            sizes = np.minimum(lengths[document_of_piece] - offsets, room)
            if shard.mask_path is not None:
                # Drop pieces without a target. The first token of a piece is no target here: it is
                # predicted in the previous piece, or not at all.
                target_bounds = np.stack([starts + 1, starts + sizes], axis=1)
                set_bits = _set_bits_before(shard.mask_bytes, target_bounds.reshape(-1))
                has_target = np.diff(set_bits)[::2] > 0
                counts.dropped_pieces += int((~has_target).sum())
                counts.dropped_tokens += int(sizes[~has_target].sum())
                starts, sizes = starts[has_target], sizes[has_target]
            yield starts + shard_begin, sizes
        shard_begin += shard.num_tokens


def _documents(shard: TokenShard) -> Iterator[tuple[Integers, Integers]]:
    """Yield first token and length of every document of `shard`, many at a time."""
    token_bytes = shard.dtype.itemsize
    for low in range(0, shard.num_documents, READ_DOCUMENTS):
        sequences = shard.document_starts[low : low + READ_DOCUMENTS + 1].astype(np.int64)
        if (np.diff(sequences) < 0).any() or not (
            0 <= sequences[0] <= sequences[-1] <= shard.num_sequences
        ):
            raise shard.corrupt(f"documents from {low} on are out of order")
        first_sequence, end_sequence = int(sequences[0]), int(sequences[-1])
        pointers = shard.sequence_pointers[first_sequence : end_sequence + 1].astype(np.int64)
        if end_sequence == shard.num_sequences:
            pointers = np.append(pointers, shard.num_bytes)
        if (np.diff(pointers) < 0).any() or not (
            0 <= pointers[0] <= pointers[-1] <= shard.num_bytes
        ):
            raise shard.corrupt(f"sequences {first_sequence} to {end_sequence} are out of order")
        bounds = pointers[sequences - first_sequence] // token_bytes
        yield bounds[:-1], np.diff(bounds)


def _set_bits_before(mask: npt.NDArray[np.uint8], positions: Integers) -> Integers:
    """Return the number of set bits of `mask` before each of `positions`, which ascend, counted
    from the byte that contains the first position."""
    counts = np.empty(len(positions), np.int64)
    bits_before = 0
    low_byte = int(positions[0]) // 8 if len(positions) else 0
    num_counted = 0
    while num_counted < len(positions):
        part = mask[low_byte : low_byte + MASK_READ_BYTES]
        sums = np.zeros(len(part) + 1, np.int64)
        np.cumsum(np.bitwise_count(part), out=sums[1:])
        num_covered = int(np.searchsorted(positions, 8 * (low_byte + len(part)), side="left"))
        if low_byte + len(part) >= len(mask):
            num_covered = len(positions)
        bit_positions = positions[num_counted:num_covered] - 8 * low_byte
        # Full bytes are in `sums`. Add the bits of the byte that contains a position; a position
        # after the last byte has none.
        byte = np.append(part, np.uint8(0))[bit_positions // 8]
        bits = np.bitwise_count(byte & ((1 << (bit_positions % 8)) - 1).astype(np.uint8))
        counts[num_counted:num_covered] = bits_before + sums[bit_positions // 8] + bits
        bits_before += int(sums[-1])
        low_byte += len(part)
        num_counted = num_covered
    return counts
