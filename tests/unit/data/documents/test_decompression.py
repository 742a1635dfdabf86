"""Parquet and arrow compressed as files: the same tokens, nothing left behind, clear errors."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
import re
import resource
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow
import pytest
import xxhash
import zstandard
from pyarrow import parquet

from bigtrain.cli import main
from bigtrain.data.documents.discovery import find_sources
from bigtrain.data.documents.files import Selection
from bigtrain.data.documents.formats import DocumentReader
from bigtrain.data.documents.reader import ReadOptions, RejectedDocuments
from bigtrain.data.tokenizers.training import train_tokenizer
from bigtrain.errors import DataError
from tests.support.commands import Commands
from tests.support.datasets import files_of

TEXTS = [f"alpha beta {number * number} épsilon 東京\n" * (number % 7) for number in range(600)]

COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "gz": gzip.compress,
    "zst": zstandard.ZstdCompressor().compress,
    "xz": lzma.compress,
    "bz2": bz2.compress,
}


def content(kind: str, texts: list[str] = TEXTS) -> bytes:
    """A file of several row groups or record batches; `stream`: arrow's kind without an index."""
    table = pyarrow.table({"text": texts})
    sink = pyarrow.BufferOutputStream()
    if kind == "parquet":
        parquet.write_table(table, sink, row_group_size=150)
    else:
        new = pyarrow.ipc.new_stream if kind == "stream" else pyarrow.ipc.new_file
        with new(sink, table.schema) as writer:
            writer.write_table(table, max_chunksize=150)
    return bytes(sink.getvalue())


def suffix(kind: str) -> str:
    return "arrow" if kind == "stream" else kind


def test_zstd_with_a_long_window(tmp_path: Path) -> None:
    """``zstd --long=31``; Arrow accepts windows of 128 MiB."""
    lines = [json.dumps({"text": text or "x"}).encode() + b"\n" for text in TEXTS]
    long = zstandard.ZstdCompressionParameters(window_log=31, enable_ldm=True)
    frames = b""
    for part in (lines[:300], lines[300:]):
        compressor = zstandard.ZstdCompressor(compression_params=long).compressobj()
        frames += b"".join(map(compressor.compress, part)) + compressor.flush()
    assert zstandard.get_frame_parameters(frames).window_size == 1 << 31
    path = tmp_path / "a.jsonl.zst"

    def read() -> list[str]:
        options = ReadOptions(Selection((str(path),)))
        reader = DocumentReader(find_sources(options.selection), options, RejectedDocuments(False))
        return [text for batch in reader.text_batches() for text in batch]

    path.write_bytes(frames)
    assert read() == [text or "x" for text in TEXTS]
    for wrong in (frames[:-9], frames[:40], frames[:-20] + b"\0" * 20):
        path.write_bytes(wrong)
        with pytest.raises(DataError, match=r"cannot be read: it.* zstd frame"):
            read()


def packed(folder: Path, kind: str, compression: str, texts: list[str] = TEXTS) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / f"a.{suffix(kind)}.{compression}"
    path.write_bytes(COMPRESS[compression](content(kind, texts)))
    return path


def reader(path: Path, scratch: Path) -> DocumentReader:
    selection = Selection([str(path)])
    options = ReadOptions(selection, scratch=scratch)
    return DocumentReader(find_sources(selection), options, RejectedDocuments(False))


def nameless() -> list[str]:
    """Files without a name that this process holds open or mapped."""
    held = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")
            if os.path.islink(f"/proc/self/fd/{fd}")]  # fmt: skip
    held += Path("/proc/self/maps").read_text().splitlines()
    return [name for name in held if name.endswith("(deleted)")]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("unpacking") / "tokenizer"
    train_tokenizer([TEXTS], 300).save(directory)
    return directory


def words(tokenizer: Path, source: Path, output: Path, *more: object) -> list[str]:
    command = ["tokenize", "--input", source, "--tokenizer", tokenizer, "--output", output]
    return [str(word) for word in (*command, "--encoder", "reference", "--suffix", ".parquet",
                                   "--suffix", ".arrow", *more)]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "compression"),
    [("parquet", "gz"), ("parquet", "zst"), ("arrow", "xz"), ("stream", "bz2")],
)
def test_the_same_tokens_as_of_the_plain_file(
    tokenizer: Path, tmp_path: Path, kind: str, compression: str
) -> None:
    plain = tmp_path / f"a.{suffix(kind)}"
    plain.write_bytes(content(kind))
    assert main(words(tokenizer, plain, tmp_path / "plain")) == 0
    source = packed(tmp_path / "in", kind, compression)
    # A folder is searched for compressed files of the suffix as well.
    assert main(words(tokenizer, source.parent, tmp_path / "d")) == 0
    contents_by_file, expected = files_of(tmp_path / "d"), files_of(tmp_path / "plain")
    manifest = json.loads(contents_by_file.pop("manifest.json"))
    assert contents_by_file == {name: b for name, b in expected.items() if name != "manifest.json"}
    (record,) = manifest["sources"]
    # As of other compressed files: one part, with the checksum of the file as it lies there.
    checksum = xxhash.xxh3_64_hexdigest(source.read_bytes())
    assert record["parts"] == [{"begin": 0, "xxh3": checksum}]


@pytest.mark.parametrize("kind", ["parquet", "arrow", "stream"])
def test_progress_and_what_is_left(tmp_path: Path, kind: str) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    path = packed(tmp_path / "in", kind, "gz")
    documents = reader(path, scratch)
    before = nameless()
    done, texts = [], []
    for block in documents.blocks():
        done.append(documents.bytes_done)
        texts += [text.decode() for text in block]
        assert not list(scratch.iterdir())
        assert any(str(scratch) in name for name in nameless())
    assert texts == TEXTS
    assert done == sorted(done)
    assert 0 < done[1] < done[-1] < documents.bytes_done == path.stat().st_size
    assert nameless() == before


@pytest.mark.parametrize("compression", COMPRESS)
@pytest.mark.parametrize(
    ("kind", "damage"),
    [*(("parquet", damage) for damage in ("cut", "garbage", "other content", "empty")),
     ("arrow", "other content")],
)  # fmt: skip
def test_a_corrupt_file_is_named(tmp_path: Path, kind: str, damage: str, compression: str) -> None:
    path = packed(tmp_path / "in", kind, compression)
    whole = path.read_bytes()
    path.write_bytes(
        {
            "cut": whole[: len(whole) // 2],
            "garbage": b"garbage" + whole,
            "other content": COMPRESS[compression](b"no table" * 99),
            "empty": b"",
        }[damage]
    )
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    with pytest.raises(DataError, match=rf"a\.{kind}\.{compression} cannot be read: \S"):
        list(reader(path, scratch).text_batches())
    assert not list(scratch.iterdir())


def test_a_disk_without_room(tmp_path: Path) -> None:
    path = packed(tmp_path / "in", "parquet", "gz")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000, hard))
    try:
        with pytest.raises(DataError) as caught:
            list(reader(path, tmp_path).text_batches())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert str(caught.value) == (
        f"{path} cannot be decompressed into {tmp_path}, which parquet requires before it is read: "
        "File too large -> make room there for the largest such file, once for each of --workers, "
        "or decompress it yourself"
    )
    assert [entry.name for entry in tmp_path.iterdir()] == ["in"]


def test_a_work_folder_that_is_removed_meanwhile(
    tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """While the first of two files of one unit is read."""
    path = packed(tmp_path / "in", "parquet", "gz")
    pipe = tmp_path / "in" / "pipe.txt"
    os.mkfifo(pipe)
    output = tmp_path / "d"

    def write() -> None:
        with pipe.open("w") as file:  # once the other side is open
            shutil.rmtree(output / ".units")
            file.write("alpha")

    writer = threading.Thread(target=write)
    writer.start()
    assert main(words(tokenizer, pipe, output, "--input", path)) == 2
    writer.join()
    assert f"{output}/.units was deleted during the job, by another" in capsys.readouterr().err


def test_a_tokenizer_of_compressed_tables(tmp_path: Path) -> None:
    path = packed(tmp_path / "in", "arrow", "zst")
    output = tmp_path / "new" / "tokenizer"
    arguments = ["tokenizer", "--input", path, "--vocab-size", 300, "--output", output]
    assert main([str(argument) for argument in arguments]) == 0
    assert {entry.name for entry in tmp_path.iterdir()} == {"in", "new"}


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Commands]:
    with Commands(tmp_path_factory.mktemp("logs")) as commands:
        yield commands


@pytest.mark.slow
def test_killed_while_a_file_is_decompressed(
    tokenizer: Path, commands: Commands, tmp_path: Path
) -> None:
    """The first sync of all is that of the decompressed file, which is whole then."""
    (temporary := tmp_path / "tmp").mkdir()
    environment = {"TMPDIR": str(temporary)}
    source = packed(tmp_path / "in", "parquet", "gz")
    for name in ("first", "unbroken"):  # the first on a machine takes more steps: it remembers
        output = tmp_path / name
        ended = commands.run(*words(tokenizer, source, output), kill_before_step=0)
        assert ended.code == 0, ended.output
    synced = next(n for n, step in enumerate(ended.steps, 1) if step.startswith("fsync "))
    arguments = words(tokenizer, source, tmp_path / "d")
    killed = commands.run(*arguments, kill_before_step=synced, environment=environment)
    assert killed.code == -9
    left = {path.name.split(".", 1)[1] for path in (tmp_path / "d" / ".units").iterdir()}
    # Who began it, and the shard that it writes: no file of the input's content.
    assert len(left) == 2
    assert all(re.fullmatch(r"claim|\w{12}\.train\.bin\.partial", name) for name in left)
    assert not list(temporary.iterdir())
    assert commands.run(*arguments, environment=environment).code == 0
    assert files_of(tmp_path / "d") == files_of(output)
