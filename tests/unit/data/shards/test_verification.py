"""Checksums of all files, divided among processes."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from bigtrain.data.shards.verification import ListedFile, damage, listed_files, share_of
from bigtrain.settings.run_config import DataSection, SourceSection
from tests.support.datasets import write_dataset


def test_every_file_of_every_source_is_compared(tmp_path: Path) -> None:
    paths = [write_dataset(tmp_path / name, vocab_size=50, seed=n) for n, name in enumerate("ab")]
    sources = tuple(SourceSection(path=str(path), weight=1) for path in paths)
    files = listed_files(DataSection(sources=sources))
    assert {file.path for file in files} == {
        path / f"{split}_00000.{suffix}"
        for path in paths
        for split in ("train", "held_out")
        for suffix in ("bin", "idx", "blocks")
    }
    assert damage(files) == []
    for file in files:
        content = file.path.read_bytes()
        file.path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        (text,) = damage(files)
        assert text.startswith(f"{file.path}: its checksum is ")
        assert text.endswith(f", the manifest lists {file.xxh3}")
        file.path.unlink()
        assert damage(files) == [f"{file.path} cannot be read: No such file or directory"]
        file.path.write_bytes(content)


@given(sizes=st.lists(st.integers(0, 10**12), max_size=40), size=st.integers(1, 16))
def test_shares_are_all_files_once_and_about_equal(sizes: list[int], size: int) -> None:
    files = [ListedFile(Path(str(number)), bytes_, "") for number, bytes_ in enumerate(sizes)]
    shares = [share_of(files, rank, size) for rank in range(size)]
    assert sorted(str(file.path) for share in shares for file in share) == sorted(
        str(file.path) for file in files
    )
    loads = [sum(file.num_bytes for file in share) for share in shares]
    assert max(loads) - min(loads) <= max(sizes, default=0)
