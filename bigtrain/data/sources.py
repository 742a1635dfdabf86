"""Documents from files and datasets, one after another, in memory bounded by one document.

What an input is, by its name without .gz, .zst, .xz or .bz2: ``.jsonl`` and ``.ndjson`` one JSON
object per line, ``.parquet`` a column, ``.csv``, ``.json`` and ``.arrow`` through `datasets`, any
other file one document as it stands (bytes decoded as UTF-8, nothing stripped or translated).
"""

from __future__ import annotations

import bz2
import glob
import gzip
import json
import lzma
import os
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from itertools import takewhile
from pathlib import Path
from typing import IO, Any, Literal

import orjson

from bigtrain.data.manifest import SourceRecord
from bigtrain.data.zstd import open_zstd
from bigtrain.errors import DataError

DEFAULT_SUFFIXES = (".txt", ".jsonl", ".parquet")
COMPRESSIONS: dict[str, Callable[[IO[bytes]], Any]] = {
    ".gz": lambda raw: gzip.GzipFile(fileobj=raw),
    ".zst": open_zstd,
    ".xz": lzma.LZMAFile,
    ".bz2": bz2.BZ2File,
}
DECOMPRESSION_ERRORS = (EOFError, OSError, zlib.error, lzma.LZMAError)
LINE_SUFFIXES = (".jsonl", ".ndjson")
DATASET_BUILDERS = {".csv": "csv", ".json": "json", ".arrow": "arrow"}
ROWS_PER_READ = 256
BLOCK_BYTES = 1 << 20
HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
HUB_TIMEOUT_S = 10.0

Kind = Literal["text", "jsonl", "parquet", "dataset_file", "saved_dataset", "hub_dataset"]


@dataclass(frozen=True)
class Source:
    """One input that exists: how to read it, and what the manifest says of it."""

    kind: Kind
    record: SourceRecord

    @property
    def path(self) -> str:
        return self.record.path


@dataclass(frozen=True)
class Selection:
    """Which inputs to take: `suffixes` and `exclude` choose among the files of folders."""

    inputs: Sequence[str]
    suffixes: Sequence[str] = DEFAULT_SUFFIXES
    exclude: Sequence[str] = ()
    dataset_config: str | None = None
    dataset_split: str = "train"


class Rejects:
    """What happens to a document that cannot be read: an error, or it is counted and skipped."""

    def __init__(self, skip: bool) -> None:
        self.skip = skip
        self.count = 0

    def add(self, where: str, why: str) -> None:
        """Raises DataError with place and reason unless bad documents are to be skipped."""
        if not self.skip:
            raise DataError(
                f"{where}: {why} -> correct it, or leave such documents out: --skip-bad"
            )
        self.count += 1


class DocumentReader:
    """Iterates over the documents of `sources`, in order. `bytes_done` follows for progress."""

    def __init__(
        self, sources: Sequence[Source], selection: Selection, text_key: str, rejects: Rejects
    ) -> None:
        self.sources = sources
        self.selection = selection
        self.text_key = text_key
        self.rejects = rejects
        self.bytes_done = 0
        sizes = [source.record.bytes for source in sources]
        self.total_bytes = None if None in sizes else sum(size or 0 for size in sizes)

    def __iter__(self) -> Iterator[str]:
        """Raises DataError naming file and line of what cannot be read; see `Rejects`."""
        for block in self.blocks():
            for content in block:
                yield content.decode("utf-8")

    def blocks(self) -> Iterator[list[bytes]]:
        """The documents as UTF-8, in lists of those that were read together; raises as above."""
        finished = 0
        for source in self.sources:
            for documents, position in self._read(source):
                self.bytes_done = finished + position
                yield documents
            finished += source.record.bytes or 0
            self.bytes_done = finished

    def _read(self, source: Source) -> Iterator[tuple[list[bytes], int]]:
        """(documents, bytes of the file read so far) of every block."""
        try:
            if source.kind == "jsonl":
                yield from self._read_lines(source)
                return
            read = {"text": self._read_text, "parquet": self._read_parquet}
            for where, value, position in read.get(source.kind, self._read_dataset)(source):
                content = self._accept(where, value)
                if content is not None:
                    yield [content], position
        except DECOMPRESSION_ERRORS as error:
            what = error.strerror if isinstance(error, OSError) and error.strerror else error
            raise DataError(f"{source.path} cannot be read: {what}") from error

    def _accept(self, where: str, value: object) -> bytes | None:
        """`value` as UTF-8; None where it is not text, which `Rejects` is told."""
        if not isinstance(value, str):
            found = "nothing" if value is None else type(value).__name__
            self.rejects.add(where, f"{self.text_key!r} is not text but {found}")
            return None
        try:
            return value.encode("utf-8")
        except UnicodeEncodeError:
            self.rejects.add(where, "the text holds half of a surrogate pair")
            return None

    def _read_text(self, source: Source) -> Iterator[tuple[str, Any, int]]:
        with open(source.path, "rb", buffering=0) as raw, _decompressed(raw, source.path) as file:
            content = file.read()
        try:
            yield source.path, content.decode("utf-8"), source.record.bytes or 0
        except UnicodeDecodeError as error:
            line = content.count(b"\n", 0, error.start) + 1
            self.rejects.add(f"{source.path}:{line}", f"not UTF-8 ({error.reason})")

    def _read_lines(self, source: Source) -> Iterator[tuple[list[bytes], int]]:
        with open(source.path, "rb", buffering=0) as raw, _decompressed(raw, source.path) as file:
            seekable = raw.seekable()  # a named pipe is not, and has no size either
            first = 1
            while lines := file.readlines(BLOCK_BYTES):
                yield self._parse(source.path, first, lines), raw.tell() if seekable else 0
                first += len(lines)

    def _parse(self, path: str, first: int, lines: list[bytes]) -> list[bytes]:
        """Documents of `lines`, the first of which is line number `first` of `path`."""
        key = self.text_key
        try:
            # What orjson refuses, and it refuses more than json does, is looked at one by one.
            return [orjson.loads(line)[key].encode() for line in lines]
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            parsed = (
                self._parse_line(path, number, line) for number, line in enumerate(lines, first)
            )
            return [content for content in parsed if content is not None]

    def _parse_line(self, path: str, number: int, line: bytes) -> bytes | None:
        where = f"{path}:{number}"
        if number == 1:
            line = line.removeprefix(b"\xef\xbb\xbf")
        if not line.strip():
            return None
        try:
            document = json.loads(line.decode("utf-8"))
        except UnicodeDecodeError as error:
            self.rejects.add(where, f"not UTF-8 ({error.reason})")
        except (ValueError, RecursionError) as error:
            self.rejects.add(where, f"not JSON ({error})")
        else:
            if not isinstance(document, dict):
                self.rejects.add(where, f"not a JSON object but {type(document).__name__}")
            elif self.text_key not in document:
                keys = ", ".join(sorted(document)[:20]) or "none"
                self.rejects.add(where, f"no key {self.text_key!r}; keys here: {keys}")
            else:
                return self._accept(where, document[self.text_key])
        return None

    def _read_parquet(self, source: Source) -> Iterator[tuple[str, Any, int]]:
        import pyarrow
        from pyarrow import parquet

        try:
            with parquet.ParquetFile(source.path) as file:
                _require_column(source.path, self.text_key, file.schema_arrow.names)
                rows = 0
                for batch in file.iter_batches(ROWS_PER_READ, columns=[self.text_key]):
                    position = (source.record.bytes or 0) * rows // max(1, file.metadata.num_rows)
                    for value in batch.column(0).to_pylist():
                        yield f"{source.path} row {rows}", value, position
                        rows += 1
        except pyarrow.ArrowException as error:
            raise DataError(f"{source.path} cannot be read: {_first_line(error)}") from error

    def _read_dataset(self, source: Source) -> Iterator[tuple[str, Any, int]]:
        dataset = _load_dataset(source, self.selection)
        if dataset.column_names is not None:
            _require_column(source.path, self.text_key, dataset.column_names)
        rows = 0
        try:
            for batch in dataset.iter(ROWS_PER_READ):
                _require_column(source.path, self.text_key, list(batch))
                for value in batch[self.text_key]:
                    yield f"{source.path} row {rows}", value, 0
                    rows += 1
        except (DataError, GeneratorExit):
            raise
        except Exception as error:  # whatever the builder of a foreign format raises
            raise DataError(
                f"{source.path} cannot be read after row {rows}: {_first_line(error)}"
            ) from error


def find_sources(selection: Selection) -> list[Source]:
    """The files and datasets that `selection` means, in its order, each once.

    An input is a file, a folder (its files with one of the suffixes, sorted by path), a glob, a
    directory written by ``Dataset.save_to_disk``, or the name of a dataset on the hub. Raises
    DataError for an input that is none of these and for one that matches nothing.
    """
    found: dict[str, Source] = {}
    for name in selection.inputs:
        for source in _find(name, selection):
            found.setdefault(source.path, source)
    if not found:
        raise DataError("no input is left: --exclude matches every file")
    return list(found.values())


def _find(name: str, selection: Selection) -> list[Source]:
    path = Path(name)
    if path.is_dir():
        return _find_in_folder(path, selection)
    if path.exists():
        return [] if _excluded(path.name, selection.exclude) else [_file_source(path)]
    if glob.has_magic(name):
        return _find_by_glob(name, selection)
    known = (*DEFAULT_SUFFIXES, *LINE_SUFFIXES, *DATASET_BUILDERS, *COMPRESSIONS)
    if name.endswith(known) or not HUB_NAME.fullmatch(name):
        raise DataError(f"--input {name}: no such file, folder or glob")
    return [_hub_source(name)]


def _find_by_glob(pattern: str, selection: Selection) -> list[Source]:
    """Files that match; where only folders do, what is in them."""
    matches = sorted(Path(match) for match in glob.glob(pattern, recursive=True))
    if not matches:
        raise DataError(f"--input {pattern}: no file matches")
    files = [match for match in matches if match.is_file()]
    if not files:
        return [source for match in matches for source in _find(str(match), selection)]
    base = Path(*takewhile(lambda part: not glob.has_magic(part), Path(pattern).parts))
    return [
        _file_source(file)
        for file in files
        if not _excluded(str(file.relative_to(base)), selection.exclude)
    ]


def _find_in_folder(folder: Path, selection: Selection) -> list[Source]:
    if (folder / "dataset_info.json").is_file() or (folder / "dataset_dict.json").is_file():
        size = sum(f.stat().st_size for f in folder.rglob("*.arrow"))
        return [Source("saved_dataset", SourceRecord(path=str(folder), bytes=size))]
    suffixes = tuple(selection.suffixes)
    seen: Counter[str] = Counter()
    files = []
    for root, directories, names in os.walk(folder):
        relative = Path(root).relative_to(folder)
        directories[:] = sorted(
            d for d in directories if not _excluded(str(relative / d), selection.exclude)
        )
        for name in names:
            if _excluded(str(relative / name), selection.exclude):
                continue
            if name.endswith(suffixes) or _without_compression(name).endswith(suffixes):
                files.append(Path(root, name))
            seen[Path(name).suffix or "no suffix"] += 1
    if not files:
        common = ", ".join(f"{suffix} ({count})" for suffix, count in seen.most_common(5))
        raise DataError(
            f"--input {folder}: no file there ends with {', '.join(suffixes)}; found: "
            f"{common or 'none at all'} -> name the suffix to read as text, for example "
            "--suffix .py"
        )
    return [_file_source(file) for file in sorted(files)]


def _excluded(relative: str, patterns: Sequence[str]) -> bool:
    """Whether a pattern matches the path below the input, or one of its parts."""
    parts = Path(relative).parts
    return any(fnmatch(relative, p) or any(fnmatch(part, p) for part in parts) for p in patterns)


def _file_source(path: Path) -> Source:
    try:
        status = path.stat()
    except OSError as error:
        raise DataError(f"--input {path}: {error.strerror}") from error
    plain = _without_compression(path.name)
    kind: Kind = "text"
    if plain.endswith(LINE_SUFFIXES):
        kind = "jsonl"
    elif plain.endswith(".parquet"):
        if plain != path.name:
            raise DataError(f"--input {path}: decompress it first; parquet compresses inside")
        kind = "parquet"
    elif Path(plain).suffix in DATASET_BUILDERS:
        kind = "dataset_file"
    record = SourceRecord(path=str(path), bytes=status.st_size, modified_ns=status.st_mtime_ns)
    return Source(kind, record)


def _hub_source(name: str) -> Source:
    from huggingface_hub import HfApi

    try:
        revision = HfApi().dataset_info(name, timeout=HUB_TIMEOUT_S).sha
    except Exception as error:  # the client's transport errors differ between its versions
        raise DataError(
            f"--input {name}: no such file, folder or glob, and no dataset of this name can be had "
            f"from the Hugging Face hub ({_first_line(error)})"
        ) from error
    return Source("hub_dataset", SourceRecord(path=name, revision=revision))


def _load_dataset(source: Source, selection: Selection) -> Any:
    """The source as a `datasets` object; streamed, so that memory and disk stay free."""
    import datasets

    split, path = selection.dataset_split, source.path
    try:
        if source.kind == "hub_dataset":
            return datasets.load_dataset(
                path,
                selection.dataset_config,
                split=split,
                revision=source.record.revision,
                streaming=True,
            )
        if source.kind == "dataset_file":
            builder = DATASET_BUILDERS[Path(_without_compression(path)).suffix]
            return datasets.load_dataset(builder, data_files=[path], split="train", streaming=True)
        saved = datasets.load_from_disk(path)
        if not isinstance(saved, datasets.DatasetDict):
            return saved
        if split in saved:
            return saved[split]
    except Exception as error:  # whatever the builder of a foreign format raises
        raise DataError(f"--input {path} cannot be opened: {_first_line(error)}") from error
    raise DataError(
        f"--input {path} has no split {split} -> --dataset-split: {', '.join(map(str, saved))}"
    )


def _require_column(path: str, key: str, names: Sequence[str]) -> None:
    if key not in names:
        raise DataError(
            f"{path}: no column {key!r} -> --text-key: {', '.join(sorted(names)[:20]) or 'none'}"
        )


def _decompressed(raw: IO[bytes], path: str) -> IO[bytes]:
    opener = COMPRESSIONS.get(Path(path).suffix)
    stream: IO[bytes] = opener(raw) if opener else os.fdopen(os.dup(raw.fileno()), "rb")
    return stream


def _without_compression(name: str) -> str:
    suffix = Path(name).suffix
    return name.removesuffix(suffix) if suffix in COMPRESSIONS else name


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
