"""What a rank pays as the run grows to thousands of ranks, by the real functions; simulated ranks.

save      divide a checkpoint of 1,000 parameters under ZeRO 3 and write this rank's file
commit    list all ranks' files in the manifest, on the main rank
resume    find and read what this rank needs, on as many ranks as wrote it
half      the same on half as many ranks
groups    make the process groups of tensor 8 x pipeline 8 x data
data      open a dataset of 24 shards a rank, on every rank of a host but the first
metrics   take up a metrics.jsonl of 250 lines a rank
hostfile  check a hostfile of a host for every 8 ranks
watchdog  read where all ranks are, from a real store
trials    take up what the trials of proxy models found, of Llama 405B

Collectives go through torch's "fake" backend, which moves nothing: what they cost on a network is
not in here. Each point is a process of its own; its figures are seconds of processor time, memory
above what the imports take, and bytes written or read. The exponent is that of ranks to which they
grow, fitted over all points: 0 does not grow, 1 doubles with the ranks.
`--output FILE` writes JSON, `--picture FILE` an SVG.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.support.pictures import log_log_picture
from bigtrain.commands.hostfile import _check as check_hostfile
from bigtrain.data.samples.identity import data_hash
from bigtrain.data.samples.token_stream import split_stream
from bigtrain.data.shards.dataset import open_dataset
from bigtrain.data.shards.manifest import (
    Manifest,
    OptionsRecord,
    ShardRecord,
    TokenizerRecord,
    write_manifest,
)
from bigtrain.engine.checkpoint.division import divide
from bigtrain.engine.checkpoint.fragments import Fragment
from bigtrain.engine.checkpoint.io import TensorSnapshot, read_tensors
from bigtrain.engine.checkpoint.layout import Layout, merge, parse_layout
from bigtrain.engine.checkpoint.tensor_files import Identity, Listing, file_name, write_parts
from bigtrain.engine.startup.mesh import Mesh, open_mesh
from bigtrain.models.configuration import load_hf_config
from bigtrain.models.equivalence.once import choose_once
from bigtrain.models.parallel.sharding import Shard
from bigtrain.run.checkpointing import checkpoints
from bigtrain.run.health.hang_report import Position
from bigtrain.run.health.status_store import Place, StatusStore
from bigtrain.run.reporting.metrics_lines import cut_lines
from bigtrain.settings.resolve import resolve_run
from bigtrain.settings.run_config import DataSection, RunConfig
from bigtrain.settings.topology import Topology
from bigtrain.system.world import World

RANKS = (8, 64, 512, 4096)
IDENTITY = Identity("0" * 16, 1)
SIDE = 512
"""Of every parameter, a square matrix: at 4,096 ranks a part has 64 elements of it."""
SHARDS_OF_RANK, LINES_OF_RANK, RANKS_OF_HOST = 24, 250, 8

Cost = dict[str, float]


@contextmanager
def world(rank: int, num_ranks: int) -> Iterator[None]:
    """A process group of `num_ranks`, of which this process is the only one."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=num_ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


class Meter:
    """Processor seconds, and memory above what there was, of the block."""

    def __init__(self) -> None:
        self._memory, self._begun = _peak_mib(), time.process_time()

    def read(self, **more: float) -> Cost:
        seconds = time.process_time() - self._begun
        return {"seconds": seconds, "mib": _peak_mib() - self._memory, **more}


def _peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def zero3_fragments(rank: int, num_ranks: int, num_parameters: int) -> list[Fragment]:
    """What a rank holds of square matrices and two states each, as ZeRO 3 cuts them."""
    count = SIDE * SIDE
    capacity = -(-count // num_ranks)
    start = min(capacity * rank, count)
    size = min(capacity, count - start)
    return [
        Fragment(
            f"model.layers.{number // 10}.part{number % 10}.weight",
            Shard((SIDE, SIDE), primary=True),
            start,
            {kind: torch.zeros(size) for kind in ("master", "exp_avg", "exp_avg_sq")},
            capacity,
        )
        for number in range(num_parameters)
    ]


def _save(rank: int, num_ranks: int, num_parameters: int, directory: Path) -> tuple[Any, ...]:
    """Writes a rank's file; its entry in the manifest, and its rows of the layout."""
    with world(rank, num_ranks):
        mesh = open_mesh(Topology(num_ranks, num_ranks), rank)
        fragments = zero3_fragments(rank, num_ranks, num_parameters)
        snapshot = TensorSnapshot(fragments, {}, mesh)
        rows = divide(fragments, {}, mesh).rows
    parts = [chunk.part() for chunk in snapshot._chunks]
    return write_parts(directory / file_name(rank), IDENTITY, rank, parts), rows


def measure_save(num_ranks: int, size: int, directory: Path) -> Cost:
    meter = Meter()
    (num_bytes, _), _ = _save(num_ranks - 1, num_ranks, size, directory)
    return meter.read(bytes=num_bytes)


def measure_commit(num_ranks: int, size: int, directory: Path) -> Cost:
    partial = checkpoints.partial_path(directory, 1, "0" * 8)
    checkpoints.prepare(partial)
    (partial / checkpoints.STATE).write_text(json.dumps({"run": IDENTITY.run, "step": 1}))
    entry, rows = _save(0, num_ranks, size, partial / checkpoints.TENSORS)
    first = partial / checkpoints.TENSORS / file_name(0)
    for rank in range(1, num_ranks):  # of the others only sizes are looked at
        first.with_name(file_name(rank)).hardlink_to(first)
    meter = Meter()
    layout = json.dumps(merge(rows).to_json(), separators=(",", ":"))
    (partial / checkpoints.LAYOUT).write_text(layout)
    files = {file_name(rank): entry for rank in range(num_ranks)}
    final = checkpoints.commit(partial, files, IDENTITY)
    reason = checkpoints.corruption(final)
    assert reason is None, reason
    small = sum(path.stat().st_size for path in final.iterdir() if path.is_file())
    return meter.read(bytes=small)


def _measure_resume(num_ranks: int, readers: int, size: int, directory: Path) -> Cost:
    rank = readers - 1
    headers, rows = {file_name(number): "" for number in range(num_ranks)}, []
    # The files that are looked into, and that of rank 0, which describes what is cut evenly.
    written = {0, *range(rank * num_ranks // readers, num_ranks)}
    for number in sorted(written):
        (_, headers[file_name(number)]), own = _save(number, num_ranks, size, directory)
        rows += own
    text = json.dumps(merge(rows).to_json()).encode()
    with world(rank, readers):
        fragments = zero3_fragments(rank, readers, size)
        meter = Meter()
        layout: Layout = parse_layout(text)
        read_tensors(directory, fragments, {}, Listing(headers, IDENTITY, layout))
        return meter.read(bytes=len(text))


def measure_resume(num_ranks: int, size: int, directory: Path) -> Cost:
    return _measure_resume(num_ranks, num_ranks, size, directory)


def measure_half(num_ranks: int, size: int, directory: Path) -> Cost:
    return _measure_resume(num_ranks, num_ranks // 2, size, directory)


def measure_groups(num_ranks: int, size: int, directory: Path) -> Cost:
    tensor = min(8, num_ranks)
    pipeline = min(8, num_ranks // tensor)
    topology = Topology(num_ranks, num_ranks // tensor // pipeline, tensor, pipeline)
    with world(num_ranks // 2, num_ranks):
        meter = Meter()
        mesh: Mesh = open_mesh(topology, num_ranks // 2)
        assert mesh.rank == num_ranks // 2
        return meter.read()


def measure_data(num_ranks: int, size: int, directory: Path) -> Cost:
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
    num_bytes = (directory / "manifest.json").stat().st_size
    del shards, manifest
    # In a process of its own: the first rank of a host makes the table that the others map.
    program = (
        "import sys\nfrom pathlib import Path\n"
        "from bigtrain.data.shards.shard_table import read_table\n"
        "read_table(Path(sys.argv[1]))\n"
    )
    subprocess.run([sys.executable, "-c", program, str(directory)], check=True)
    meter = Meter()
    dataset = open_dataset(directory, "listed")
    split_stream(dataset, "train")
    data_hash(DataSection(path=str(directory)), [dataset])
    return meter.read(bytes=num_bytes)


def measure_metrics(num_ranks: int, size: int, directory: Path) -> Cost:
    path, last = directory / "metrics.jsonl", LINES_OF_RANK * num_ranks
    line = '{{"step": {0}, "samples": {1}, "loss": 2.5, "padding": "' + "x" * 160 + '"}}\n'
    with path.open("w") as file:
        file.writelines(line.format(step, step * 4) for step in range(1, last + 1))
    meter = Meter()
    cut_lines(path, last - 10, (last - 10) * 4)
    return meter.read(bytes=path.stat().st_size)


def measure_hostfile(num_ranks: int, size: int, directory: Path) -> Cost:
    hosts = max(1, num_ranks // RANKS_OF_HOST)
    path = directory / "hostfile"
    lines = [f"127.{n >> 16}.{n >> 8 & 255}.{n & 255} slots=8\n" for n in range(1, hosts + 1)]
    path.write_text("".join(lines))
    meter = Meter()
    assert check_hostfile(path) == 0
    return meter.read()


def measure_watchdog(num_ranks: int, size: int, directory: Path) -> Cost:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    place = Place("127.0.0.1", server.port, "token")
    place.create_entries(num_ranks)
    board = StatusStore(place, World(0, num_ranks, 0))
    told = dist.PrefixStore(f"watchdog/{place.token}", server)
    texts = [
        Position(rank, f"host{rank // RANKS_OF_HOST}", 1, 10, "forward pass", None, None).to_json()
        for rank in range(num_ranks)
    ]
    told.multi_set([f"answer/{rank}" for rank in range(num_ranks)], texts)
    meter = Meter()
    found = board.answers(seconds=30)
    assert found is not None
    assert len(found) == num_ranks
    return meter.read(bytes=float(sum(map(len, texts))))


def measure_trials(num_ranks: int, size: int, directory: Path) -> Cost:
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
    config = RunConfig.model_validate(tree)
    plan = resolve_run(config, num_ranks, "zero1").plan
    hf_config = load_hf_config(config.model)
    choose_once(config, hf_config, plan)  # as one rank of a host does
    meter = Meter()
    chosen, problems = choose_once(config, hf_config, plan)
    assert chosen is not None, problems
    return meter.read()


PARTS: dict[str, Callable[[int, int, Path], Cost]] = {
    name.removeprefix("measure_"): function
    for name, function in list(globals().items())
    if name.startswith("measure_")
}


def measure(part: str, num_ranks: int, size: int) -> Cost:
    """The cost of one part, in a process of its own."""
    command = [sys.executable, __file__, "--one", part, str(num_ranks), str(size)]
    with tempfile.TemporaryDirectory() as directory:
        finished = subprocess.run(
            [*command, directory], capture_output=True, text=True, check=False
        )
    if finished.returncode:
        raise SystemExit(f"scale.py: {part} of {num_ranks} ranks:\n{finished.stderr[-2000:]}")
    cost: Cost = json.loads(finished.stdout.splitlines()[-1])
    return cost


def exponent(points: dict[int, float]) -> float:
    """Of the power of ranks that fits the points best; least squares of the logarithms."""
    pairs = [(math.log(ranks), math.log(max(cost, 1e-9))) for ranks, cost in points.items()]
    mean_x, mean_y = (sum(values) / len(pairs) for values in zip(*pairs, strict=True))
    above = sum((x - mean_x) * (y - mean_y) for x, y in pairs)
    return above / sum((x - mean_x) ** 2 for x, _ in pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--ranks", nargs="+", type=int, default=list(RANKS))
    parser.add_argument("--parameters", type=int, default=1000)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--one", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        part, num_ranks, size, directory = args.one
        print(json.dumps(PARTS[part](int(num_ranks), int(size), Path(directory))))
        return
    costs: dict[str, dict[int, Cost]] = {}
    for part in args.parts:
        costs[part] = {ranks: measure(part, ranks, args.parameters) for ranks in args.ranks}
        seconds = {ranks: cost["seconds"] for ranks, cost in costs[part].items()}
        memory = {ranks: cost["mib"] for ranks, cost in costs[part].items()}
        slope = f"ranks^{exponent(seconds):+.2f}" if len(seconds) > 1 else ""
        shown = "  ".join(f"{ranks}: {cost:.3f} s" for ranks, cost in seconds.items())
        print(f"{part:9} {shown}  {slope}  memory up to {max(memory.values()):.0f} MiB", flush=True)
    if args.output:
        args.output.write_text(json.dumps(costs, indent=1) + "\n")
    if args.picture:
        lines = {
            part: {ranks: cost["seconds"] for ranks, cost in points.items()}
            for part, points in costs.items()
        }
        title = "Processor seconds of one rank by number of ranks"
        args.picture.write_text(log_log_picture(title, lines))


if __name__ == "__main__":
    main()
