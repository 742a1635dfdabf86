"""The mean of the weights over sites, whatever part of the model a rank holds.

Ranks of different sites exchange the elements that they have in common in a `SiteGroup`. Sites with
equal layouts exchange rank by rank and bucket by bucket (`by_shards`); other sites exchange the
rectangles that their ranks have in common (`peers` finds them).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import torch

from bigtrain.sites.codecs import Codec
from bigtrain.sites.contribution import (
    PART_SLACK,
    UnusableError,
    UnusableSiteError,
    decoded,
    refuse_norm,
)
from bigtrain.sites.metrics import square
from bigtrain.sites.outer_state import ELEMENTS_AT_ONCE, Bucket, OuterState, packed, unpacked
from bigtrain.sites.peers import Patch, Ranks, overlapping_peers
from bigtrain.sites.rectangles import ParameterBox

Tensors = Sequence[torch.Tensor | None] | Mapping[int, torch.Tensor]
"""Tensors by the number of a bucket in its fragment."""


class SiteGroup:
    """Means over the ranks of `group`, a rank per site, in the order of the sites.

    group: a `ProcessGroupGloo` in addition to the default one; None if this site is the only one.
    weights: of the sites in the mean; may change. num_bytes: sent so far, without headers.
    """

    def __init__(self, group: Any, weights: Sequence[int]) -> None:
        assert (group is None) == (len(weights) == 1)
        self._group = group
        self.weights = weights
        self.num_bytes = 0

    def send(self, tensor: torch.Tensor, donor: int, takers: Sequence[int]) -> None:
        """Overwrite the `tensor` of `takers` with the tensor of `donor`, which has an equal size:
        contiguous on the CPU; sites are positions in the group. Raises RuntimeError if a site is
        lost."""
        if self._group is None or not tensor.numel():
            return
        position = self._group.rank()
        if position == donor:
            for taker in takers:
                self._group.send([tensor], taker, 0).wait()
                self.num_bytes += tensor.nbytes
        elif position in takers:
            self._group.recv([tensor], donor, 0).wait()

    def mean(
        self,
        codec: Codec,
        local: torch.Tensor,
        weights: torch.Tensor,
        error: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the mean of all sites' `local` weights; may return `local` itself.

        Parameters: `local`, `weights` (global, the same on all sites), float32 [N] on the CPU;
        `error` [N], the rounding error so far, which is added to what this site sends, and
        overwritten with the new one; None for a codec that keeps none.

        Every site computes the mean of one part, in float64 and in the order of the sites, and
        sends its code to all: all sites get the same bits, without the intermediate rounding of a
        ring. Collective over the group. Raises RuntimeError if a site is lost or too slow,
        UnusableSiteError for values that are not finite, or moved too far, on the rank that
        receives them.
        """
        if self._group is None:
            return local
        # Every site sends each site the part of which that site takes the mean.
        sites, length = len(self.weights), len(local)
        part = -(-length // sites)
        values = torch.zeros(sites * part)
        values[:length] = local - weights if codec.is_relative else local
        if error is not None:
            values[:length] += error
        codes = codec.encode(values.view(sites, part))
        received = torch.empty_like(codes)
        self._group.alltoall_base(received, codes, [], []).wait()

        # The mean of this site's part, in the order of the sites.
        total = torch.zeros(1, part, dtype=torch.float64)
        before = _part(weights, self._group.rank(), part)
        for position, weight in enumerate(self.weights):
            site_values = _checked(codec, received[position], part, position, before)
            total.add_(site_values.double(), alpha=weight)
        total /= sum(self.weights)
        mean_codes = codec.encode(total)
        if error is not None:
            rounding = values.view(sites, part) - codec.decode(codes, part)
            # The rounding of the mean as well, as if only this site had lost it.
            index = self._group.rank()
            share = self.weights[index] / sum(self.weights)
            if share:
                rounding[index] += (total[0] - codec.decode(mean_codes, part)[0]) / share
            error.copy_(rounding.view(-1)[:length])

        # All sites get the codes of all means.
        means = torch.empty_like(codes)
        self._group.allgather([list(means)], [mean_codes[0]]).wait()
        self.num_bytes += 2 * (sites - 1) * mean_codes.numel()
        rows = [
            _checked(codec, row, part, position, _part(weights, position, part))
            for position, row in enumerate(means)
        ]
        mean = torch.cat(rows).reshape(-1)[:length]
        return mean.add_(weights) if codec.is_relative else mean


def _part(weights: torch.Tensor, position: int, part: int) -> torch.Tensor:
    """Return the global weights [part] of which a site takes the mean; zeros beyond the end."""
    part_weights = weights[position * part : (position + 1) * part]
    return torch.nn.functional.pad(part_weights, (0, part - len(part_weights)))


def _checked(
    codec: Codec, codes: torch.Tensor, part: int, position: int, before: torch.Tensor
) -> torch.Tensor:
    """Return the values [1, part] that a site sent. Raises UnusableSiteError."""
    try:
        values = decoded(codec, codes.unsqueeze(0), part)
        change = square(values, torch.zeros(()) if codec.is_relative else before)
        refuse_norm(change, square(before, torch.zeros(())), part, PART_SLACK)
    except UnusableError as error:
        raise UnusableSiteError(position, str(error)) from error
    return values


class _Owned(NamedTuple):
    """A rectangle of this rank, of a parameter of `shape`: a `view` of the `flat` bucket."""

    box: ParameterBox
    shape: tuple[int, ...]
    fragment: int
    bucket: int
    codec: Codec
    flat: torch.Tensor
    view: torch.Tensor


@dataclass(frozen=True)
class _Region:
    """A part of a bucket, as `torch.as_strided` takes it from any tensor with its layout."""

    bucket: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, bucket: int, flat: torch.Tensor, view: torch.Tensor) -> _Region:
        """Return the region of a `view` of the `flat` tensor of a bucket."""
        offset = int(view.storage_offset() - flat.storage_offset())
        return cls(bucket, tuple(view.shape), view.stride(), offset)

    def view(self, tensors: Tensors) -> torch.Tensor:
        flat = tensors[self.bucket]
        assert flat is not None
        return flat.as_strided(self.size, self.stride, flat.storage_offset() + self.offset)


@dataclass(frozen=True)
class _Transfer:
    """Regions that are exchanged at once, encoded as one row."""

    ranks: Ranks
    codec: Codec
    regions: Sequence[_Region]

    def pack(self, tensors: Tensors) -> torch.Tensor:
        """Return the values of the regions, a flat copy."""
        return packed(region.view(tensors) for region in self.regions)

    def unpack(self, flat: torch.Tensor, tensors: Tensors) -> None:
        """Write flat values back to where `pack` read them."""
        for view, values in unpacked(flat, [region.view(tensors) for region in self.regions]):
            view.copy_(values)


@dataclass(frozen=True)
class _Batch:
    """Transfers of `buckets`, by number, whose temporary memory is needed at once."""

    buckets: Sequence[int]
    transfers: Sequence[_Transfer]


class WeightExchange:
    """Means of this rank's weights over sites, and copies of weights between sites.

    A rank exchanges with the ranks of other sites that hold some of its elements. All ranks process
    their groups in one order, so that none waits in a circle. ranks: the groups of this rank.
    groups: set before the first exchange.
    """

    def __init__(self, state: OuterState, batches: Sequence[Sequence[_Batch]]) -> None:
        """batches: by fragment."""
        self._state = state
        self._batches = batches
        self.groups: Mapping[Ranks, SiteGroup] = {}
        transfers = chain.from_iterable(b.transfers for b in chain.from_iterable(batches))
        self.ranks = sorted({transfer.ranks for transfer in transfers})

    @classmethod
    def by_shards(cls, state: OuterState, ranks: Ranks) -> WeightExchange:
        """Return the exchange of sites with equal layouts: bucket by bucket between `ranks`, which
        hold the same elements."""

        def batch(number: int, bucket: Bucket) -> _Batch:
            flat = bucket.weights
            region = _Region.of(number, flat, flat[state.own(len(flat))])
            return _Batch([number], [_Transfer(ranks, bucket.codec, [region])])

        fragments = map(state.buckets, range(state.num_fragments))
        return cls(
            state, [[batch(n, bucket) for n, bucket in enumerate(buckets)] for buckets in fragments]
        )

    @classmethod
    def by_rectangles(
        cls, state: OuterState, layouts: Sequence[Sequence[Any]], site: int, rank: int
    ) -> WeightExchange:
        """Return the exchange of sites with different layouts. layouts: by position of the site and
        by rank the `rectangles_of`, as JSON. Raises ValueError for what are not rectangles of this
        model."""
        owned = list(_owned(state))
        shapes = {rectangle.box.name: rectangle.shape for rectangle in owned}
        parsed = [
            [
                [ParameterBox.from_json(tree, shapes) for tree in rank_trees if tree[0] in shapes]
                for rank_trees in site_layout
            ]
            for site_layout in layouts
        ]
        groups = overlapping_peers(parsed, site, rank)

        # All sites train the same parameters, and send what is encoded in blocks once.
        counts: Counter[int] = Counter()
        for patch in chain.from_iterable(groups.values()):
            counts[patch.index] += patch.box.num_elements
        for index, rectangle in enumerate(owned):
            box = rectangle.box
            assert counts[index] >= box.num_elements, box
            assert counts[index] == box.num_elements or not rectangle.codec.keeps_error, box

        batches = []
        for fragment in range(state.num_fragments):
            buckets = range(sum(1 for _ in state.buckets(fragment)))
            transfers: list[_Transfer] = []
            for ranks, patches in groups.items():
                transfers += _packed(ranks, patches, owned, fragment)
            batches.append([_Batch(buckets, transfers)])
        return cls(state, batches)

    @property
    def num_bytes(self) -> int:
        """Bytes sent so far, without headers."""
        return sum(group.num_bytes for group in self.groups.values())

    def set_weights(self, weights: Sequence[int]) -> None:
        """Set the weights of the sites in the mean."""
        for group in self.groups.values():
            group.weights = weights

    def means(
        self,
        fragment: int,
        buckets: Sequence[Bucket],
        local: Tensors,
        weights: Sequence[torch.Tensor],
        errors: Tensors,
    ) -> list[torch.Tensor]:
        """Return the means over the sites of this rank's share of each bucket of a fragment.

        local, weights, errors: float32 [N] by bucket. local: the weights of this site, or
        None if they are the current masters. weights: the global weights. errors: the rounding
        errors so far, which are overwritten with the new errors. Collective over all groups of
        this rank, not over the site. Raises RuntimeError if a site is lost or too slow.
        """
        means: dict[int, torch.Tensor] = {}
        for batch in self._batches[fragment]:
            local_weights = {}
            for n in batch.buckets:
                sent_weights = local[n]
                local_weights[n] = buckets[n].gathered() if sent_weights is None else sent_weights
            # No transfer covers the padding of a bucket, so it keeps the local values.
            merged = {n: bucket_weights.clone() for n, bucket_weights in local_weights.items()}
            for transfer in batch.transfers:
                codec, group = transfer.codec, self.groups[transfer.ranks]
                error = transfer.pack(errors) if codec.keeps_error else None
                packed_weights = transfer.pack(weights)
                # Overwrites `error` with the new rounding errors.
                values = group.mean(codec, transfer.pack(local_weights), packed_weights, error)
                transfer.unpack(values, merged)
                if error is not None:
                    transfer.unpack(error, errors)
            # Ranks with equal masters (ZeRO 0) each return a share.
            for n, bucket_mean in merged.items():
                means[n] = bucket_mean[self._state.own(len(bucket_mean))]
        return [means[n] for n in range(len(buckets))]

    def send(
        self, fragment: int, tensors: Sequence[torch.Tensor], donor: int, takers: Sequence[int]
    ) -> None:
        """Send `takers` what this rank exchanges of `tensors`, float32 [N] by bucket; collective
        and raising as `means`."""
        for batch in self._batches[fragment]:
            for transfer in batch.transfers:
                flat = transfer.pack(tensors)
                self.groups[transfer.ranks].send(flat, donor, takers)
                transfer.unpack(flat, tensors)


def rectangles_of(state: OuterState) -> list[Any]:
    """Return the rectangles that this rank exchanges, fragment after fragment, as JSON."""
    return [owned.box.to_json() for owned in _owned(state)]


def _owned(state: OuterState) -> Iterator[_Owned]:
    for fragment in range(state.num_fragments):
        for number, bucket in enumerate(state.buckets(fragment)):
            flat = bucket.weights
            for box, shape, view in bucket.boxes(flat, state.own(len(flat)), primary=False):
                yield _Owned(box, shape, fragment, number, bucket.codec, flat, view)


def _packed(
    ranks: Ranks, patches: Sequence[Patch], owned: Sequence[_Owned], fragment: int
) -> Iterator[_Transfer]:
    """Yield the patches of a group and fragment, as many at once as memory allows."""
    pairs = [(owned[patch.index], patch.box) for patch in patches]
    pairs = [(rectangle, box) for rectangle, box in pairs if rectangle.fragment == fragment]
    codecs = dict.fromkeys(rectangle.codec for rectangle, _ in pairs)
    # Codecs that keep errors first: every rank has the same order.
    for codec in sorted(codecs, key=lambda codec: not codec.keeps_error):
        regions: list[_Region] = []
        count = 0
        for rectangle, box in pairs:
            if rectangle.codec != codec:
                continue
            for piece in box.split(ELEMENTS_AT_ONCE):
                if regions and count + piece.num_elements > ELEMENTS_AT_ONCE:
                    yield _Transfer(ranks, codec, regions)
                    regions, count = [], 0
                view = rectangle.view[piece.relative_to(rectangle.box).slices]
                regions.append(_Region.of(rectangle.bucket, rectangle.flat, view))
                count += piece.num_elements
        if regions:
            yield _Transfer(ranks, codec, regions)
