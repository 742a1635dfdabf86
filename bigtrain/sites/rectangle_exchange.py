"""The mean over sites with different layouts, by the rectangles that ranks have in common."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from bigtrain.sites.codecs import Codec
from bigtrain.sites.counterparts import Patch, Ranks, counterparts
from bigtrain.sites.exchange import Exchange
from bigtrain.sites.outer_state import ELEMENTS_AT_ONCE, OuterState, Window
from bigtrain.sites.rectangles import Box


@dataclass(frozen=True)
class _Held:
    """A rectangle that this rank exchanges, of a parameter of `shape`: in which window of which
    fragment, how encoded."""

    box: Box
    shape: tuple[int, ...]
    fragment: int
    window: int
    codec: Codec


@dataclass(frozen=True)
class _Transfer:
    """Patches that are exchanged at once, encoded as one row."""

    ranks: Ranks
    codec: Codec
    patches: Sequence[Patch]


def own_boxes(state: OuterState) -> list[Any]:
    """What this rank exchanges, fragment after fragment, as JSON."""
    return [held.box.to_json() for held in _held(state)]


class RectangleExchange:
    """Takes means over sites whose ranks hold other parts of the model.

    A rank exchanges with every rank of another site that holds elements of its own, and just these,
    as ranks with the same part do (`Exchange`). All ranks go through their groups in one order, so
    that none waits in a circle. ranks: the groups of this rank.
    """

    def __init__(
        self, state: OuterState, told: Sequence[Sequence[Any]], site: int, rank: int
    ) -> None:
        """told: by site and rank the `own_boxes`. Raises ValueError if some are no rectangles of
        what this rank holds."""
        self._state = state
        self._held = list(_held(state))
        shapes = {held.box.name: held.shape for held in self._held}
        layouts = [
            [
                [Box.from_json(tree, shapes) for tree in of_rank if tree[0] in shapes]
                for of_rank in of_site
            ]
            for of_site in told
        ]
        self._transfers: dict[int, list[_Transfer]] = {n: [] for n in range(state.num_fragments)}
        self._exchanges: Mapping[Ranks, Exchange] = {}
        groups = counterparts(layouts, site, rank)
        self._assert_complete(groups)
        self.ranks = list(groups)
        for ranks, patches in groups.items():
            for fragment, transfers in self._transfers.items():
                own = [p for p in patches if self._held[p.index].fragment == fragment]
                transfers += self._packed(ranks, own)

    def open(self, exchanges: Mapping[Ranks, Exchange]) -> None:
        """Exchange by these from now on, one for each of `ranks`."""
        self._exchanges = exchanges

    @property
    def num_bytes(self) -> int:
        """Sent so far, without headers."""
        return sum(exchange.num_bytes for exchange in self._exchanges.values())

    def weigh(self, weights: Sequence[int]) -> None:
        """Count sites so much from now on."""
        for exchange in self._exchanges.values():
            exchange.weights = weights

    def means(
        self,
        fragment: int,
        windows: Sequence[Window],
        local: Sequence[torch.Tensor | None],
        weights: Sequence[torch.Tensor],
        errors: Sequence[torch.Tensor | None],
    ) -> list[torch.Tensor]:
        """As of `ShardExchange`; collective over all groups of this rank."""
        given = [
            window.gathered() if one is None else one
            for window, one in zip(windows, local, strict=True)
        ]
        mean = [one.clone() for one in given]  # padding is no part of any rectangle
        sent, found, before, lost = (
            self._views(fragment, windows, tensors) for tensors in (given, mean, weights, errors)
        )
        for transfer in self._transfers[fragment]:
            error = None
            if transfer.codec.keeps_error:
                error = self._taken(lost, transfer)
            of_all = self._exchanges[transfer.ranks].mean(
                transfer.codec,
                self._taken(sent, transfer),
                self._taken(before, transfer),
                error,
            )
            self._put(of_all, found, transfer)
            if error is not None:
                self._put(error, lost, transfer)
        return [one[self._state.own(len(one))] for one in mean]

    def give(
        self,
        fragment: int,
        windows: Sequence[Window],
        tensors: Sequence[torch.Tensor],
        giver: int,
        takers: Sequence[int],
    ) -> None:
        """As of `ShardExchange`; collective over all groups of this rank."""
        views = self._views(fragment, windows, tensors)
        for transfer in self._transfers[fragment]:
            flat = self._taken(views, transfer)
            self._exchanges[transfer.ranks].give(flat, giver, takers)
            self._put(flat, views, transfer)

    def _packed(self, ranks: Ranks, patches: Sequence[Patch]) -> Iterator[_Transfer]:
        """Patches of one group and fragment, so many at once as memory allows."""
        for keeps_error in (True, False):  # of each there is one codec
            held: list[Patch] = []
            count = 0
            for patch in patches:
                codec = self._held[patch.index].codec
                if codec.keeps_error != keeps_error:
                    continue
                for box in patch.box.split(ELEMENTS_AT_ONCE):
                    if held and count + box.count > ELEMENTS_AT_ONCE:
                        yield _Transfer(ranks, self._held[held[0].index].codec, held)
                        held, count = [], 0
                    held.append(Patch(patch.index, box))
                    count += box.count
            if held:
                yield _Transfer(ranks, self._held[held[0].index].codec, held)

    def _assert_complete(self, groups: Mapping[Ranks, Sequence[Patch]]) -> None:
        """All sites train the same parameters, and what is encoded in blocks travels once."""
        counts: Counter[int] = Counter()
        for patch in (patch for patches in groups.values() for patch in patches):
            counts[patch.index] += patch.box.count
        for index, held in enumerate(self._held):
            assert counts[index] >= held.box.count, held.box
            assert counts[index] == held.box.count or not held.codec.keeps_error, held.box

    def _views(
        self,
        fragment: int,
        windows: Sequence[Window],
        tensors: Sequence[torch.Tensor | None],
    ) -> dict[int, torch.Tensor]:
        """By index of a rectangle the view of it in tensors that lie as `windows` do, if it has
        one."""
        found: dict[int, torch.Tensor] = {}
        for number, (window, tensor) in enumerate(zip(windows, tensors, strict=True)):
            if tensor is None:
                continue
            place = fragment, number
            indexes = [n for n, h in enumerate(self._held) if (h.fragment, h.window) == place]
            cuts = window.boxes(tensor, self._state.own(len(tensor)), primary=False)
            for index, (_, _, view) in zip(indexes, cuts, strict=True):
                found[index] = view
        return found

    def _parts(self, views: Mapping[int, torch.Tensor], transfer: _Transfer) -> list[torch.Tensor]:
        return [p.box.of_part(views[p.index], self._held[p.index].box) for p in transfer.patches]

    def _taken(self, views: Mapping[int, torch.Tensor], transfer: _Transfer) -> torch.Tensor:
        """What a transfer is about, as a flat tensor: a copy."""
        return torch.cat([part.reshape(-1) for part in self._parts(views, transfer)])

    def _put(
        self, flat: torch.Tensor, views: Mapping[int, torch.Tensor], transfer: _Transfer
    ) -> None:
        parts = self._parts(views, transfer)
        for part, values in zip(parts, flat.split([p.numel() for p in parts]), strict=True):
            part.copy_(values.view(part.shape))


def _held(state: OuterState) -> Iterator[_Held]:
    for fragment in range(state.num_fragments):
        for number, window in enumerate(state.windows(fragment)):
            own = state.own(len(window.weights))
            for box, shape, _ in window.boxes(window.weights, own, primary=False):
                yield _Held(box, shape, fragment, number, window.codec)
