"""Cost of a start for a rank, a host or the main rank of many: parts of `benchmarks/scale.py`."""

from __future__ import annotations

import contextlib
import io
import json
import os
import secrets
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import yaml

from benchmarks.support.simulated import RANKS_OF_HOST, Cost, Meter, told_by_all, world
from bigtrain.commands.hostfile import _check_hostfile as check_hostfile
from bigtrain.data.samples.phases import data_hash
from bigtrain.data.samples.token_stream import split_stream
from bigtrain.data.shards.dataset import open_dataset
from bigtrain.data.shards.manifest import (
    Manifest,
    OptionsRecord,
    ShardRecord,
    TokenizerRecord,
    write_manifest,
)
from bigtrain.data.shards.shard_table import read_table
from bigtrain.engine.startup.mesh import Mesh, open_mesh
from bigtrain.engine.startup.process_group import _gather_hosts
from bigtrain.launchers.doctor.examination import Examination, examine
from bigtrain.launchers.doctor.host_probe import MARK, facts
from bigtrain.launchers.hostfile import Host
from bigtrain.models.configuration import load_hf_config
from bigtrain.models.equivalence.model_plan import cached_model_plan
from bigtrain.settings.resolve import resolve_run
from bigtrain.settings.run_config import DataSection, RunConfig
from bigtrain.settings.topology import Topology
from bigtrain.system.machine import library_versions
from bigtrain.system.world import World

SHARDS_OF_RANK = 24
PUBLISHED = Path(__file__).resolve().parents[1] / "published"


def measure_hosts(num_ranks: int, size: int, directory: Path) -> Cost:
    versions = library_versions()
    with told_by_all(
        [
            (f"host{r // RANKS_OF_HOST:05d}", versions, secrets.token_hex(8))
            for r in range(num_ranks)
        ]
    ):
        meter = Meter()
        hosts, _ = _gather_hosts(World(0, num_ranks, 0))
        assert len(hosts) == num_ranks
        return meter.read()


def measure_groups(num_ranks: int, size: int, directory: Path) -> Cost:
    tensor = min(8, num_ranks)
    pipeline = min(8, num_ranks // tensor)
    topology = Topology(
        data_size=num_ranks // tensor // pipeline, tensor_size=tensor, pipeline_size=pipeline
    )
    with world(num_ranks // 2, num_ranks):
        meter = Meter()
        mesh: Mesh = open_mesh(topology, num_ranks // 2)
        assert mesh.rank == num_ranks // 2
        return meter.read()


def _write_dataset(num_ranks: int, directory: Path) -> int:
    """Write only the manifest; return its bytes."""
    sums = {"xxh3": "0" * 16, "index_xxh3": "0" * 16, "blocks_xxh3": "0" * 16}
    shards = tuple(
        ShardRecord(name=f"s{n:06d}", documents=1, tokens=64, bytes=128, text_bytes=200, **sums)  # type: ignore[arg-type]
        for n in range(SHARDS_OF_RANK * max(num_ranks, 1000 // SHARDS_OF_RANK + 1))
    )
    tokenizer = TokenizerRecord(
        name="none", hash="0" * 16, vocab_size=64, end_of_document_id=0, engine="none"
    )
    manifest = Manifest(
        tokenizer=tokenizer,
        token_dtype="uint16",
        sources=(),
        options=OptionsRecord(),
        splits={"train": shards},
    )
    write_manifest(directory, manifest)
    return (directory / "manifest.json").stat().st_size


def _elsewhere(action: Callable[[], object]) -> None:
    """Let a process of its own do `action`, which leaves this one no memory to use again."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            action()
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert status == 0, status


def measure_data(num_ranks: int, size: int, directory: Path) -> Cost:
    num_bytes = _write_dataset(num_ranks, directory)
    # The first rank of a host makes the table that the others map.
    _elsewhere(lambda: read_table(directory))
    meter = Meter()
    dataset = open_dataset(directory, "listed")
    split_stream(dataset, "train")
    data_hash(DataSection(path=str(directory)), [dataset])
    return meter.read(bytes=num_bytes)


def measure_table(num_ranks: int, size: int, directory: Path) -> Cost:
    _elsewhere(lambda: _write_dataset(num_ranks, directory))
    meter = Meter()
    read_table(directory)
    return meter.read(bytes=(directory / "manifest.json").stat().st_size)


def measure_hostfile(num_ranks: int, size: int, directory: Path) -> Cost:
    path = directory / "hostfile"
    names = [f"127.{n >> 16}.{n >> 8 & 255}.{n & 255}" for n in range(1, num_ranks + 1)]
    path.write_text("".join(f"{name} slots={RANKS_OF_HOST}\n" for name in names))
    meter = Meter()
    with contextlib.redirect_stdout(io.StringIO()):
        assert check_hostfile(path) == 0
    return meter.read()


_SSH = """\
#!/bin/sh
# Answer of a host on which the requested probe finds no problem.
while [ "$1" != -- ]; do shift; done
case "$3" in
*" facts "*) echo '{facts}';;
*" shared "*) for file in {directory}/.doctor-????????????????; do : > "$file-$2"; done
    echo '{mark}{{"problem": null}}';;
*) echo '{mark}{{"port": null, "unreachable": {{}}}}';;
esac
"""


def measure_doctor(num_ranks: int, size: int, directory: Path) -> Cost:
    """Return a host for each of `num_ranks`, behind an `ssh` that answers on this machine with what
    this one's probe has found: reading and judging the answers, starting and ending the processes.
    Their clocks are stopped, which is the only finding."""
    shared = directory / "shared"
    shared.mkdir()
    found_here = {**facts(str(shared)), "own_address": "10.0.0.1", "shm_free_gib": 64.0}
    answer = MARK + json.dumps(found_here)
    program = directory / "ssh"
    program.write_text(_SSH.format(facts=answer, directory=shared, mark=MARK))
    program.chmod(0o755)
    hosts = [Host(f"n{number}", 1, number + 1) for number in range(num_ranks)]
    what = Examination(hosts, "ssh", shared, None, 120, 0.0, compute=False)
    path = f"{directory}{os.pathsep}{os.environ['PATH']}"
    with mock.patch.dict(os.environ, {"PATH": path}):
        meter = Meter()
        findings, _ = examine(what, lambda line: None)
        cost = meter.read()
    wrong = {one.check for one in findings if one.failed} - {"clock"}
    assert not wrong, [one for one in findings if one.check in wrong][:3]
    assert len({one.host for one in findings}) == num_ranks
    return cost


def _llama(num_ranks: int, size: int, directory: Path) -> tuple[RunConfig, str]:
    tree = {
        "model": {
            "config": {
                "model_type": "llama",
                "hidden_size": 16384,
                "intermediate_size": 53248,
                "num_hidden_layers": 16 if size < 1000 else 126,
                "num_attention_heads": 128,
                "num_key_value_heads": 8,
                "vocab_size": 128256,
                "max_position_embeddings": 131072,
            }
        },
        "data": {"path": str(directory), "document_boundaries": "isolate"},
        "batch": {
            "sequence_length": 8192,
            "global_batch_size": 8 * num_ranks,
            "micro_batch_size": 1,
        },
        "train": {"steps": 1},
        "optimizer": {"lr": 1e-4},
        "output": {"directory": str(directory)},
        "parallel": {"tensor": 4, "pipeline": 2},
    }
    return RunConfig.model_validate(tree), "zero1"


def _deepseek(num_ranks: int, size: int, directory: Path) -> tuple[RunConfig, str]:
    """Return `benchmarks/published/deepseek_v3.yaml`, in two stages, experts divided by 8 at
    most."""
    tree = yaml.safe_load((PUBLISHED / "deepseek_v3.yaml").read_text())
    if size < 1000:
        tree["model"]["config"] |= {"num_hidden_layers": 4, "n_routed_experts": 64}
    tree["batch"] |= {"global_batch_size": 8 * num_ranks, "micro_batch_size": 1}
    tree["parallel"] = {"pipeline": 2, "expert": min(8, num_ranks // 2)}
    return RunConfig.model_validate(tree), "zero1"


def _measure_trials(config: RunConfig, engine: str, num_ranks: int) -> Cost:
    plan = resolve_run(config, num_ranks, engine).plan
    hf_config = load_hf_config(config.model)
    meter = Meter()
    chosen, problems = cached_model_plan(config, hf_config, plan)
    assert chosen is not None, problems
    return meter.read()


def measure_trials(num_ranks: int, size: int, directory: Path) -> Cost:
    config, engine = _llama(num_ranks, size, directory)
    _elsewhere(lambda: _measure_trials(config, engine, num_ranks))  # as one rank of a host does
    return _measure_trials(config, engine, num_ranks)


def measure_moe_first(num_ranks: int, size: int, directory: Path) -> Cost:
    config, engine = _deepseek(num_ranks, size, directory)
    with mock.patch.dict(os.environ, {"BIGTRAIN_CACHE": str(directory / "empty")}):
        return _measure_trials(config, engine, num_ranks)


def measure_moe(num_ranks: int, size: int, directory: Path) -> Cost:
    config, engine = _deepseek(num_ranks, size, directory)
    _elsewhere(lambda: _measure_trials(config, engine, num_ranks))
    return _measure_trials(config, engine, num_ranks)
