"""Checksums of all files, divided among processes."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from bigtrain.data.shards.verification import ListedShards, rank_slice
from bigtrain.settings.run_config import DataSection, SourceSection
from tests.support.datasets import write_dataset
from tests.support.tiers import examples


def test_every_file_of_every_source_is_compared(tmp_path: Path) -> None:
    paths = [write_dataset(tmp_path / name, vocab_size=50, seed=n) for n, name in enumerate("ab")]
    sources = tuple(SourceSection(path=str(path), weight=1) for path in paths)
    shards = ListedShards(DataSection(sources=sources))
    numbers = range(len(shards.num_bytes))
    files = [file for number in numbers for file in shards.files(number)]
    assert len(files) == shards.num_files
    assert {path for path, _ in files} == {
        path / f"{split}_00000.{suffix}"
        for path in paths
        for split in ("train", "held_out")
        for suffix in ("bin", "idx", "blocks")
    }
    assert [*map(shards.problems, numbers)] == [[], [], [], []]
    for number in numbers:
        for path, listed in shards.files(number):
            content = path.read_bytes()
            path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
            (text,) = shards.problems(number)
            assert text.startswith(f"{path} is corrupt: its checksum ")
            assert text.endswith(f", the manifest lists {listed}")
            path.unlink()
            assert shards.problems(number) == [f"{path} cannot be read: No such file or directory"]
            path.write_bytes(content)


@settings(max_examples=examples(100))
@given(sizes=st.lists(st.integers(0, 10**12), max_size=40), size=st.integers(1, 16))
def test_shares_are_all_files_once_and_about_equal(sizes: list[int], size: int) -> None:
    shares = [rank_slice(sizes, rank, size) for rank in range(size)]
    assert sorted(number for share in shares for number in share) == list(range(len(sizes)))
    loads = [sum(sizes[number] for number in share) for share in shares]
    assert max(loads) - min(loads) <= max(sizes, default=0)
