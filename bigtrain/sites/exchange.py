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
from bigtrain.sites.outer_state import (
    ELEMENTS_AT_ONCE,
    Bucket,
    OuterState,
    pack_views,
    unpack_views,
)
from bigtrain.sites.peers import Patch, Ranks, overlapping_peers
from bigtrain.sites.rectangles import ParameterBox

Tensors = Sequence[torch.Tensor | None] | Mapping[int, torch.Tensor]
"""Tensors by the index of a bucket in its fragment."""


class SiteGroup:
    """Means over the ranks of `group`, a rank per site, in the order of the sites.

    group: a `ProcessGroupGloo` in addition to the default one; None if this site is the only one.
    site_weights: by site, in the mean; may change. num_bytes: sent so far, without headers.
    """

    def __init__(self, group: Any, site_weights: Sequence[int]) -> None:
        assert (group is None) == (len(site_weights) == 1)
        self._group = group
        self.site_weights = site_weights
        self.num_bytes = 0

    def send(self, tensor: torch.Tensor, donor: int, takers: Sequence[int]) -> None:
        """Overwrite the `tensor` of `takers` with the tensor of `donor`: of equal sizes, contiguous
        on the CPU. donor, takers: positions in the group. Raises RuntimeError if a site is lost."""
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
        """Return the mean of the sites' `local` weights; may return `local` itself.

        Parameters: `local`, `weights` (global, the same on all sites), float32 [N] on the CPU;
        `error` [N], the rounding error so far, which is added to what this site sends, and
        overwritten with the new one; None for a codec that keeps none.

        Every site computes the mean of one part, in float64 and in the order of the sites, and
        sends the encoded mean to all sites: all get equal bits, without the intermediate
        rounding of a ring. Collective over the group. Raises RuntimeError if a site is lost or too
        slow, UnusableSiteError for values that are not finite, or moved too far, on the rank that
        receives them.
        """
        if self._group is None:
            return local
        # Every site sends each site the part of which that site takes the mean.
        num_sites, length = len(self.site_weights), len(local)
        part_size = -(-length // num_sites)
        values = torch.zeros(num_sites * part_size)
        values[:length] = local - weights if codec.is_relative else local
        if error is not None:
            values[:length] += error
        codes = codec.encode(values.view(num_sites, part_size))
        received_codes = torch.empty_like(codes)
        self._group.alltoall_base(received_codes, codes, [], []).wait()

        # The mean of this site's part, in the order of the sites.
        own_position, total_weight = self._group.rank(), sum(self.site_weights)
        part_mean = torch.zeros(1, part_size, dtype=torch.float64)
        part_weights = _padded_part(weights, own_position, part_size)
        for position, site_weight in enumerate(self.site_weights):
            site_values = _decode_part(codec, received_codes[position], position, part_weights)
            part_mean.add_(site_values.double(), alpha=site_weight)
        part_mean /= total_weight
        mean_codes = codec.encode(part_mean)
        if error is not None:
            rounding = values.view(num_sites, part_size) - codec.decode(codes, part_size)
            # The mean's rounding error is this site's: divided by the site's share in the next
            # mean, it counts there as a whole.
            share = self.site_weights[own_position] / total_weight
            if share:
                mean_rounding = part_mean[0] - codec.decode(mean_codes, part_size)[0]
                rounding[own_position] += mean_rounding / share
            error.copy_(rounding.view(-1)[:length])

        # All sites get the codes of every mean.
        all_mean_codes = torch.empty_like(codes)
        self._group.allgather([list(all_mean_codes)], [mean_codes[0]]).wait()
        self.num_bytes += 2 * (num_sites - 1) * mean_codes.numel()
        part_means = [
            _decode_part(codec, row, position, _padded_part(weights, position, part_size))
            for position, row in enumerate(all_mean_codes)
        ]
        mean = torch.cat(part_means).reshape(-1)[:length]
        return mean.add_(weights) if codec.is_relative else mean


def _padded_part(weights: torch.Tensor, position: int, part_size: int) -> torch.Tensor:
    """Return the global weights [part_size] of the part of which the site at `position` takes the
    mean; zeros beyond the end."""
    part_weights = weights[position * part_size : (position + 1) * part_size]
    return torch.nn.functional.pad(part_weights, (0, part_size - len(part_weights)))


def _decode_part(
    codec: Codec, codes: torch.Tensor, position: int, part_weights: torch.Tensor
) -> torch.Tensor:
    """Return the values [1, part_size] that the site at `position` sent. part_weights: the global
    weights of that part. Raises UnusableSiteError."""
    part_size, zero = len(part_weights), torch.zeros(())
    try:
        values = decoded(codec, codes.unsqueeze(0), part_size)
        change = square(values, zero if codec.is_relative else part_weights)
        refuse_norm(change, square(part_weights, zero), part_size, PART_SLACK)
    except UnusableError as error:
        raise UnusableSiteError(position, str(error)) from error
    return values


class _HeldRectangle(NamedTuple):
    """A rectangle of a parameter of `shape`: a `view` of `flat`, the `bucket` of a fragment."""

    box: ParameterBox
    shape: tuple[int, ...]
    fragment: int
    bucket: int
    codec: Codec
    flat: torch.Tensor
    view: torch.Tensor


@dataclass(frozen=True)
class _Region:
    """Part of a bucket: arguments of `torch.as_strided` for a tensor in the bucket's order."""

    bucket: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def from_view(cls, bucket: int, flat: torch.Tensor, view: torch.Tensor) -> _Region:
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
        return pack_views(region.view(tensors) for region in self.regions)

    def unpack(self, flat: torch.Tensor, tensors: Tensors) -> None:
        """Write flat values back to where `pack` read them."""
        for view, values in unpack_views(flat, [region.view(tensors) for region in self.regions]):
            view.copy_(values)


@dataclass(frozen=True)
class _Batch:
    """Transfers whose temporary memory is needed at once. buckets: indices in their fragment."""

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

        def batch(index: int, bucket: Bucket) -> _Batch:
            flat = bucket.weights
            region = _Region.from_view(index, flat, flat[state.own_slice(len(flat))])
            return _Batch([index], [_Transfer(ranks, bucket.codec, [region])])

        batches = []
        for fragment in range(state.num_fragments):
            buckets = enumerate(state.buckets(fragment))
            batches.append([batch(index, bucket) for index, bucket in buckets])
        return cls(state, batches)

    @classmethod
    def by_rectangles(
        cls, state: OuterState, layouts: Sequence[Sequence[Any]], site: int, rank: int
    ) -> WeightExchange:
        """Return the exchange of sites with different layouts. layouts: by position of the site and
        by rank, the result of `rectangles_of`. site: position of this site. Raises ValueError for
        JSON that is not rectangles of this model."""
        rectangles = list(_held_rectangles(state))
        shapes = {rectangle.box.name: rectangle.shape for rectangle in rectangles}

        def parse(trees: Sequence[Any]) -> list[ParameterBox]:
            """Return the rectangles of parameters that this rank holds: it exchanges no others."""
            return [ParameterBox.from_json(tree, shapes) for tree in trees if tree[0] in shapes]

        parsed = [[parse(trees) for trees in site_layout] for site_layout in layouts]
        groups = overlapping_peers(parsed, site, rank)

        # Every element is exchanged, since all sites train equal parameters; elements that are
        # encoded in blocks are exchanged once.
        exchanged_elements: Counter[int] = Counter()
        for patch in chain.from_iterable(groups.values()):
            exchanged_elements[patch.index] += patch.box.num_elements
        for index, rectangle in enumerate(rectangles):
            surplus = exchanged_elements[index] - rectangle.box.num_elements
            assert surplus >= 0, rectangle.box
            assert surplus == 0 or not rectangle.codec.keeps_error, rectangle.box

        batches = []
        for fragment in range(state.num_fragments):
            buckets = range(sum(1 for _ in state.buckets(fragment)))
            transfers: list[_Transfer] = []
            for ranks, patches in groups.items():
                transfers += _transfers(ranks, patches, rectangles, fragment)
            batches.append([_Batch(buckets, transfers)])
        return cls(state, batches)

    @property
    def num_bytes(self) -> int:
        """Bytes sent so far, without headers."""
        return sum(group.num_bytes for group in self.groups.values())

    def set_site_weights(self, site_weights: Sequence[int]) -> None:
        """Set the weights of the sites in the mean."""
        for group in self.groups.values():
            group.site_weights = site_weights

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
            batch_local: dict[int, torch.Tensor] = {}
            for index in batch.buckets:
                masters = local[index]
                batch_local[index] = buckets[index].copy_masters() if masters is None else masters
            # No transfer covers the padding of a bucket, so it keeps the local values.
            batch_means = {index: tensor.clone() for index, tensor in batch_local.items()}
            for transfer in batch.transfers:
                codec, group = transfer.codec, self.groups[transfer.ranks]
                error = transfer.pack(errors) if codec.keeps_error else None
                packed_weights = transfer.pack(weights)
                # Overwrites `error` with the new rounding errors.
                values = group.mean(codec, transfer.pack(batch_local), packed_weights, error)
                transfer.unpack(values, batch_means)
                if error is not None:
                    transfer.unpack(error, errors)
            # Ranks with equal masters (ZeRO 0) each return a share.
            for index, bucket_mean in batch_means.items():
                means[index] = bucket_mean[self._state.own_slice(len(bucket_mean))]
        return [means[index] for index in range(len(buckets))]

    def send(
        self, fragment: int, tensors: Sequence[torch.Tensor], donor: int, takers: Sequence[int]
    ) -> None:
        """Send `takers` the elements of `tensors` that this rank exchanges; on a taker, overwrite
        them. tensors: float32 [N] by bucket. Collective, and raises, as `means`."""
        for batch in self._batches[fragment]:
            for transfer in batch.transfers:
                flat = transfer.pack(tensors)
                self.groups[transfer.ranks].send(flat, donor, takers)
                transfer.unpack(flat, tensors)


def rectangles_of(state: OuterState) -> list[Any]:
    """Return the rectangles that this rank exchanges, fragment after fragment, as JSON."""
    return [rectangle.box.to_json() for rectangle in _held_rectangles(state)]


def _held_rectangles(state: OuterState) -> Iterator[_HeldRectangle]:
    """Yield the rectangles of this rank's shares of all buckets."""
    for fragment in range(state.num_fragments):
        for index, bucket in enumerate(state.buckets(fragment)):
            flat = bucket.weights
            share = state.own_slice(len(flat))
            for box, shape, view in bucket.rectangles(flat, share, primary=False):
                yield _HeldRectangle(box, shape, fragment, index, bucket.codec, flat, view)


def _transfers(
    ranks: Ranks, patches: Sequence[Patch], rectangles: Sequence[_HeldRectangle], fragment: int
) -> Iterator[_Transfer]:
    """Yield transfers of at most `ELEMENTS_AT_ONCE` elements for a group's patches."""
    pairs = [(rectangles[patch.index], patch.box) for patch in patches]
    pairs = [(rectangle, box) for rectangle, box in pairs if rectangle.fragment == fragment]
    codecs = dict.fromkeys(rectangle.codec for rectangle, _ in pairs)
    # Codecs that keep errors first, so that all ranks have an equal order.
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
                regions.append(_Region.from_view(rectangle.bucket, rectangle.flat, view))
                count += piece.num_elements
        if regions:
            yield _Transfer(ranks, codec, regions)
