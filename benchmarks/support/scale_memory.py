"""Cost of a restart from checkpoints in memory of the hosts: parts of `benchmarks/scale.py`. All
ranks are there, each in a thread (`benchmarks/support/all_ranks.py`), and every host has its
directories."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import xxhash

from benchmarks.support.all_ranks import run_all
from benchmarks.support.scale_checkpoints import IDENTITY, Zero3, _write
from benchmarks.support.simulated import RANKS_OF_HOST, Cost, Meter
from bigtrain.engine.checkpoint.io import writers
from bigtrain.engine.checkpoint.layout import merge
from bigtrain.engine.checkpoint.tensor_file import SaveIdentity, file_name
from bigtrain.engine.startup.long_work import on_main_rank
from bigtrain.run.checkpointing import checkpoints, memory_files
from bigtrain.run.checkpointing.host_files import Partners
from bigtrain.run.checkpointing.memory_directory import MemoryDirectory
from bigtrain.run.checkpointing.memory_files import (
    MemoryFiles,
    open_memory_files,
    plan_transfers,
)
from bigtrain.settings.run_config import MemoryCheckpointSection
from bigtrain.settings.sections.running import COLLECTIVE_TIMEOUT_SECONDS
from bigtrain.system.world import World

PARAMETERS = 8
"""Of the model: they are few, since each rank that is simulated makes its fragments."""


class Hosts:
    """Hosts of `RANKS_OF_HOST` ranks, at least two, with partner copies of checkpoints in memory.
    Tensor files of all ranks are links to one."""

    def __init__(self, num_ranks: int, directory: Path) -> None:
        self.num_ranks, self._directory = num_ranks, directory
        each = min(RANKS_OF_HOST, num_ranks // 2)
        self.names = [f"host{rank // each:05d}" for rank in range(num_ranks)]
        self._cutting = Zero3(num_ranks, PARAMETERS)
        self._run = directory / "run"
        self._run.mkdir()
        (self._run / "run_id").write_text(IDENTITY.run)
        (self._run / "generations").mkdir()
        holder = {"attempt": IDENTITY.attempt, "generation": 1}
        (self._run / "generations" / "00000001.json").write_text(json.dumps(holder))
        self._entry = _write(self._cutting, 0, directory)
        self._rows = merge(row for rows in self._cutting.all_rows(directory) for row in rows)

    def save(self, step: int, names: Sequence[str]) -> None:
        """Put a checkpoint into the memory of the hosts `names`."""
        source = self._directory / file_name(0)
        documents = self._documents(step)
        partners = Partners.of(self.names)
        assert partners is not None
        held: dict[str, list[int]] = {name: [] for name in names}
        for rank, name in enumerate(self.names):
            for host in {name, self.names[partners.partner_of[rank]]}:
                if host in held:
                    held[host].append(rank)
        for host, ranks in held.items():
            memory = MemoryDirectory.of(str(self._mount(host)), self._run, IDENTITY.run)
            final = checkpoints.checkpoint_path(memory.path, step)
            (final / checkpoints.TENSORS).mkdir(parents=True, mode=0o700)
            memory.path.parent.chmod(0o700)
            memory.path.chmod(0o700)
            for name, content in documents.items():
                (final / name).hardlink_to(content)
            for rank in ranks:
                (final / checkpoints.TENSORS / file_name(rank)).hardlink_to(source)

    def _mount(self, host: str) -> Path:
        mount = self._directory / host
        mount.mkdir(exist_ok=True)
        return mount

    def _documents(self, step: int) -> dict[str, Path]:
        """Write the small files, and return where they are."""
        state = json.dumps({"run": IDENTITY.run, "step": step}).encode()
        layout = json.dumps(self._rows.to_json(), separators=(",", ":")).encode()
        small = {checkpoints.STATE: state, checkpoints.LAYOUT: layout}
        files = {
            f"{checkpoints.TENSORS}/{file_name(rank)}": self._entry
            for rank in range(self.num_ranks)
        }
        files |= {name: (len(text), xxhash.xxh3_64_hexdigest(text)) for name, text in small.items()}
        identity = SaveIdentity(IDENTITY.run, step, IDENTITY.attempt)
        manifest = checkpoints.manifest_text(
            checkpoints.CheckpointManifest(identity, files)
        ).encode()
        folder = self._directory / f"documents-{step}"
        folder.mkdir()
        for name, content in {**small, checkpoints.MANIFEST: manifest}.items():
            (folder / name).write_bytes(content)
        return {path.name: path for path in folder.iterdir()}

    def restart(self) -> Cost:
        """Agree on the newest checkpoint and get what hosts lack, on all ranks; return processor
        seconds of the main rank (`others_seconds`: of the median rank), the messages one after the
        other until the last rank was done (rounds), the most bytes that a rank sent and received
        beside files, and those of the fetched files."""
        used: list[Path] = []

        def one(rank: int) -> None:
            mount = str(self._mount(self.names[rank]))
            memory = MemoryCheckpointSection(every_steps=1, copies=1, directory=mount)
            config = SimpleNamespace(
                checkpoint=SimpleNamespace(memory=memory),
                watchdog=SimpleNamespace(collective_timeout_seconds=COLLECTIVE_TIMEOUT_SECONDS),
            )
            world = World(rank, self.num_ranks, rank % RANKS_OF_HOST)
            context: Any = SimpleNamespace(
                config=config,
                world=world,
                hosts=tuple(self.names),
                directory=self._run,
                log=SimpleNamespace(info=print),
            )
            files = open_memory_files(context, IDENTITY.run, create=False)
            assert isinstance(files, MemoryFiles)
            complete = files.complete()
            newest = on_main_rank(lambda: complete[0], files.group)
            used.append(files.prepare(newest, context))
            files.close()

        def own_writers(context: Any, layout: Any) -> set[int]:
            return writers(self._cutting.fragments(context.world.rank), {}, layout)

        plans: list[list[memory_files._Transfer]] = []

        def plan(*args: Any) -> list[memory_files._Transfer]:
            plans.append(plan_transfers(*args))
            return plans[-1]

        with mock.patch.multiple(
            memory_files, writers_of_own_parts=own_writers, plan_transfers=plan
        ):
            meter = Meter()
            costs = run_all(self.num_ranks, one)
        fetched = [transfer for each in plans for transfer in each]
        for transfer in fetched:
            for rank in (transfer.source, transfer.target):
                costs[rank].num_bytes -= transfer.num_bytes
        assert len(used) == self.num_ranks
        assert all((used[rank] / checkpoints.MANIFEST).is_file() for rank in range(self.num_ranks))
        everything = meter.read()
        return {
            "seconds": costs[0].seconds,
            "wall": everything["wall"],
            "mib": everything["mib"] / self.num_ranks,
            "others_seconds": statistics.median(cost.seconds for cost in costs),
            "rounds": max(cost.rounds for cost in costs),
            "bytes": max(cost.num_bytes for cost in costs),
            "fetched_bytes": sum(transfer.num_bytes for transfer in fetched),
        }


def measure_agree(num_ranks: int, size: int, directory: Path) -> Cost:
    """All hosts have the two newest checkpoints."""
    hosts = Hosts(num_ranks, directory)
    names = list(dict.fromkeys(hosts.names))
    hosts.save(1, names)
    hosts.save(2, names)
    return hosts.restart()


def measure_fetch(num_ranks: int, size: int, directory: Path) -> Cost:
    """The last host came back with empty memory, and gets the files of its ranks."""
    hosts = Hosts(num_ranks, directory)
    hosts.save(2, list(dict.fromkeys(hosts.names))[:-1])
    return hosts.restart()
