"""`bigtrain tokenizer` and `bigtrain tokenize`, from text to batches and back."""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

from bigtrain.cli import main
from bigtrain.data.shards.dataset import open_dataset
from bigtrain.data.shards.manifest import Manifest
from bigtrain.data.tokenize_job.request import Workers
from bigtrain.data.tokenize_job.unit_builder import is_held_out
from bigtrain.data.tokenize_job.worker_pool import Round, Update, run_round
from bigtrain.data.tokenizers.tokenizer import load_tokenizer
from bigtrain.errors import DataError
from bigtrain.system.arguments import size
from bigtrain.system.machine import Machine
from tests.support.datasets import files_of, open_verified
from tests.support.worlds import ROOT


def documents(count: int, seed: int = 0) -> list[str]:
    words = "alpha beta gamma delta <|endoftext|> épsilon 東京 return self\n    if for".split(" ")
    chooser = random.Random(seed)
    return [" ".join(chooser.choices(words, k=chooser.randint(0, 80))) for _ in range(count)]


def write_lines(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return path


def bigtrain(*arguments: str | Path | int | float) -> int:
    return main([str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def texts() -> list[str]:
    return documents(400)


@pytest.fixture(scope="module")
def corpus(texts: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_lines(tmp_path_factory.mktemp("corpus") / "docs.jsonl", texts)


@pytest.fixture(scope="module")
def tokenizer(corpus: Path) -> Path:
    output = corpus.parent / "tokenizer"
    assert bigtrain("tokenizer", "--input", corpus, "--vocab-size", 310, "--output", output) == 0
    return output


@pytest.fixture(scope="module")
def dataset(corpus: Path, tokenizer: Path) -> Path:
    output = corpus.parent / "shards"
    command = ["tokenize", "--input", corpus, "--tokenizer", tokenizer, "--output", output]
    assert bigtrain(*command, "--held-out", 0.1, "--shard-size", 20000) == 0
    return output


def test_every_document_comes_back_in_order(dataset: Path, texts: list[str]) -> None:
    opened = open_verified(dataset)
    tokenizer = load_tokenizer(str(opened.tokenizer_path))
    assert tokenizer.hash == opened.manifest.tokenizer.hash
    for split, wanted in (("train", False), ("held_out", True)):
        shards = opened.shards(split)  # type: ignore[arg-type]
        tokens = [shard.document(i) for shard in shards for i in range(shard.num_documents)]
        expected = [text for text in texts if is_held_out(text.encode(), 0.1) == wanted]
        assert [tokenizer.decode(document[:-1]) for document in tokens] == expected
        assert all(document[-1] == 0 for document in tokens if len(document))
        assert not any((document[:-1] == 0).any() for document in tokens)
    records = opened.manifest.shards("train")
    assert len(records) > 2
    assert sum(record.text_bytes for record in records) == sum(
        len(text.encode()) for text in texts if not is_held_out(text.encode(), 0.1)
    )


def test_manifest_says_where_it_comes_from(dataset: Path, corpus: Path, tokenizer: Path) -> None:
    manifest = Manifest.model_validate_json((dataset / "manifest.json").read_bytes())
    (source,) = manifest.sources
    assert (source.path, source.bytes) == (str(corpus), corpus.stat().st_size)
    assert manifest.tokenizer.name == str(tokenizer)
    assert manifest.tokenizer.vocab_size == 310
    assert manifest.token_dtype == "uint16"
    for record in manifest.shards("train"):
        content = (dataset / f"{record.name}.bin").read_bytes()
        assert record.xxh3 == xxhash.xxh3_64_hexdigest(content)


def test_workers_do_not_change_a_byte(
    dataset: Path, corpus: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bigtrain.data.documents.formats.BATCH_BYTES", 1500)
    output = corpus.parent / "two"
    command = ["tokenize", "--input", corpus, "--tokenizer", tokenizer, "--output", output]
    options = ["--held-out", 0.1, "--shard-size", 20000, "--workers", 2]
    assert bigtrain(*command, *options) == 0
    assert files_of(output) == files_of(dataset)


def test_processes_are_started_where_there_is_enough_to_do(
    dataset: Path, corpus: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bigtrain.data.tokenize_job.request.BYTES_PER_PROCESS", 20000)
    monkeypatch.setattr(
        "bigtrain.data.tokenize_job.job.this_machine", lambda _: Machine(2, 8 << 30)
    )
    rounds: list[Workers] = []

    def spy(work: Round, workers: Workers, update: Update) -> None:
        rounds.append(workers)
        run_round(work, Workers(1, 1, started=False), update)

    monkeypatch.setattr("bigtrain.data.tokenize_job.job.run_round", spy)
    output = corpus.parent / "automatic"
    command = ["tokenize", "--input", corpus, "--tokenizer", tokenizer, "--output", output]
    assert bigtrain(*command, "--held-out", 0.1, "--shard-size", 20000) == 0
    assert files_of(output) == files_of(dataset)
    assert rounds == [Workers(2, 1)]


def test_a_finished_dataset_is_left_alone(
    dataset: Path, corpus: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = files_of(dataset)
    command = ["tokenize", "--input", corpus, "--tokenizer", tokenizer, "--output", dataset]
    assert bigtrain(*command, "--held-out", 0.1, "--shard-size", 20000, "--workers", 2) == 0
    assert "is already the finished dataset of this input; nothing to do" in capsys.readouterr().out
    assert bigtrain(*command) == 2
    error = capsys.readouterr().err
    assert "contains a dataset of other options; nothing was written -> choose another" in error
    assert files_of(dataset) == before


def test_held_out_documents_stay_when_text_is_appended(
    dataset: Path, texts: list[str], tokenizer: Path, tmp_path: Path
) -> None:
    more = write_lines(tmp_path / "more.jsonl", texts + documents(200, seed=1) + texts)
    command = ["tokenize", "--input", more, "--tokenizer", tokenizer, "--output", tmp_path / "d"]
    assert bigtrain(*command, "--held-out", 0.1) == 0

    def documents_of(path: Path, split: Any = "held_out") -> set[bytes]:
        shards = open_dataset(path).shards(split)
        return {shard.document(i).tobytes() for shard in shards for i in range(shard.num_documents)}

    held_out = documents_of(tmp_path / "d")
    assert documents_of(dataset) < held_out
    assert not held_out & documents_of(tmp_path / "d", "train")
    assert 0.05 < len(held_out) / 600 < 0.15


def test_summary(dataset: Path, corpus: Path, tokenizer: Path, tmp_path: Path, capsys) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "a.txt").write_bytes("good ä".encode())
    (tmp_path / "b.txt").write_bytes(b"\xff")
    command = ["tokenize", "--input", tmp_path, "--tokenizer", tokenizer]
    assert bigtrain(*command, "--output", tmp_path / "out", "--skip-bad") == 0
    out = capsys.readouterr().out
    assert "train:    1 documents," in out
    assert "7 bytes of text" in out
    assert "skipped:  1 unreadable documents" in out


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"text": "fine"}\n{"text": "broken', "in.jsonl:2: not JSON"),
        (b'{"text": "fine"}\n{"body": "x"}', "in.jsonl:2: no key 'text'; keys here: body"),
        (b'{"text": ""}\n', "the input has no training tokens: 1 training documents"),
        (b"", "the input has no training tokens: 0 training documents"),
    ],
)
def test_refused_input_leaves_nothing(
    tokenizer: Path,
    tmp_path: Path,
    content: bytes,
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "in.jsonl").write_bytes(content)
    command = ["tokenize", "--input", tmp_path / "in.jsonl", "--tokenizer", tokenizer]
    assert bigtrain(*command, "--output", tmp_path / "a" / "b") == 2
    error = capsys.readouterr().err
    assert error.startswith("bigtrain tokenize: ")
    assert message in error
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_outputs_are_never_overwritten(
    corpus: Path, tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine").write_text("keep")
    for output in (tmp_path, tmp_path / "mine"):
        command = ["tokenize", "--input", corpus, "--tokenizer", tokenizer, "--output", output]
        assert bigtrain(*command) == 2
        assert "exists and is not" in capsys.readouterr().err
        command = ["tokenizer", "--input", corpus, "--vocab-size", 300, "--output", output]
        assert bigtrain(*command) == 2
        assert "exists and is not" in capsys.readouterr().err
    assert files_of(tmp_path) == {"mine": b"keep"}


def test_a_killed_process_leaves_no_dataset_and_no_workers(tokenizer: Path, tmp_path: Path) -> None:
    """Killed between two batches, which a pipe as input makes a certain moment."""
    os.mkfifo(tmp_path / "in.jsonl")
    arguments = ["tokenize", "--input", tmp_path / "in.jsonl", "--tokenizer", tokenizer]
    arguments += ["--output", tmp_path / "d", "--workers", "2"]
    process = subprocess.Popen(
        [sys.executable, "-m", "bigtrain.cli", *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stderr=subprocess.PIPE,
    )
    line = json.dumps({"text": "word " * 1000}) + "\n"
    with process, (tmp_path / "in.jsonl").open("w") as pipe:
        # More than the batches that may be under way: the process waits for results, then reads.
        pipe.write(line * 1500)
        process.kill()
        # Workers hold the other end of stderr: it ends only when they have ended as well.
        process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL
    assert sorted(path.name for path in tmp_path.iterdir()) == ["d", "in.jsonl"]
    with pytest.raises(DataError, match=r"has no manifest\.json -> run the same `bigtrain token"):
        open_dataset(tmp_path / "d")


def test_fewer_tokens_than_asked_for_are_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in.txt").write_text("aa aa")
    command = ["tokenizer", "--input", tmp_path / "in.txt", "--vocab-size", 300]
    assert bigtrain(*command, "--output", tmp_path / "t") == 0
    assert "the text yields 259 tokens, fewer than --vocab-size 300" in capsys.readouterr().err


def test_training_twice_gives_the_same_tokenizer(corpus: Path, tokenizer: Path) -> None:
    output = corpus.parent / "again"
    assert bigtrain("tokenizer", "--input", corpus, "--vocab-size", 310, "--output", output) == 0
    assert files_of(output) == files_of(tokenizer)


def test_documents_longer_than_a_shard(tokenizer: Path, tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", ["a", "", "b " * 50, "c", "d " * 3, ""])
    command = ["tokenize", "--input", source, "--tokenizer", tokenizer, "--shard-size", 20]
    assert bigtrain(*command, "--output", tmp_path / "d") == 0
    opened = open_verified(tmp_path / "d")
    assert sum(shard.num_documents for shard in opened.shards("train")) == 6
    tokens = np.concatenate([shard.tokens for shard in opened.shards("train")])
    assert int((tokens == 0).sum()) == 4
    assert len(opened.shards("train")) > 3


def test_shards_together_are_the_one_shard(
    corpus: Path, tokenizer: Path, texts: list[str], tmp_path: Path
) -> None:
    """What one shard holds, several hold one after another; so one is as Megatron writes it."""
    command = ["tokenize", "--input", corpus, "--tokenizer", tokenizer]
    assert bigtrain(*command, "--output", tmp_path / "one") == 0
    assert bigtrain(*command, "--output", tmp_path / "many", "--shard-size", "7KB") == 0
    # More workers than units: these encode in the threads of one process.
    assert bigtrain(*command, "--output", tmp_path / "three", "--workers", 3) == 0
    assert files_of(tmp_path / "three") == files_of(tmp_path / "one")
    (one,) = open_dataset(tmp_path / "one").shards("train")
    many = open_dataset(tmp_path / "many").shards("train")
    assert len(many) > 9
    assert one.bin_path.read_bytes() == b"".join(shard.bin_path.read_bytes() for shard in many)
    assert one.sequence_lengths.tolist() == [n for s in many for n in s.sequence_lengths.tolist()]
    assert one.num_documents == len(texts) == sum(shard.num_documents for shard in many)


def test_bad_documents_up_to_a_share(
    tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good, bad = '{"text": "good"}\n', '{"text": 5}\n{"x": "\\ud800"}\n'
    (tmp_path / "a.jsonl").write_text(good * 40 + bad + good * 40)
    (tmp_path / "b.jsonl").write_text(bad + good * 18)
    output = tmp_path / "d"
    command = ["tokenize", "--input", tmp_path, "--tokenizer", tokenizer, "--output", output]
    command += ["--shard-size", 200]
    assert bigtrain(*command, "--max-bad-fraction", 0.035) == 2
    error = capsys.readouterr().err
    assert "4 of 102 documents cannot be read, more than --max-bad-fraction 0.035 allows" in error
    assert f"the first is {tmp_path}/a.jsonl:41: 'text' is not text but int; all are in" in error
    # Allowing more does not read anything again.
    before = {path.stat().st_ino for path in output.glob(".units/*.bin")}
    assert bigtrain(*command, "--max-bad-fraction", 0.04) == 0
    assert {path.stat().st_ino for path in output.glob("train-*.bin")} <= before
    listed = [json.loads(line) for line in (output / "errors.jsonl").read_text().splitlines()]
    assert [(Path(entry["file"]).name, entry["line"]) for entry in listed] == [
        ("a.jsonl", 41),
        ("a.jsonl", 42),
        ("b.jsonl", 1),
        ("b.jsonl", 2),
    ]
    assert listed[3]["reason"].startswith("no key 'text'; keys here: x -> name its key: ")
    assert open_dataset(output).manifest.skipped_documents == 4


def test_a_bad_document_in_the_middle_ends_it_at_once(
    tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "good"}\n' * 40 + "{}\n")
    command = ["tokenize", "--input", tmp_path, "--tokenizer", tokenizer, "--shard-size", 100]
    assert bigtrain(*command, "--output", tmp_path / "d") == 2
    assert "a.jsonl:41: no key 'text'; keys here: none" in capsys.readouterr().err
    command = ["tokenizer", "--input", tmp_path / "a.jsonl", "--vocab-size", 300]
    assert bigtrain(*command, "--output", tmp_path / "t") == 2
    assert not (tmp_path / "t").exists()


def test_a_finished_dataset_costs_no_library(dataset: Path, corpus: Path, tokenizer: Path) -> None:
    command = ["tokenize", "--input", corpus, "--tokenizer", tokenizer, "--output", dataset]
    words = [*map(str, command), "--held-out", "0.1", "--shard-size", "20000"]
    code = (
        "import sys; from bigtrain.cli import main\n"
        f"assert main({words!r}) == 0\n"
        "heavy = 'torch transformers tokenizers datasets pyarrow gigatoken huggingface_hub'\n"
        "print([name for name in heavy.split() if name in sys.modules])\n"
        "import bigtrain.data.loading.dataset_checks, bigtrain.data.tokenize_job.job\n"
        "print({'torch', 'transformers', 'datasets', 'pyarrow'} & {*sys.modules})"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    assert "nothing to do" in result.stdout
    assert result.stdout.splitlines()[-2:] == ["[]", "set()"]


def test_the_same_tokenizer_elsewhere(dataset: Path, corpus: Path, tokenizer: Path) -> None:
    """Other files, but it encodes the same: the dataset is still finished."""
    other = corpus.parent / "same tokenizer"
    load_tokenizer(str(tokenizer)).save(other)
    tree = json.loads((other / "tokenizer.json").read_text())
    (other / "tokenizer.json").write_text(json.dumps(tree, indent=3))
    command = ["tokenize", "--input", corpus, "--tokenizer", other, "--output", dataset]
    assert bigtrain(*command, "--held-out", 0.1, "--shard-size", 20000) == 0


def test_verify(dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(dataset, copy)
    assert bigtrain("verify", dataset, copy) == 0
    assert capsys.readouterr().out.count("all checksums match") == 2
    content = bytearray((copy / "train-00001.bin").read_bytes())
    content[40] ^= 1
    (copy / "train-00001.bin").write_bytes(content)
    (copy / "held_out-00000.idx").unlink()
    assert bigtrain("verify", copy) == 2
    error = capsys.readouterr().err
    assert f"{copy}/train-00001.bin is corrupt: its checksum differs from the manifest's" in error
    assert f"{copy}/held_out-00000.idx cannot be read: No such file or directory" in error
    assert len(error.splitlines()) == 2


def test_an_output_among_the_inputs(
    tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What the command writes, errors.jsonl among it, is not read by the next start."""
    write_lines(tmp_path / "a.jsonl", ["some text", "more"])
    with (tmp_path / "a.jsonl").open("a") as file:
        file.write("{\n")
    command = ["tokenize", "--input", tmp_path, "--tokenizer", tokenizer, "--skip-bad"]
    for _ in range(2):
        assert bigtrain(*command, "--output", tmp_path / "d") == 0
    assert "nothing to do" in capsys.readouterr().out
    (source,) = open_dataset(tmp_path / "d").manifest.sources
    assert source.path == str(tmp_path / "a.jsonl")
    inside = ["tokenize", "--input", tmp_path / "d", "--tokenizer", tokenizer]
    assert bigtrain(*inside, "--output", tmp_path / "d") == 2
    assert f"every input is inside --output {tmp_path}/d" in capsys.readouterr().err


def test_nothing_but_bad_documents(
    tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Their list stays, and the same command can be started again."""
    (tmp_path / "a.jsonl").write_text("{\n[]\n")
    command = ["tokenize", "--input", tmp_path / "a.jsonl", "--tokenizer", tokenizer]
    for _ in range(2):
        assert bigtrain(*command, "--output", tmp_path / "d", "--skip-bad") == 2
        assert "the input has no training tokens" in capsys.readouterr().err
    assert len((tmp_path / "d" / "errors.jsonl").read_text().splitlines()) == 2


@pytest.mark.parametrize(
    ("text", "expected"),
    [("512", 512), ("1KB", 1000), ("1kib", 1024), ("1.5MiB", 3 << 19), ("2GiB", 2 << 30)],
)
def test_sizes(text: str, expected: int) -> None:
    assert size(text) == expected


@pytest.mark.parametrize("text", ["", "-1", "0", "1XB", "MiB", "1 2"])
def test_no_sizes(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        size(text)
