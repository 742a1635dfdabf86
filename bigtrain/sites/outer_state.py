"""State of the outer steps on one rank, in addition to its masters."""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
import xxhash

from bigtrain.engine.optimizers.masters import MasterPart, cut_parts, master_parts
from bigtrain.engine.train_engine import TrainEngine
from bigtrain.models.layers.parameters import parameter_of
from bigtrain.settings.sections.sites import SitesSection
from bigtrain.sites.codecs import CODECS, Codec
from bigtrain.sites.rectangles import ParameterBox

GLOBAL, MOMENTUM, ERROR = "outer_global", "outer_momentum", "outer_error"
"""Kinds of tensors of a checkpoint: the global weights, the outer momentum, and the rounding errors
that a codec has not yet sent."""
ELEMENTS_AT_ONCE = 1 << 24
"""Elements of a rank's masters per exchange, which bounds the temporary memory of an outer step."""


def fragment_of(name: str, num_fragments: int) -> int:
    """Return the fragment of the parameter `name`: layers in turn, all further parameters in the
    first fragment.

    The layer is the first number in a Hugging Face name: ``model.layers.7.mlp.up_proj``.
    """
    layer_number = re.search(r"\.(\d+)\.", name)
    return int(layer_number.group(1)) % num_fragments if layer_number else 0


class RectangleView(NamedTuple):
    """A rectangle of a parameter with the full `shape`, and its elements in a flat tensor."""

    box: ParameterBox
    shape: tuple[int, ...]
    view: torch.Tensor


@dataclass(frozen=True)
class Bucket:
    """Pieces of masters that are exchanged together, and their outer states: float32 [N] views in
    host memory; None for a state that the run does not have."""

    pieces: list[MasterPart]
    codec: Codec
    weights: torch.Tensor
    momentum: torch.Tensor | None
    error: torch.Tensor | None

    def copy_masters(self) -> torch.Tensor:
        """Return a copy of the masters in host memory, float32 [N]."""
        return torch.cat([piece.master.detach().cpu() for piece in self.pieces])

    def merge(self, mixing: float) -> None:
        """Move the masters to the global weights, except for the share `mixing` of the masters."""
        begin = 0
        for master in (piece.master for piece in self.pieces):
            weights = self.weights[begin : begin + master.numel()].to(master.device)
            if mixing == 0:
                master.copy_(weights)
            else:
                master.lerp_(weights, 1 - mixing)
            begin += master.numel()

    def rectangles(
        self, flat: torch.Tensor, share: slice, *, primary: bool
    ) -> Iterator[RectangleView]:
        """Yield the rectangles of parameters in the range `share` of `flat`, a tensor [N] in the
        order of this bucket. primary: only rectangles that no other rank counts."""
        begin = 0
        for piece in self.pieces:
            end = begin + piece.master.numel()
            first, last = max(begin, share.start), min(end, share.stop)
            if first < last and (piece.shard.primary or not primary):
                start = piece.start + first - begin  # in the flat shard of the parameter
                for full, view in cut_parts(piece.shard, start, flat[first:last]):
                    box = ParameterBox(full.offsets, full.sizes, piece.name)
                    yield RectangleView(box, piece.shard.shape, view)
            begin = end


def pack_views(views: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return a flat copy of the values of views, in order."""
    return torch.cat([view.reshape(-1) for view in views])


def unpack_views(
    flat: torch.Tensor, views: Sequence[torch.Tensor]
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield each view with its part of `flat`, a result of `pack_views` for views of equal
    shapes."""
    parts = flat.split([view.numel() for view in views])
    for view, part in zip(views, parts, strict=True):
        yield view, part.view(view.shape)


class OuterState:
    """Global weights, outer momentum and rounding errors of what one rank trains.

    Each is float32 in host memory, 4 bytes for each element of this rank's masters, fragment after
    fragment, and part of the engine's checkpoints. plain: parameters that are sent in float32,
    whatever the codec. Of ranks with equal masters (ZeRO 0) each exchanges a share of every bucket.
    """

    def __init__(
        self, engine: TrainEngine, sites: SitesSection, plain: Collection[str] = ()
    ) -> None:
        self._engine = engine
        self._sites = sites
        self._codec = CODECS[sites.codec]
        self.plain = frozenset(plain)
        parts = self._parts()
        assert all(part.master.dtype == torch.float32 for part in parts)
        self._allocate(parts)
        self._replicas: dist.ProcessGroup | None = None
        if any(part.is_replicated for part in parts):
            group = engine.mesh.replicas
            self._replicas = group if dist.get_world_size(group) > 1 else None

    def _allocate(self, parts: Sequence[MasterPart]) -> None:
        """Allocate the states, zeros, and add views of them to the engine's checkpoints."""
        sites, num_elements = self._sites, sum(part.count for part in parts)
        self.weights = torch.zeros(num_elements)
        has_momentum = sites.outer.has_momentum and not sites.server_holds_weights
        self.momentum = torch.zeros(num_elements) if has_momentum else None
        self.error = torch.zeros(num_elements) if self._codec.keeps_error else None
        states_by_name = {GLOBAL: self.weights, MOMENTUM: self.momentum, ERROR: self.error}
        # The parts are sorted by fragment, so the elements of a fragment are one range.
        begin, fragment_ends = 0, [0] * sites.fragments
        for part in parts:
            end = begin + part.count
            self._engine.added_states[part.name] = {
                state_name: state[begin:end]
                for state_name, state in states_by_name.items()
                if state is not None
            }
            fragment_ends[self._fragment(part)] = end
            begin = end
        # A fragment begins at the end of the last fragment before it that is not empty.
        self._fragment_begins = list(itertools.accumulate([0, *fragment_ends], max))

    def set_plain(self, plain: Collection[str]) -> None:
        """Change `plain`; states keep their values, buckets and rectangles change."""
        old_states = {part.name: self._engine.added_states[part.name] for part in self._parts()}
        self.plain = frozenset(plain)
        self._allocate(self._parts())
        for name, states in old_states.items():
            for state_name, state in states.items():
                self._engine.added_states[name][state_name].copy_(state)

    @property
    def num_fragments(self) -> int:
        """Parts of the model that are exchanged in turn."""
        return self._sites.fragments

    def own_slice(self, length: int) -> slice:
        """Return this rank's share of a bucket of `length` elements. Ranks with equal masters have
        equal shares, but the last ranks may have a smaller or an empty share."""
        if self._replicas is None:
            return slice(0, length)
        share = -(-length // dist.get_world_size(self._replicas))
        begin = min(length, share * dist.get_rank(self._replicas))
        return slice(begin, min(length, begin + share))

    def gather_shares(self, local_share: torch.Tensor, length: int) -> torch.Tensor:
        """Return a tensor of a bucket, float32 [length] on the CPU, joined from every rank's
        `local_share` (`own_slice`). Collective."""
        if self._replicas is None:
            return local_share
        num_shares = dist.get_world_size(self._replicas)
        padded = torch.zeros(-(-length // num_shares), device=self._engine.device)
        padded[: len(local_share)] = local_share.to(padded.device)
        shares = [torch.empty_like(padded) for _ in range(num_shares)]
        dist.all_gather(shares, padded, group=self._replicas)
        return torch.cat(shares)[:length].cpu()

    def layout_checksum(self) -> str:
        """Return a checksum of the parts of parameters that this rank holds, and their order."""
        parts = [(part.name, part.start, part.count, part.shard) for part in self._parts()]
        return xxhash.xxh3_64_hexdigest(repr(parts).encode())

    def checksum(self) -> int:
        """Return a checksum of global weights and momentum: for each parameter the sum of all bits,
        times a hash of the parameter's name. The sum over the ranks of a site, modulo 2^64, does
        not depend on the layout."""
        total = 0
        for bucket in self.all_buckets():
            share = self.own_slice(len(bucket.weights))
            for state_name, state in ((GLOBAL, bucket.weights), (MOMENTUM, bucket.momentum)):
                if state is None:
                    continue
                for rectangle in bucket.rectangles(state, share, primary=True):
                    name = f"{state_name}/{rectangle.box.name}"
                    factor = xxhash.xxh3_64_intdigest(name.encode()) | 1
                    bits = rectangle.view.view(torch.int32)
                    total += int(bits.sum(dtype=torch.int64)) * factor
        return total % (1 << 64)

    def all_buckets(self) -> Iterator[Bucket]:
        """Yield the buckets of the model, fragment after fragment."""
        return itertools.chain.from_iterable(map(self.buckets, range(self.num_fragments)))

    def buckets(self, fragment: int) -> Iterator[Bucket]:
        """Yield the buckets of a fragment, of at most `ELEMENTS_AT_ONCE` elements each."""
        # A multiple of the sites, so that only the last part is filled up.
        max_elements = max(1, ELEMENTS_AT_ONCE // self._sites.count) * self._sites.count
        begin = self._fragment_begins[fragment]
        fragment_parts = [part for part in self._parts() if self._fragment(part) == fragment]
        for codec, is_plain in ((self._codec, False), (CODECS["float32"], True)):
            parts = [part for part in fragment_parts if (part.name in self.plain) == is_plain]
            ends = list(itertools.accumulate(part.count for part in parts))
            num_elements = ends[-1] if ends else 0
            error_state = self.error if codec.keeps_error else None
            for first in range(0, num_elements, max_elements):
                last = min(first + max_elements, num_elements)
                pieces = []
                for part, end in zip(parts, ends, strict=True):
                    # Elements of the part between `first` and `last`, counted from its start.
                    start = end - part.count
                    skipped, stop = max(first, start) - start, min(last, end) - start
                    if skipped < stop:
                        pieces.append(part.narrow(skipped, stop))
                elements = slice(begin + first, begin + last)
                yield Bucket(
                    pieces,
                    codec,
                    self.weights[elements],
                    None if self.momentum is None else self.momentum[elements],
                    None if error_state is None else error_state[elements],
                )
            begin += num_elements

    def _fragment(self, part: MasterPart) -> int:
        return fragment_of(part.name, self._sites.fragments)

    def _parts(self) -> list[MasterPart]:
        """Return the trained parts in the order of the states: by fragment, then by codec, then in
        the order of the model's parameters."""
        parts = _trained_parts(self._engine)
        return sorted(parts, key=lambda p: (self._fragment(p), p.name in self.plain))


def replicated_names(engine: TrainEngine) -> set[str]:
    """Return the parameters that are replicated inside a site (norms of tensor-parallel ranks, tied
    embeddings of stages).

    A codec of blocks would round each replica with different neighbours, to a different mean; with
    elements encoded one at a time the replicas stay equal. Collective over the site: ZeRO's ranges
    differ between the ranks that have a replica.
    """
    replicas = [part.name for part in _trained_parts(engine) if not part.shard.primary]
    replicas_by_rank: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(replicas_by_rank, replicas)
    return set(itertools.chain.from_iterable(replicas_by_rank))


def _trained_parts(engine: TrainEngine) -> list[MasterPart]:
    """Return the parts of masters on this rank, except empty and frozen ones."""
    module = engine.module
    return [
        part
        for part in master_parts(engine.engine, module)
        if part.count and parameter_of(module, part.name).requires_grad
    ]
