"""Inputs whose times changed: what they hold decides what is done again."""

from __future__ import annotations

import gzip
import json
import os
import random
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from bigtrain.cli import main
from bigtrain.data.tokenizers.training import train_tokenizer
from tests.support.datasets import files_of

WORDS = "alpha beta gamma delta épsilon 東京 return self\n    if for".split(" ")
KINDS = ("jsonl", "parquet", "csv", "tsv", "txt", "parquet.gz")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("contents") / "tokenizer"
    train_tokenizer([[" ".join(WORDS * 9)]], 300).save(directory)
    return directory


def texts(seed: int) -> list[str]:
    chooser = random.Random(seed)
    return [" ".join(chooser.choices(WORDS[:4], k=40)) for _ in range(100)]


def write(path: Path, documents: list[str]) -> Path:
    if path.suffix == ".gz":
        plain_file = write(path.with_suffix(""), documents)
        path.write_bytes(gzip.compress(plain_file.read_bytes(), 0))  # the words stay readable
        plain_file.unlink()
    elif path.suffix == ".parquet":
        table = pyarrow.table({"text": documents})
        plain: Any = {"compression": None, "use_dictionary": False, "write_statistics": False}
        parquet.write_table(table, path, row_group_size=20, **plain)
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    elif path.suffix in (".csv", ".tsv"):
        path.write_text("".join(f"{text}\n" for text in ["text", *documents]))
    else:
        path.write_text(" ".join(documents))
    return path


def touch(path: Path) -> None:
    os.utime(path, ns=(1, 1))


def change_in_secret(path: Path) -> None:
    """Another content of the same size, and the old time of modification."""
    status = path.stat()
    content = path.read_bytes()
    at = content.rindex(b"alpha")
    path.write_bytes(content[:at] + b"ALPHA" + content[at + 5 :])
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (status.st_size, status.st_mtime_ns)


def bigtrain(folder: Path, tokenizer: Path, output: Path) -> int:
    words = ["tokenize", "--input", folder, "--tokenizer", tokenizer, "--output", output]
    words += ["--encoder", "reference", "--shard-size", 8000]
    words += [word for kind in KINDS for word in ("--suffix", f".{kind}")]
    return main([str(word) for word in words])


def finished(tokenizer: Path, tmp_path: Path, kind: str) -> tuple[Path, Path]:
    """An input file, alone in its folder, and the dataset that was made of it."""
    folder, output = tmp_path / "in", tmp_path / "d"
    folder.mkdir()
    source = write(folder / f"a.{kind}", texts(1))
    assert bigtrain(folder, tokenizer, output) == 0
    return source, output


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "txt", "parquet.gz"])
def test_a_finished_dataset_of_touched_inputs(
    tokenizer: Path, tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    source, output = finished(tokenizer, tmp_path, kind)
    folder, before = source.parent, files_of(output)
    touch(source)
    assert bigtrain(folder, tokenizer, output) == 0
    assert "the times of input files changed; their content still matches" in caplog.text
    after = files_of(output)
    assert {name for name in after if after[name] != before.get(name)} == {"manifest.json"}
    # The new times are noted: the next start reads nothing.
    caplog.clear()
    assert bigtrain(folder, tokenizer, output) == 0
    assert not caplog.text
    # As an unbroken run of the touched file makes it.
    assert bigtrain(folder, tokenizer, tmp_path / "fresh") == 0
    assert files_of(tmp_path / "fresh") == after


@pytest.mark.parametrize("kind", ["parquet", "txt", "parquet.gz"])
def test_another_content_of_the_same_size_and_time(
    tokenizer: Path, tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    source, output = finished(tokenizer, tmp_path, kind)
    folder, before = source.parent, files_of(output)
    change_in_secret(source)
    assert bigtrain(folder, tokenizer, output) == 2
    assert "contains a dataset of other input files; nothing was written" in capsys.readouterr().err
    assert files_of(output) == before


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_an_unfinished_dataset_redoes_what_holds_something_else(
    tokenizer: Path, tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Of two touched files one is as it was; of the other the last part is not."""
    folder, output = tmp_path / "in", tmp_path / "d"
    folder.mkdir()
    same, other = (write(folder / f"{n}.{kind}", texts(seed)) for n, seed in (("a", 1), ("b", 2)))
    broken = folder / "c.jsonl"
    broken.write_text("{broken\n")
    assert bigtrain(folder, tokenizer, output) == 2
    before = {path.stat().st_ino for path in output.glob(".units/*.train.bin")}
    assert len(before) >= 6
    touch(same)
    change_in_secret(other)
    broken.write_text('{"text": "fixed"}\n')
    caplog.clear()
    assert bigtrain(folder, tokenizer, output) == 0
    assert f"{len(before)} finished parts are compared with their current content" in caplog.text
    after = {path.stat().st_ino for path in output.glob("train-*.bin")}
    assert len(before & after) == len(before) - 1
    assert bigtrain(folder, tokenizer, tmp_path / "fresh") == 0
    assert files_of(tmp_path / "fresh") == files_of(output)


def test_documents_that_end_elsewhere_are_another_content(tokenizer: Path, tmp_path: Path) -> None:
    """The same text and size of a table, divided otherwise among its rows."""
    folder, output = tmp_path / "in", tmp_path / "d"
    folder.mkdir()
    write(folder / "a.parquet", ["alpha beta", "gamma", "delta delta"])
    size = (folder / "a.parquet").stat().st_size
    assert bigtrain(folder, tokenizer, output) == 0
    write(folder / "a.parquet", ["alpha", " betagamma", "delta delta"])
    assert (folder / "a.parquet").stat().st_size == size
    assert bigtrain(folder, tokenizer, output) == 2


def test_bad_rows_of_csv_are_no_other_content(
    tokenizer: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What was hashed while rows were left out is found again by reading the bytes alone."""
    folder, output = tmp_path / "in", tmp_path / "d"
    folder.mkdir()
    source = write(folder / "a.csv", texts(1) * 3)
    source.write_bytes(source.read_bytes() + b"\xff\n")
    (folder / "b.txt.gz").write_bytes(b"corrupt")
    words = ["tokenize", "--input", folder, "--tokenizer", tokenizer, "--output", output]
    words += ["--suffix", ".csv", "--suffix", ".txt", "--shard-size", 8000, "--skip-bad"]
    arguments = [str(word) for word in words]
    assert main(arguments) == 2
    (shard,) = output.glob(".units/*.train.bin")
    inode = shard.stat().st_ino
    touch(source)
    write(folder / "b.txt.gz", ["fixed"])
    assert main(arguments) == 0
    assert "1 finished parts are compared with their current content" in caplog.text
    assert (output / "train-00000.bin").stat().st_ino == inode
    assert len((output / "errors.jsonl").read_text().splitlines()) == 1
