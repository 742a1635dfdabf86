"""Units: together they are the input, whatever its format, and few change when it does."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pyarrow
import pytest
import xxhash
import zstandard
from pyarrow import parquet

from bigtrain.data.documents.dataset_readers import HubDatasetReader
from bigtrain.data.documents.discovery import find_sources
from bigtrain.data.documents.files import Selection, Source
from bigtrain.data.documents.formats import part_reader
from bigtrain.data.documents.reader import ReadOptions, RejectedDocuments
from bigtrain.data.shards.manifest import SourceRecord
from bigtrain.data.tokenize_job.workspace import Unit, plan_key, plan_units
from bigtrain.errors import DataError

TEXTS = [f"Text number {n}: äöü, 東京\n" * (n % 7) for n in range(700)]

COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "gz": gzip.compress,
    "zst": zstandard.ZstdCompressor().compress,
    "xz": lzma.compress,
    "bz2": bz2.compress,
}


def as_lines() -> bytes:
    return "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()


def as_csv() -> bytes:
    file = io.StringIO(newline="")
    writer = csv.writer(file)
    writer.writerows([["n", "text"], *([n, text] for n, text in enumerate(TEXTS))])
    return file.getvalue().encode()


def batches() -> list[pyarrow.RecordBatch]:
    return pyarrow.table({"n": range(len(TEXTS)), "text": TEXTS}).to_batches(max_chunksize=60)


def write_table(path: Path, kind: str) -> None:
    if kind == "parquet":
        table = pyarrow.Table.from_batches(batches())
        parquet.write_table(table, path, row_group_size=60, compression="none")
        return
    new = pyarrow.ipc.new_file if kind == "arrow" else pyarrow.ipc.new_stream
    with new(path, batches()[0].schema) as writer:
        for batch in batches():
            writer.write_batch(batch)


def write_input(folder: Path, kind: str) -> Path:
    import datasets

    name, _, compression = kind.partition(".")
    if name in ("parquet", "arrow", "arrow_stream"):
        path = folder / f"in.{name.removesuffix('_stream')}"
        write_table(path, name)
        return path
    if name in ("saved", "hub"):
        path = folder / name
        path.mkdir()
        if name == "saved":
            datasets.Dataset.from_dict({"text": TEXTS}).save_to_disk(path)
            return path
        for shard in range(3):
            table = pyarrow.table({"text": TEXTS[shard * 234 : shard * 234 + 234]})
            parquet.write_table(table, path / f"{shard}.parquet")
        return path
    content = as_lines() if name == "jsonl" else as_csv()
    path = folder / f"in.{kind}"
    path.write_bytes(COMPRESS[compression](content) if compression else content)
    return path


def sources_of(path: Path, kind: str) -> list[Source]:
    if kind == "hub":  # `datasets` opens a folder as it does a name on the hub
        return [Source(HubDatasetReader, SourceRecord(path=str(path)))]
    return find_sources(Selection([str(path)]))


OPTIONS = ReadOptions(Selection([]))


def read(units: list[Unit], options: ReadOptions = OPTIONS) -> list[str]:
    documents: list[str] = []
    for unit in units:
        for part in unit.parts:
            reader = part_reader(part, options, RejectedDocuments(False))
            done = [0]
            for block in reader.blocks():
                documents += [content.decode() for content in block]
                done.append(reader.bytes_done)
            assert done == sorted(done)
            known = part.source.format_name == "parquet" or (
                part.source.format_name == "saved_dataset" and part.end is not None
            )
            if known and len(done) > 2:
                assert 0 < done[-1] < part.num_bytes
            assert reader.bytes_done == part.num_bytes
    return documents


@pytest.mark.parametrize(
    ("kind", "units"),
    [
        ("jsonl", 9),
        *((f"jsonl.{suffix}", 1) for suffix in COMPRESS),
        ("csv", 1),
        *((f"csv.{suffix}", 1) for suffix in COMPRESS),
        ("parquet", 12),
        ("arrow", 9),
        ("arrow_stream", 1),
        ("saved", 9),
        ("hub", 3),
    ],
)
def test_units_are_the_input(
    kind: str, units: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    path = write_input(tmp_path, kind)
    (source,) = sources_of(path, kind)
    size = source.record.bytes or 0
    whole = plan_units([source], OPTIONS, max(1, size), [])
    assert len(whole) == (3 if kind == "hub" else 1)
    assert read(whole) == TEXTS
    plan = plan_units([source], OPTIONS, -(-size // 9) or 1, [])
    assert len(plan) == units
    assert read(plan) == TEXTS
    assert len({unit.key for unit in plan}) == units
    if size:
        assert sum(unit.num_bytes for unit in plan) == size


@pytest.mark.parametrize("kind", ["parquet", "arrow", "arrow_stream"])
def test_corrupt_tables(kind: str, tmp_path: Path) -> None:
    path = write_input(tmp_path, kind)
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(DataError, match=r"in\.\w+ cannot be read: "):
        read(plan_units(sources_of(path, kind), OPTIONS, 1 << 30, []))
    if kind != "arrow_stream":
        with pytest.raises(DataError, match=r"in\.\w+ cannot be read: "):
            plan_units(sources_of(path, kind), OPTIONS, 1000, [])


def many_files(folder: Path, sizes: list[int]) -> list[Source]:
    folder.mkdir(exist_ok=True)
    for number, size in enumerate(sizes):
        path = folder / f"{number:04}.txt"
        if not path.exists() or path.stat().st_size != size:
            path.write_bytes(b"x" * size)
    return find_sources(Selection([str(folder)]))


def test_small_files_share_units(tmp_path: Path) -> None:
    sizes = [50 + 37 * n % 90 for n in range(400)]
    units = plan_units(many_files(tmp_path / "in", sizes), OPTIONS, 1000, [])
    assert [part.source.path for unit in units for part in unit.parts] == [
        str(tmp_path / "in" / f"{n:04}.txt") for n in range(400)
    ]
    assert all(unit.num_bytes <= 1000 for unit in units)
    assert len(units) < 400 / 5


def test_a_change_of_a_small_file_stays_local(tmp_path: Path) -> None:
    """The ends of units are drawn from the paths, so fixed paths in several folders are taken: in a
    single one, such as that of the test, the mean lies between 1.9 and 6."""
    template = many_files(tmp_path / "in", [1])[0]

    def keys(folder: int, sizes: list[int]) -> set[str]:
        records = [
            replace(template.record, path=f"/in{folder}/{n:04}.txt", bytes=size)
            for n, size in enumerate(sizes)
        ]
        sources = [replace(template, record=record) for record in records]
        return {unit.key for unit in plan_units(sources, OPTIONS, 1000, [])}

    num_changed = []
    for folder in range(6):
        sizes = [50 + 37 * n % 90 for n in range(400)]
        before = keys(folder, sizes)
        for number in range(0, 200, 40):
            sizes[number] += 111
            after = keys(folder, sizes)
            num_changed.append(len(after - before))
            before = after
    assert min(num_changed) >= 1
    assert sum(num_changed) / len(num_changed) < 3.5


def test_what_a_key_depends_on(tmp_path: Path) -> None:
    sources = many_files(tmp_path / "in", [10, 20])

    def key(sources: list[Source] = sources, options: ReadOptions = OPTIONS, *rest: object) -> str:
        return plan_key(plan_units(sources, options, 1000, rest))

    same = key(many_files(tmp_path / "in", [10, 20]))
    assert same == key()
    others = {
        key(sources, OPTIONS, "another tokenizer"),
        key(sources, replace(OPTIONS, text_keys=("a", "b"))),
        key(sources, replace(OPTIONS, max_document_bytes=9)),
        key(list(reversed(sources))),
        key(many_files(tmp_path / "in", [10, 21])),
    }
    (tmp_path / "in" / "0000.txt").touch()
    others.add(key(find_sources(Selection([str(tmp_path / "in")]))))
    assert len(others - {same}) == 6


def test_checksums_of_ranges_are_those_of_the_file(tmp_path: Path) -> None:
    path = write_input(tmp_path, "jsonl")
    content = path.read_bytes()
    for unit in plan_units(sources_of(path, "jsonl"), OPTIONS, 5000, []):
        (part,) = unit.parts
        reader = part_reader(part, OPTIONS, RejectedDocuments(False))
        for _ in reader.blocks():
            pass
        assert reader.checksum() == xxhash.xxh3_64_hexdigest(content[part.begin : part.end])


def test_a_file_that_changes_before_it_is_read(tmp_path: Path) -> None:
    for kind in ("jsonl", "jsonl.gz", "parquet", "arrow"):
        path = write_input(tmp_path, kind)
        plan = plan_units(sources_of(path, kind), OPTIONS, 1 << 30, [])
        path.write_bytes(path.read_bytes() + b"\n")
        with pytest.raises(DataError, match=r"was changed while it was read -> start again"):
            read(plan)


def test_a_small_file_takes_a_few_hundred_bytes(tmp_path: Path) -> None:
    """Its name, size, times and place in the plan: there may be millions."""
    count = 800
    for number in range(count):
        (tmp_path / f"{number:06d}.txt").write_text("text")
    selection = Selection([str(tmp_path)])
    plan_units(find_sources(selection), ReadOptions(selection), 1 << 20, [])  # what is kept once
    tracemalloc.start()
    units = plan_units(find_sources(selection), ReadOptions(selection), 1 << 20, [])
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert sum(len(unit.parts) for unit in units) == count
    assert held / count < 700
