"""The mean over sites of their weights, whatever part of the model each rank holds.

Ranks of different sites that hold the same elements exchange them in a `SiteGroup`. Where all sites
have the same layout, that is rank by rank and window by window (`by_shards`); else by the
rectangles that ranks have in common (`peers` finds them).
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
from bigtrain.sites.outer_state import ELEMENTS_AT_ONCE, OuterState, Window
from bigtrain.sites.peers import Patch, Ranks, overlapping_peers
from bigtrain.sites.rectangles import ParameterBox

Tensors = Sequence[torch.Tensor | None] | Mapping[int, torch.Tensor]
"""Tensors by the number of a window in its fragment."""


class SiteGroup:
    """Means over the ranks of `group`, one of each site, in the order of the sites.

    group: a `ProcessGroupGloo` in addition to the default one; None if this site is the only one.
    weights: of the sites in the mean; may change. num_bytes: sent so far, without headers.
    """

    def __init__(self, group: Any, weights: Sequence[int]) -> None:
        assert (group is None) == (len(weights) == 1)
        self._group = group
        self.weights = weights
        self.num_bytes = 0

    def send(self, tensor: torch.Tensor, donor: int, takers: Sequence[int]) -> None:
        """Overwrite the `tensor` of `takers` with that of `donor`, which has the same size:
        contiguous on the CPU; sites are positions in the group. Raises RuntimeError if a site is
        lost."""
        if self._group is None or not tensor.numel():
            return
        own = self._group.rank()
        if own == donor:
            for taker in takers:
                self._group.send([tensor], taker, 0).wait()
                self.num_bytes += tensor.nbytes
        elif own in takers:
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
        sites, length = len(self.weights), len(local)
        part = -(-length // sites)
        values = torch.zeros(sites * part)
        values[:length] = local - weights if codec.is_relative else local
        if error is not None:
            values[:length] += error
        codes = codec.encode(values.view(sites, part))
        received = torch.empty_like(codes)
        self._group.alltoall_base(received, codes, [], []).wait()
        total = torch.zeros(1, part, dtype=torch.float64)
        before = _part(weights, self._group.rank(), part)
        for position, weight in enumerate(self.weights):
            of_site = _checked(codec, received[position], part, position, before)
            total.add_(of_site.double(), alpha=weight)
        total /= sum(self.weights)
        own = codec.encode(total)
        if error is not None:
            lost = values.view(sites, part) - codec.decode(codes, part)
            # The rounding of the mean as well, as if only this site had lost it.
            index = self._group.rank()
            share = self.weights[index] / sum(self.weights)
            if share:
                lost[index] += (total[0] - codec.decode(own, part)[0]) / share
            error.copy_(lost.view(-1)[:length])
        means = torch.empty_like(codes)
        self._group.allgather([list(means)], [own[0]]).wait()
        self.num_bytes += 2 * (sites - 1) * own.numel()
        rows = [
            _checked(codec, row, part, position, _part(weights, position, part))
            for position, row in enumerate(means)
        ]
        mean = torch.cat(rows).reshape(-1)[:length]
        return mean.add_(weights) if codec.is_relative else mean


def _part(weights: torch.Tensor, position: int, part: int) -> torch.Tensor:
    """Return the global weights [part] of which a site takes the mean; zeros beyond the end."""
    own = weights[position * part : (position + 1) * part]
    return torch.nn.functional.pad(own, (0, part - len(own)))


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
    """A rectangle of this rank, of a parameter of `shape`: a `view` of the `flat` window."""

    box: ParameterBox
    shape: tuple[int, ...]
    fragment: int
    window: int
    codec: Codec
    flat: torch.Tensor
    view: torch.Tensor


@dataclass(frozen=True)
class _Region:
    """A part of a window, as `torch.as_strided` takes it from any tensor with its layout."""

    window: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, window: int, flat: torch.Tensor, view: torch.Tensor) -> _Region:
        """Return the region of a `view` of the `flat` tensor of a window."""
        offset = int(view.storage_offset() - flat.storage_offset())
        return cls(window, tuple(view.shape), view.stride(), offset)

    def view(self, tensors: Tensors) -> torch.Tensor:
        flat = tensors[self.window]
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
        return torch.cat([region.view(tensors).reshape(-1) for region in self.regions])

    def unpack(self, flat: torch.Tensor, tensors: Tensors) -> None:
        """Write flat values back to where `pack` read them."""
        views = [region.view(tensors) for region in self.regions]
        for view, values in zip(views, flat.split([v.numel() for v in views]), strict=True):
            view.copy_(values.view(view.shape))


@dataclass(frozen=True)
class _Batch:
    """Transfers of `windows`, by number, whose temporary memory is needed at once."""

    windows: Sequence[int]
    transfers: Sequence[_Transfer]


class WeightExchange:
    """Means of this rank's weights over sites, and copies of them between sites.

    A rank exchanges with every rank of another site that holds some of its elements, and only
    these. All ranks process their groups in one order, so that none waits in a circle. ranks: the
    groups of this rank. groups: set before the first exchange.
    """

    def __init__(self, state: OuterState, batches: Sequence[Sequence[_Batch]]) -> None:
        """batches: by fragment."""
        self._state = state
        self._batches = batches
        self.groups: Mapping[Ranks, SiteGroup] = {}
        transfers = chain.from_iterable(b.transfers for of_one in batches for b in of_one)
        self.ranks = sorted({transfer.ranks for transfer in transfers})

    @classmethod
    def by_shards(cls, state: OuterState, ranks: Ranks) -> WeightExchange:
        """Return the exchange of sites with equal layouts: of each window between `ranks`, which
        hold the same of it."""

        def batch(number: int, window: Window) -> _Batch:
            flat = window.weights
            region = _Region.of(number, flat, flat[state.own(len(flat))])
            return _Batch([number], [_Transfer(ranks, window.codec, [region])])

        fragments = map(state.windows, range(state.num_fragments))
        return cls(state, [[batch(*one) for one in enumerate(windows)] for windows in fragments])

    @classmethod
    def by_rectangles(
        cls, state: OuterState, layouts: Sequence[Sequence[Any]], site: int, rank: int
    ) -> WeightExchange:
        """Return the exchange of sites with different layouts. layouts: by position of the site and
        by rank the `rectangles_of`, as JSON. Raises ValueError for what are not rectangles of this
        model."""
        owned = list(_owned(state))
        shapes = {one.box.name: one.shape for one in owned}
        parsed = [
            [
                [ParameterBox.from_json(tree, shapes) for tree in of_rank if tree[0] in shapes]
                for of_rank in of_site
            ]
            for of_site in layouts
        ]
        groups = overlapping_peers(parsed, site, rank)
        _assert_complete(owned, groups)
        batches = []
        for fragment in range(state.num_fragments):
            windows = range(sum(1 for _ in state.windows(fragment)))
            packed = (_packed(ranks, own, owned, fragment) for ranks, own in groups.items())
            batches.append([_Batch(windows, list(chain.from_iterable(packed)))])
        return cls(state, batches)

    @property
    def num_bytes(self) -> int:
        """Bytes sent so far, without headers."""
        return sum(group.num_bytes for group in self.groups.values())

    def set_weights(self, weights: Sequence[int]) -> None:
        """Set the weight of each site in the mean."""
        for group in self.groups.values():
            group.weights = weights

    def means(
        self,
        fragment: int,
        windows: Sequence[Window],
        local: Tensors,
        weights: Sequence[torch.Tensor],
        errors: Tensors,
    ) -> list[torch.Tensor]:
        """Return, by window of a fragment, the mean of what this rank exchanges of it.

        Parameters, each by window, float32 [N]: `local`, the weights of this site, None for the
        current masters; `weights`, the global ones; `errors`, the rounding errors so far,
        overwritten with the new ones. Collective over all groups of this rank, not over the site.
        Raises RuntimeError if a site is lost or too slow.
        """
        means: dict[int, torch.Tensor] = {}
        for batch in self._batches[fragment]:
            given = {
                n: windows[n].gathered() if (own := local[n]) is None else own
                for n in batch.windows
            }
            mean = {n: one.clone() for n, one in given.items()}  # padding is in no rectangle
            for transfer in batch.transfers:
                codec, group = transfer.codec, self.groups[transfer.ranks]
                error = transfer.pack(errors) if codec.keeps_error else None
                values = group.mean(codec, transfer.pack(given), transfer.pack(weights), error)
                transfer.unpack(values, mean)
                if error is not None:
                    transfer.unpack(error, errors)
            means |= {n: one[self._state.own(len(one))] for n, one in mean.items()}
        return [means[n] for n in range(len(windows))]

    def send(
        self, fragment: int, tensors: Sequence[torch.Tensor], donor: int, takers: Sequence[int]
    ) -> None:
        """Send `takers` what this rank exchanges of `tensors`, float32 [N] by window; collective
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
        for number, window in enumerate(state.windows(fragment)):
            flat = window.weights
            for box, shape, view in window.boxes(flat, state.own(len(flat)), primary=False):
                yield _Owned(box, shape, fragment, number, window.codec, flat, view)


def _packed(
    ranks: Ranks, patches: Sequence[Patch], owned: Sequence[_Owned], fragment: int
) -> Iterator[_Transfer]:
    """Yield the patches of one group and fragment, as many at once as memory allows."""
    of_fragment = [(owned[patch.index], patch.box) for patch in patches]
    of_fragment = [(one, box) for one, box in of_fragment if one.fragment == fragment]
    codecs = dict.fromkeys(one.codec for one, _ in of_fragment)
    for codec in sorted(codecs, key=lambda codec: not codec.keeps_error):
        regions: list[_Region] = []
        count = 0
        for one, patch in of_fragment:
            for box in patch.split(ELEMENTS_AT_ONCE) if one.codec == codec else ():
                if regions and count + box.num_elements > ELEMENTS_AT_ONCE:
                    yield _Transfer(ranks, codec, regions)
                    regions, count = [], 0
                view = one.view[box.relative_to(one.box).slices]
                regions.append(_Region.of(one.window, one.flat, view))
                count += box.num_elements
        if regions:
            yield _Transfer(ranks, codec, regions)


def _assert_complete(owned: Sequence[_Owned], groups: Mapping[Ranks, Sequence[Patch]]) -> None:
    """Assert that all sites train the same parameters, and send what is in blocks once."""
    counts: Counter[int] = Counter()
    for patch in chain.from_iterable(groups.values()):
        counts[patch.index] += patch.box.num_elements
    for index, one in enumerate(owned):
        assert counts[index] >= one.box.num_elements, one.box
        assert counts[index] == one.box.num_elements or not one.codec.keeps_error, one.box
