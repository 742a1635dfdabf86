"""`bigtrain tokenize` killed at any moment and started again, alone and beside others.

Every kill is SIGKILL of a real process and its workers; every comparison is of all bytes of the
dataset with those of a run that nobody disturbed.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import zstandard

from bigtrain.data.shards.manifest import read_manifest
from bigtrain.data.tokenize_job.workspace import Workspace
from bigtrain.data.tokenizers.encoders import GigatokenEncoder, ReferenceEncoder
from bigtrain.data.tokenizers.training import train_tokenizer
from bigtrain.system.leases import Owner
from tests.support.commands import Commands, Ended
from tests.support.datasets import files_of, open_verified
from tests.support.tiers import FULL

RECORDS = "[0-9a-f]" * 32 + ".json"
WORDS = "alpha beta gamma delta épsilon 東京 return self\n    if for".split(" ")


def write_lines(path: Path, count: int, seed: int) -> Path:
    chooser = random.Random(seed)
    with path.open("w", encoding="utf-8") as file:
        for _ in range(count):
            text = " ".join(chooser.choices(WORDS, k=chooser.randint(0, 60)))
            file.write(json.dumps({"text": text}) + "\n")
    return path


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Commands]:
    with Commands(tmp_path_factory.mktemp("logs")) as commands:
        yield commands


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of inputs of two kinds with bad documents, and a tokenizer."""
    home = tmp_path_factory.mktemp("resume")
    (home / "in").mkdir()
    write_lines(home / "in" / "a.jsonl", 300, 1)
    with (home / "in" / "a.jsonl").open("a") as file:
        file.write("{broken\n")
    write_lines(home / "in" / "b.jsonl", 80, 2)
    for number in range(3):
        (home / "in" / f"c{number}.txt").write_text(f"some text {number}")
    (home / "in" / "d.txt").write_bytes(b"good\nb\xffd")
    train_tokenizer([[" ".join(WORDS * 9)]], 300).save(home / "tokenizer")
    return home


def tokenize(home: Path, output: Path, *more: object) -> list[object]:
    words = ["tokenize", "--input", home / "in", "--tokenizer", home / "tokenizer"]
    words += ["--output", output, "--held-out", 0.2, "--encoder", "reference"]
    return [*words, "--shard-size", 30_000, "--skip-bad", *more]


@pytest.fixture(scope="module")
def steps(home: Path, commands: Commands) -> list[str]:
    """What a run does to the file system, but for what the first one on a machine remembers."""
    assert commands.run(*tokenize(home, home / "first")).code == 0
    ended = commands.run(*tokenize(home, home / "unbroken"), kill_before_step=0)
    assert ended.code == 0, ended.output
    return ended.steps


@pytest.fixture(scope="module")
def claimed(steps: list[str]) -> int:
    """The step that gives the first shard its name: a unit is claimed and not recorded."""
    return next(n for n, step in enumerate(steps, 1) if step.endswith(".train.bin"))


@pytest.fixture(scope="module")
def unbroken(home: Path, steps: list[str]) -> Path:
    output = home / "unbroken"
    assert len(open_verified(output).shards("train")) >= 3
    assert not list(output.glob(".units*"))
    return output


def require_whole(ended: Ended, output: Path, unbroken: Path) -> None:
    assert ended.code == 0, ended.output
    assert files_of(output) == files_of(unbroken)


@pytest.mark.slow
def test_killed_before_every_second_step(
    home: Path, commands: Commands, steps: list[str], unbroken: Path, tmp_path: Path
) -> None:
    """Every change of a directory and every sync, of all units and of the assembly."""
    assert {step.split()[0] for step in steps} == {
        "mkdir", "link", "rename", "fsync", "unlink", "rmdir"
    }  # fmt: skip
    for number in range(1, len(steps) + 1, 2):
        output = tmp_path / str(number)
        killed = commands.run(*tokenize(home, output), kill_before_step=number)
        assert killed.code == -9, (number, killed.output)
        work = output / ".units"
        records = [json.loads(p.read_bytes()) for p in work.glob(RECORDS)]
        kept = {
            file.stat().st_ino
            for record in records
            if (file := work / f"{record['splits']['train']['name']}.bin").exists()
        }
        require_whole(commands.run(*tokenize(home, output)), output, unbroken)
        # What was finished was not done again: the files are the same, only renamed.
        assert kept <= {path.stat().st_ino for path in output.glob("train-*.bin")}


@pytest.mark.slow
def test_killed_after_the_last_unit(
    home: Path, commands: Commands, steps: list[str], unbroken: Path, tmp_path: Path
) -> None:
    """The next start only makes the dataset, and counts no work of the first as its own."""
    words = tokenize(home, tmp_path / "d")
    journal = next(n for n, step in enumerate(steps, 1) if "assembly.json" in step)
    assert commands.run(*words, kill_before_step=journal).code == -9
    ended = commands.run(*words)
    require_whole(ended, tmp_path / "d", unbroken)
    assert ", 0 tokens here, 0 tokens/s" in ended.output


def kill_at_change(commands: Commands, number: int, output: Path, words: list[object]) -> Ended:
    """Kill a command after the listing of its work folder has changed `number` times."""
    running = commands.start(*words)
    seen: set[str] = set()
    changes = 0
    while changes < number and not running.has_ended():
        now = {path.name for path in output.glob(".units/*")}
        changes += now != seen
        seen = now
    return running.kill()


@pytest.mark.slow
def test_killed_with_all_workers(
    home: Path, commands: Commands, unbroken: Path, tmp_path: Path
) -> None:
    words = tokenize(home, tmp_path / "d", "--workers", 2)
    for number in (3, 12) if FULL else (12,):
        kill_at_change(commands, number, tmp_path / "d", words)
    last = words if FULL else tokenize(home, tmp_path / "d")
    require_whole(commands.run(*last), tmp_path / "d", unbroken)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_killed_at_ten_random_moments(
    home: Path, commands: Commands, unbroken: Path, tmp_path: Path
) -> None:
    chooser = random.Random(2)
    began_at = time.monotonic()
    first = commands.run(*tokenize(home, tmp_path / "first", "--workers", 2))
    whole_s = time.monotonic() - began_at
    require_whole(first, tmp_path / "first", unbroken)
    interrupted = 0
    for number in range(10):
        output = tmp_path / str(number)
        words = tokenize(home, output, "--workers", 2)
        running = commands.start(*words)
        time.sleep(chooser.uniform(0, whole_s))
        killed = running.kill()
        interrupted += killed.code == -9
        require_whole(commands.run(*words), output, unbroken)
    assert interrupted >= 5


def test_ranks_side_by_side(home: Path, commands: Commands, unbroken: Path, tmp_path: Path) -> None:
    words = tokenize(home, tmp_path / "d")
    environments = [{"SLURM_PROCID": str(rank), "SLURM_NTASKS": "3"} for rank in range(3)]
    ranks = [commands.start(*words, environment=environment) for environment in environments]
    for ended in [rank.wait() for rank in ranks]:
        require_whole(ended, tmp_path / "d", unbroken)


def test_what_a_dead_rank_claimed_is_taken_over(
    home: Path, commands: Commands, claimed: int, unbroken: Path, tmp_path: Path
) -> None:
    output = tmp_path / "d"
    ranks = {
        rank: commands.start(
            *tokenize(home, output, "--rank", rank, "--world-size", 2),
            kill_before_step=claimed if rank == 0 else None,
        )
        for rank in (0, 1)
    }
    assert ranks[0].wait().code == -9
    require_whole(ranks[1].wait(), output, unbroken)


def test_a_mended_input_redoes_its_own_units(
    home: Path, commands: Commands, tmp_path: Path
) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    for name, seed in (("a", 1), ("b", 2), ("c", 3)):
        write_lines(folder / f"{name}.jsonl", 100, seed)
    good = (folder / "b.jsonl").read_bytes()
    (folder / "b.jsonl").write_bytes(good + b"{broken\n")
    output = tmp_path / "d"
    words = ["tokenize", "--input", folder, "--tokenizer", home / "tokenizer", "--output", output]
    words += ["--encoder", "reference", "--shard-size", 10_000]
    ended = commands.run(*words)
    assert ended.code == 2
    assert "b.jsonl:101: not JSON" in ended.output
    assert "finished parts are kept for the next start" in ended.output
    before = {path.stat().st_ino for path in output.glob(".units/*.train.bin")}
    assert len(before) >= 2
    (folder / "b.jsonl").write_bytes(good)
    assert commands.run(*words).code == 0
    after = {path.stat().st_ino for path in output.glob("train-*.bin")}
    # Of b itself nothing, of a everything: c was not begun.
    assert len(before & after) >= 2
    assert len(after - before) >= 4
    again = tmp_path / "again"
    assert commands.run(*words, "--output", again).code == 0
    assert files_of(again) == files_of(output)


def test_a_plan_that_changes_in_the_middle_of_the_assembly(
    home: Path, commands: Commands, tmp_path: Path
) -> None:
    """The shards that have their names already go back, and get those of the new plan."""
    folder = tmp_path / "in"
    folder.mkdir()
    for name, seed in (("a", 1), ("b", 2), ("c", 3)):
        write_lines(folder / f"{name}.jsonl", 100, seed)
    output = tmp_path / "d"
    words = ["tokenize", "--input", folder, "--tokenizer", home / "tokenizer", "--output", output]
    words += ["--encoder", "reference", "--shard-size", 15_000]
    steps = commands.run(*words, kill_before_step=0).steps
    moves = [n for n, step in enumerate(steps, 1) if step.endswith("train-00002.idx")]
    other = ["--output", tmp_path / "e"]
    assert commands.run(*words, *other, kill_before_step=moves[0]).code == -9
    assert len(list((tmp_path / "e").glob("train-*"))) == 7
    (folder / "a.jsonl").unlink()
    assert commands.run(*words, *other).code == 0
    assert commands.run(*words, "--output", tmp_path / "f").code == 0
    assert files_of(tmp_path / "e") == files_of(tmp_path / "f")


def test_units_of_an_encoder_found_wrong_are_done_again(
    home: Path, commands: Commands, unbroken: Path, tmp_path: Path
) -> None:
    """Also those of an earlier start, once any process has noted it."""
    output = tmp_path / "d"
    words = [*tokenize(home, output), "--encoder", "gigatoken"]
    steps = commands.run(*words, "--output", tmp_path / "first", kill_before_step=0).steps
    last = max(n for n, step in enumerate(steps, 1) if step.endswith(".train.bin"))
    assert commands.run(*words, kill_before_step=last).code == -9
    done = made(output.glob(".units/*.train.bin"))
    assert len(done) >= 2
    engine = GigatokenEncoder.engine()
    Workspace(output, "other").reject(engine, "it was wrong elsewhere")
    ended = commands.run(*words)
    assert ended.code == 0, ended.output
    assert f"encoder {engine} is not used: it was wrong elsewhere" in ended.output
    contents_by_file, expected = files_of(output), files_of(unbroken)
    assert {n: c for n, c in contents_by_file.items() if n != "manifest.json"} == {
        n: c for n, c in expected.items() if n != "manifest.json"
    }
    tokenizer = read_manifest(output).tokenizer
    assert tokenizer.engine == ReferenceEncoder.engine()
    assert tokenizer.engine_reason == f"not {engine}: it was wrong elsewhere"
    assert not done & made(output.glob("train-*.bin"))


def made(paths: Iterable[Path]) -> set[tuple[int, int]]:
    """Which files these are, whatever their names: an inode alone is used again for another."""
    return {(path.stat().st_ino, path.stat().st_mtime_ns) for path in paths}


def test_foreign_files_in_an_unfinished_output(
    home: Path, commands: Commands, tmp_path: Path
) -> None:
    output = tmp_path / "d"
    assert commands.run(*tokenize(home, output), kill_before_step=30).code == -9
    (output / "mine").write_text("keep")
    before = files_of(output)
    ended = commands.run(*tokenize(home, output))
    assert ended.code == 2
    assert f"{output}/mine is not part of the unfinished dataset in {output}; not" in ended.output
    assert files_of(output) == before


def test_a_live_claim_is_waited_for(
    home: Path, commands: Commands, claimed: int, unbroken: Path, tmp_path: Path
) -> None:
    """One of a process on another machine, of which nothing is known but the claim."""
    output = tmp_path / "d"
    assert commands.run(*tokenize(home, output), kill_before_step=claimed).code == -9
    (claim,) = output.glob(".units/*.claim")
    owner = Owner(**json.loads(claim.read_bytes()))
    claim.write_text(json.dumps({**owner.__dict__, "machine": "elsewhere"}))
    running = commands.start(*tokenize(home, output))
    while len(list(output.glob(f".units/{RECORDS}"))) < 2 and not running.has_ended():
        pass
    assert not running.has_ended()
    claim.unlink()
    require_whole(running.wait(), output, unbroken)


@pytest.mark.parametrize(
    "name",
    [
        *("a.jsonl", "a.csv"),
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("a.jsonl.zst", "a.txt")),
    ],
)
def test_a_huge_line_is_never_held(
    home: Path, commands: Commands, tmp_path: Path, name: str
) -> None:
    """60 MB where 1 MiB is allowed: the peak is that of a small file."""
    if name == "a.csv":
        head, tail = b'text,n\nword,1\n"', b'",2\n'
    else:
        head, tail = b'{"text": "word"}\n{"text": "', b'"}\n{"text": "word"}\n'
    peaks = []
    for size_mb in (2, 60):
        folder = tmp_path / str(size_mb)
        folder.mkdir()
        (folder / "b.txt").write_text("word")
        with (folder / name).open("wb") as raw, ExitStack() as stack:
            file = raw
            if name.endswith(".zst"):
                file = stack.enter_context(zstandard.ZstdCompressor(1).stream_writer(raw))
            file.write(head)
            for _ in range(size_mb):
                file.write(b"x" * 1_000_000)
            file.write(tail)
        words = ["tokenize", "--input", folder, "--tokenizer", home / "tokenizer", "--skip-bad"]
        words += ["--suffix", ".txt", "--suffix", ".csv", "--suffix", ".jsonl"]
        words += ["--output", folder / "d", "--max-document-bytes", "1MiB"]
        ended = commands.run(*words, "--encoder", "reference")
        if name == "a.csv":
            assert ended.code == 2
            assert "a.csv:3 cannot be read as csv: the line is larger than" in ended.output
        else:
            assert ended.code == 0, ended.output
            (error,) = (folder / "d" / "errors.jsonl").read_text().splitlines()
            assert json.loads(error).get("line") == (None if name == "a.txt" else 2)
            assert "is larger than --max-document-bytes 1,048,576" in error
        peaks.append(ended.peak_bytes)
    assert peaks[1] - peaks[0] < 20e6


def test_what_cannot_be_written_is_said(home: Path, commands: Commands, tmp_path: Path) -> None:
    """In the system's own words, without a traceback."""
    output = tmp_path / "d"
    running = commands.run(*tokenize(home, output), kill_before_step=30)
    assert running.code == -9
    (output / ".units" / "assembly.json").mkdir()
    ended = commands.run(*tokenize(home, output))
    assert ended.code == 2
    assert f"{output} cannot be written: [Errno 21] Is a directory" in ended.output
    assert "Traceback" not in ended.output
