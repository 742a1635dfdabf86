"""Runs that are saved on one layout of ranks and resumed on another."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch

from bigtrain.engine.checkpoint.io import read_full
from tests.parity.conftest import is_deselected, train_cases


@dataclass(frozen=True)
class Layout:
    """Ranks, DeepSpeed's JSON and degrees that write or read a checkpoint; `variant`: the model or
    optimizer of the run."""

    world_size: int
    engine: str
    degrees: tuple[tuple[str, int], ...] = ()
    variant: str = ""
    dtype: str = "float32"

    @property
    def name(self) -> str:
        axes = "".join(f"-{axis}{size}" for axis, size in self.degrees)
        start = f"{self.variant}-" if self.variant else ""
        return f"{start}{self.engine}-of-{self.world_size}{axes}-{self.dtype}"

    @property
    def num_replicas(self) -> int:
        """Ranks that train on different samples."""
        return self.world_size // prod(size for axis, size in self.degrees if axis != "expert")


def layout(
    world_size: int, engine: str, variant: str = "", dtype: str = "float32", **degrees: int
) -> Layout:
    return Layout(world_size, engine, tuple(degrees.items()), variant, dtype)


@dataclass(frozen=True)
class Pair:
    """A layout that writes a checkpoint and one that resumes from it."""

    wrote: Layout
    read: Layout
    slow: bool = True

    @property
    def name(self) -> str:
        return f"{self.wrote.name}-to-{self.read.name}"


def each_pair(pairs: Iterable[Pair]) -> pytest.MarkDecorator:
    """Return a decorator that runs a test with each `pair`; the slow ones are marked so."""
    parameters = [
        pytest.param(pair, id=pair.name, marks=[pytest.mark.slow] if pair.slow else [])
        for pair in pairs
    ]
    return pytest.mark.parametrize("pair", parameters)


class Resumes:
    """Results of a file's pairs. The first test that asks for a fast pair trains all fast ones, but
    those that are deselected; the slow pairs of a variant are trained likewise."""

    def __init__(
        self,
        directory: Path,
        pairs: Iterable[Pair],
        job_of: Callable[[Layout], dict[str, Any]],
        *,
        stop: int,
        end: int,
    ) -> None:
        """Writers train to `end` without a break and save at `stop`, where readers begin."""
        self._directory, self._pairs, self._job_of = directory, list(pairs), job_of
        self._stop, self._end = stop, end
        self._results: dict[Any, dict[str, Any]] = {}

    def directory_of(self, pair: Pair, *, resumed: bool = False) -> Path:
        """Return where the writer's checkpoint is, or what the reader saved of it at once."""
        key = self._key(pair)
        return self._directory / "-".join(key) / (pair if resumed else pair.wrote).name

    def results_of(self, pair: Pair) -> dict[str, Any]:
        """Return the results of the group of a pair by name, trained on first use."""
        key = self._key(pair)
        if key not in self._results:
            group = [p for p in self._pairs if self._key(p) == key and not is_deselected(p)]
            self._results[key] = self._train(group if pair in group else [*group, pair])
        return self._results[key]

    def check(self, pair: Pair, *, exact: float | None = 1e-5) -> dict[str, torch.Tensor]:
        """Compare what was restored, bit for bit, and what is computed then: bit for bit on the
        same layout, else by `exact`, unless it is None. Returns the checkpoint's tensors."""
        results = self.results_of(pair)
        uninterrupted, resumed = results[pair.wrote.name], results[pair.name]
        saved, again = (
            read_full(self.directory_of(pair, resumed=is_again) / "tensors")
            for is_again in (False, True)
        )
        assert saved.keys() == again.keys()
        for key, tensor in saved.items():
            assert torch.equal(tensor, again[key]), key
        assert resumed["samples"] == uninterrupted["samples"][self._stop :]
        losses, norms = (uninterrupted[key][self._stop :] for key in ("losses", "norms"))
        assert len(losses) == len(resumed["losses"]) == self._end - self._stop
        if pair.wrote == pair.read:
            assert (resumed["losses"], resumed["norms"]) == (losses, norms)
        elif exact is not None:
            assert resumed["losses"] == pytest.approx(losses, abs=exact)
            assert resumed["norms"] == pytest.approx(norms, rel=10 * exact)
        return saved

    def _key(self, pair: Pair) -> tuple[str, ...]:
        return (pair.wrote.variant, pair.wrote.dtype) if pair.slow else ("fast",)

    def _train(self, pairs: list[Pair]) -> dict[str, Any]:
        """Train every writer, then every reader, in few worlds: readers of the size of the last
        writers share their world."""
        jobs: list[tuple[int, str, dict[str, Any]]] = []
        for wrote in sorted(dict.fromkeys(p.wrote for p in pairs), key=lambda w: w.world_size):
            place = next(self.directory_of(p) for p in pairs if p.wrote == wrote)
            steps = {"last_step": self._end, "save_at": self._stop, "save_to": str(place)}
            jobs.append((wrote.world_size, wrote.name, self._job_of(wrote) | steps))
        last_size = jobs[-1][0]
        for pair in sorted(pairs, key=lambda p: (p.read.world_size != last_size, p.read.engine)):
            steps = {
                "first_step": self._stop,
                "last_step": self._end,
                "restore_from": str(self.directory_of(pair)),
                "save_again_to": str(self.directory_of(pair, resumed=True)),
            }
            jobs.append((pair.read.world_size, pair.name, self._job_of(pair.read) | steps))
        results: dict[str, Any] = {}
        readers = {pair.name for pair in pairs}
        phases: dict[tuple[bool, int], dict[str, Any]] = {}
        for size, name, job in jobs:
            is_later = name in readers and size != last_size
            phases.setdefault((is_later, size), {})[name] = job
        self._directory.mkdir(exist_ok=True)
        for number, ((_, size), cases) in enumerate(phases.items()):
            world = self._directory / f"world-{len(self._results)}-{number}"
            world.mkdir()
            results |= train_cases(size, cases, world)
        return results
