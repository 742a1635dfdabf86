"""The outer step of a site: exchange its engine's masters with other sites and update them."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
import xxhash

from bigtrain.engine.checkpoint.lazy import memory_of
from bigtrain.engine.deepspeed_patches.optimizers import refresh_parameters
from bigtrain.engine.optimizers.masters import MasterPart, master_parts
from bigtrain.engine.sites.codecs import sent_bytes
from bigtrain.engine.sites.exchange import Exchange
from bigtrain.engine.sites.outer_update import outer_update
from bigtrain.engine.sites.site_rendezvous import SiteRendezvous
from bigtrain.engine.startup.long_work import on_all_ranks
from bigtrain.engine.train_engine import TrainEngine
from bigtrain.errors import LaunchError
from bigtrain.settings.sections.sites import SitesSection

GLOBAL, MOMENTUM = "outer_global", "outer_momentum"
"""Kinds of tensors of a checkpoint: the global weights, and the momentum of their optimizer."""
ELEMENTS_AT_ONCE = 1 << 24
"""Elements of a rank's masters per exchange, which bounds the temporary memory of an outer step."""


@dataclass(frozen=True)
class OuterFigures:
    """What an outer step did; the same on every rank of a site.

    number: of the outer step, from 1. sent_bytes: by all ranks of this site. seconds: its duration
    on this rank, `waited_seconds` of it waiting for the other sites. change: root mean square of
    this site's change to the global weights since the last outer step. distance: root mean square
    of the difference between its weights and the mean over sites.
    """

    number: int
    sent_bytes: int
    seconds: float
    waited_seconds: float
    change: float
    distance: float


class OuterStep:
    """The global weights and outer momentum of what one rank trains, and the step that moves them.

    Both are float32 in host memory, 8 bytes for each element of this rank's masters (4 for
    averaging), and part of the engine's checkpoints. Methods are collective over all sites.
    """

    def __init__(self, engine: TrainEngine, rendezvous: SiteRendezvous) -> None:
        self._engine = engine
        self._rendezvous = rendezvous
        self._exchange = Exchange(rendezvous.group, self.sites.count, self.sites.codec)
        self.number = 0
        parts = self._parts()
        assert all(part.master.dtype == torch.float32 for part in parts)
        num_elements = sum(part.count for part in parts)
        self.weights = torch.zeros(num_elements)
        self.momentum = torch.zeros(num_elements) if self.sites.outer.has_momentum else None
        self._layout = [(part.name, part.start, part.count) for part in parts]
        begin = 0
        for part in parts:
            states = {GLOBAL: self.weights[begin : begin + part.count]}
            if self.momentum is not None:
                states[MOMENTUM] = self.momentum[begin : begin + part.count]
            engine.added_states[part.name] = states
            begin += part.count

    @property
    def sites(self) -> SitesSection:
        return self._rendezvous.sites

    def begin(self, number: int, *, is_new: bool) -> None:
        """Begin after `number` outer steps, with the engine filled. The weights of a new run become
        the global ones; a resumed run has those of its checkpoint.

        Raises LaunchError if other sites have other global weights or another number.
        """
        self.number = number
        if is_new:
            for window, weights in self._windows():
                weights.copy_(self._gathered(window))
        facts = {
            "the number of outer steps": number,
            "the parts of parameters of a rank": _digest_of_text(repr(self._layout)),
            "the global weights": _digest(self.weights),
        }
        self._rendezvous.compare("the beginning", facts)

    def step(self) -> OuterFigures:
        """Make one outer step. Raises LaunchError on all ranks of a site if one of them cannot: a
        site does not join, is lost, or has other global weights."""
        begun = time.perf_counter()
        self.number += 1
        facts = {"outer step": self.number, "the global weights": _digest(self.weights)}
        self._rendezvous.compare(f"outer step {self.number}", facts)
        waited = time.perf_counter() - begun
        sent_before = self._exchange.num_bytes
        squares = torch.zeros(3, dtype=torch.float64)

        def update() -> None:
            try:
                for window, weights in self._windows():
                    squares.add_(self._update(window, weights))
            except RuntimeError as error:
                raise LaunchError(
                    f"outer step {self.number}: another site was lost, or took longer than "
                    f"sites.timeout_seconds = {self.sites.timeout_seconds:g} for a transfer: "
                    f"{error} -> see what the other sites say; started again, all resume from "
                    "their newest checkpoints"
                ) from error

        on_all_ranks(update)
        refresh_parameters(self._engine.engine)
        sent = self._exchange.num_bytes - sent_before
        assert sent == sent_bytes(len(self.weights), self.sites.count, self.sites.codec)
        return self._figures(squares, sent, time.perf_counter() - begun, waited)

    def close(self) -> None:
        """After the last step: leave when all ranks of all sites do."""
        self._rendezvous.close()

    def _update(self, window: list[_Piece], weights: torch.Tensor) -> torch.Tensor:
        """Set a window of masters to the new global weights; returns sums for the figures."""
        local = self._gathered(window)
        mean = self._exchange.mean(local, weights)
        change, distance = _square(local, weights), _square(local, mean)
        momentum = None
        if self.momentum is not None:
            begin = window[0].begin
            momentum = self.momentum[begin : begin + len(weights)]
        outer_update(weights, momentum, mean, self.sites)
        begin = 0
        for piece in window:
            piece.master.copy_(weights[begin : begin + piece.master.numel()])
            begin += piece.master.numel()
        return torch.tensor([change, distance, len(weights)], dtype=torch.float64)

    def _gathered(self, window: list[_Piece]) -> torch.Tensor:
        """The masters of a window in host memory, float32 [N]; a copy."""
        return torch.cat([piece.master.detach().cpu() for piece in window])

    def _windows(self) -> Iterator[tuple[list[_Piece], torch.Tensor]]:
        """The pieces of masters that are exchanged together, and their global weights."""
        # A multiple of the sites, so that only the last part is filled up.
        most = max(1, ELEMENTS_AT_ONCE // self.sites.count) * self.sites.count
        window: list[_Piece] = []
        begin = held = 0
        for part in self._parts():
            master, taken = part.of(part.master.data), 0
            while taken < part.count:
                size = min(part.count - taken, most - held)
                window.append(_Piece(begin, master[taken : taken + size]))
                begin, held, taken = begin + size, held + size, taken + size
                if held == most:
                    yield window, self.weights[begin - held : begin]
                    window, held = [], 0
        if window:
            yield window, self.weights[begin - held : begin]

    def _parts(self) -> list[MasterPart]:
        """Of what is trained, in the order of the model's parameters."""
        module = self._engine.module
        return [
            part
            for part in master_parts(self._engine.engine, module)
            if part.count and module.get_parameter(part.name).requires_grad
        ]

    def _figures(
        self, squares: torch.Tensor, sent: int, seconds: float, waited: float
    ) -> OuterFigures:
        totals = torch.cat([squares, torch.tensor([sent], dtype=torch.float64)])
        totals = totals.to(self._engine.device)
        dist.all_reduce(totals)
        change, distance, count, all_sent = totals.tolist()
        return OuterFigures(
            self.number,
            int(all_sent),
            seconds,
            waited,
            math.sqrt(change / max(1, count)),
            math.sqrt(distance / max(1, count)),
        )


@dataclass(frozen=True)
class _Piece:
    """A flat range of a master, and where it begins among all of this rank."""

    begin: int
    master: torch.Tensor


def _square(first: torch.Tensor, second: torch.Tensor) -> float:
    """The summed square of the difference."""
    return float(torch.linalg.vector_norm(first - second, dtype=torch.float64)) ** 2


def _digest(tensor: torch.Tensor) -> str:
    return xxhash.xxh3_64_hexdigest(memory_of(tensor)) if tensor.numel() else ""


def _digest_of_text(text: str) -> str:
    return xxhash.xxh3_64_hexdigest(text.encode())
