"""From documents to a finished dataset: read, encode, write in order, manifest last.

Reading and writing are this process's, while encoding goes on either in its threads (on all cores,
which the libraries use by themselves) or in worker processes. The order of the documents is the
inputs', and shards are cut by tokens alone, so the bytes do not depend on the number of workers.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import xxhash
from tqdm import tqdm

from bigtrain.data.directories import new_directory, require_free
from bigtrain.data.encoders import (
    Checks,
    CheckSampler,
    Choice,
    Encoder,
    EncoderError,
    EncoderQueue,
    choose_encoder,
)
from bigtrain.data.manifest import (
    MANIFEST_NAME,
    TOKENIZER_DIRECTORY,
    Manifest,
    OptionsRecord,
    ShardRecord,
    Split,
    TokenizerRecord,
    read_manifest,
    write_manifest,
)
from bigtrain.data.shards import ShardWriter, Tokens, open_dataset, token_dtype
from bigtrain.data.sources import DocumentReader, Rejects, Selection, Source, find_sources
from bigtrain.data.tokenization import Tokenizer, load_tokenizer
from bigtrain.errors import DataError

DEFAULT_SHARD_TOKENS = 1 << 28
BATCH_BYTES = 1 << 20
BATCH_DOCUMENTS = 2048
ENCODING_THREADS = 2
"""Batches encoded at once in one process: while one is put together the other has the cores."""


@dataclass(frozen=True)
class BuildRequest:
    """What `bigtrain tokenize` was asked for."""

    selection: Selection
    tokenizer: str
    output: Path
    text_key: str = "text"
    held_out: float = 0.0
    shard_tokens: int = DEFAULT_SHARD_TOKENS
    workers: int = 1
    skip_bad: bool = False
    encoder: Choice = "auto"
    parse_special_tokens: bool = False


@dataclass(frozen=True)
class BuildResult:
    """The dataset's manifest, and whether it was there already."""

    manifest: Manifest
    already_finished: bool


def build_dataset(request: BuildRequest) -> BuildResult:
    """Tokenize `request.selection` into `request.output`.

    An output that is the finished dataset of the same inputs (by path, size and time), tokenizer
    and options is left alone. Raises DataError for anything wrong, and then leaves nothing behind.
    """
    sources = find_sources(request.selection)
    _refuse_output_among_inputs(request.output, sources)
    if not (request.output / MANIFEST_NAME).exists():
        require_free(request.output)
    tokenizer = load_tokenizer(request.tokenizer)
    options = OptionsRecord(
        text_key=request.text_key,
        held_out=request.held_out,
        shard_tokens=request.shard_tokens,
        skip_bad=request.skip_bad,
        parse_special_tokens=request.parse_special_tokens,
    )
    if (request.output / MANIFEST_NAME).exists():
        manifest = _finished(request.output, sources, tokenizer, options)
        return BuildResult(manifest, already_finished=True)
    encoders = choose_encoder(
        tokenizer.encoder(request.parse_special_tokens),
        request.encoder,
        read_once=any(_is_read_once(source) for source in sources),
    )
    with new_directory(request.output) as directory:
        while True:
            rejects = Rejects(request.skip_bad)
            reader = DocumentReader(sources, request.selection, request.text_key, rejects)
            try:
                splits = _write_splits(reader, tokenizer, encoders, request, directory)
                break
            except EncoderError as error:
                # What it wrote so far may be wrong as well: the next one begins from the start.
                encoders.reject(str(error))
        manifest = Manifest(
            tokenizer=TokenizerRecord(
                name=tokenizer.name,
                hash=tokenizer.hash,
                vocab_size=tokenizer.vocab_size,
                end_of_document_id=tokenizer.end_of_document_id,
                engine=encoders.current.engine(),
                engine_reason=encoders.reason,
            ),
            token_dtype=token_dtype(tokenizer.vocab_size),
            sources=tuple(source.record for source in sources),
            options=options,
            skipped_documents=rejects.count,
            splits=splits,
        )
        if not manifest.num_tokens("train"):
            raise DataError(
                f"there is no training token in the input: {manifest.num_documents('train')} "
                f"training documents, {manifest.num_documents('held_out')} held-out documents with "
                f"{manifest.num_tokens('held_out')} tokens, {rejects.count} skipped"
            )
        tokenizer.save(directory / TOKENIZER_DIRECTORY)
        write_manifest(directory, manifest)
    return BuildResult(manifest, already_finished=False)


def _refuse_output_among_inputs(output: Path, sources: Sequence[Source]) -> None:
    target = output.resolve()
    for source in sources:
        if Path(source.path).resolve() == target:
            raise DataError(f"--output {output} is one of the inputs")


def _is_read_once(source: Source) -> bool:
    path = Path(source.path)
    return path.exists() and not path.is_file() and not path.is_dir()


def _finished(
    output: Path, sources: Sequence[Source], tokenizer: Tokenizer, options: OptionsRecord
) -> Manifest:
    """The manifest in `output`, if it is of this input. Raises DataError saying what differs."""
    manifest = read_manifest(output)
    different = [
        what
        for what, same in (
            ("input files", manifest.sources == tuple(source.record for source in sources)),
            ("tokenizer", manifest.tokenizer.hash == tokenizer.hash),
            ("options", manifest.options == options),
        )
        if not same
    ]
    if different:
        raise DataError(
            f"{output} holds a dataset of other {' and '.join(different)}; nothing was written -> "
            "name another --output, or remove it first"
        )
    open_dataset(output, check="sizes")
    return manifest


@dataclass(frozen=True)
class _Batch:
    """Encoded documents: tokens, lengths, which are held out, UTF-8 bytes of each."""

    tokens: Tokens
    lengths: npt.NDArray[np.int64]
    held_out: npt.NDArray[np.bool_]
    text_bytes: npt.NDArray[np.int64]


@dataclass(frozen=True)
class _Texts:
    """Documents as UTF-8, and what of them is compared with the reference."""

    contents: list[bytes]
    checks: Checks


@dataclass(frozen=True)
class _Job:
    """What encoding needs besides the texts; sent to each worker once."""

    encoder: Encoder
    reference: Encoder
    dtype: Literal["uint16", "int32"]
    held_out: float

    def run(self, texts: _Texts) -> _Batch:
        """Raises EncoderError where the encoder is wrong or fails."""
        contents = texts.contents
        encoded = self.encoder.encode_utf8(contents)
        texts.checks.run(self.encoder, self.reference, contents, encoded)
        return _Batch(
            encoded.tokens.astype(self.dtype),
            encoded.lengths,
            self._held_out(contents),
            np.fromiter(map(len, contents), np.int64, len(contents)),
        )

    def _held_out(self, contents: Sequence[bytes]) -> npt.NDArray[np.bool_]:
        if not self.held_out:
            return np.zeros(len(contents), bool)
        return np.fromiter((is_held_out(c, self.held_out) for c in contents), bool, len(contents))


def is_held_out(content: bytes, fraction: float) -> bool:
    """Whether the document with UTF-8 `content` belongs to the held-out split.

    Decided by the document alone, so the split stands when data is appended, and a duplicate is
    on the same side as its original.
    """
    return xxhash.xxh3_64_intdigest(content) < int(fraction * 2**64)


@dataclass
class _SplitWriter:
    """Writes one split, beginning a new shard before a document that would overfill this one."""

    directory: Path
    split: Split
    dtype: Literal["uint16", "int32"]
    shard_tokens: int
    records: list[ShardRecord] = field(default_factory=list)
    current: ShardWriter | None = None

    def add(
        self, tokens: Tokens, lengths: npt.NDArray[np.int64], text_bytes: npt.NDArray[np.int64]
    ) -> None:
        first, token = 0, 0
        ends = np.cumsum(lengths)
        while first < len(lengths):
            if self.current is None:
                name = f"{self.split}-{len(self.records):05d}"
                self.current = ShardWriter(self.directory, name, self.dtype)
            room = max(0, self.shard_tokens - self.current.num_tokens)
            last = int(np.searchsorted(ends, token + room, side="right"))
            if last == first and not self.current.num_tokens:
                last = first + 1  # a document longer than a shard has one of its own
            if last > first:
                end = int(ends[last - 1])
                self.current.add(
                    tokens[token:end], lengths[first:last], int(text_bytes[first:last].sum())
                )
                first, token = last, end
            if first < len(lengths):
                self.close()

    def close(self) -> None:
        if self.current is not None:
            self.records.append(self.current.close())
            self.current = None

    def discard(self) -> None:
        """Remove every file this split has."""
        if self.current is not None:
            self.current.discard()
        for record in self.records:
            for suffix in ("bin", "idx"):
                (self.directory / f"{record.name}.{suffix}").unlink(missing_ok=True)


def _write_splits(
    reader: DocumentReader,
    tokenizer: Tokenizer,
    encoders: EncoderQueue,
    request: BuildRequest,
    directory: Path,
) -> dict[Split, tuple[ShardRecord, ...]]:
    """Raises EncoderError where the current encoder is found wrong; then no file is left."""
    dtype = token_dtype(tokenizer.vocab_size)
    job = _Job(encoders.current, encoders.reference, dtype, request.held_out)
    splits: tuple[Split, ...] = ("train", "held_out")
    writers = {
        split: _SplitWriter(directory, split, dtype, request.shard_tokens) for split in splits
    }
    sampler = None if encoders.is_reference else CheckSampler()
    try:
        _fill(writers, reader, sampler, job, request.workers)
    except BaseException:
        for writer in writers.values():
            writer.discard()
        raise
    return {
        split: tuple(writer.records)
        for split, writer in writers.items()
        if writer.records or split == "train"
    }


def _fill(
    writers: dict[Split, _SplitWriter],
    reader: DocumentReader,
    sampler: CheckSampler | None,
    job: _Job,
    workers: int,
) -> None:
    num_tokens = 0
    with tqdm(
        total=reader.total_bytes, unit="B", unit_scale=True, desc="tokenize", disable=None
    ) as bar:
        for batch in _encode(_texts(reader, sampler), job, workers):
            num_tokens += len(batch.tokens)
            bar.update(reader.bytes_done - bar.n)
            bar.set_postfix_str(f"{num_tokens / 1e6:.1f}M tokens", refresh=False)
            if not batch.held_out.any():
                writers["train"].add(batch.tokens, batch.lengths, batch.text_bytes)
                continue
            of_document = np.repeat(batch.held_out, batch.lengths)
            for split, writer in writers.items():
                wanted = split == "held_out"
                documents = batch.held_out == wanted
                writer.add(
                    batch.tokens[of_document == wanted],
                    batch.lengths[documents],
                    batch.text_bytes[documents],
                )
    for writer in writers.values():
        writer.close()


def _texts(reader: DocumentReader, sampler: CheckSampler | None) -> Iterator[_Texts]:
    for contents in _content_batches(reader):
        yield _Texts(contents, sampler.choose(contents) if sampler else Checks())


def _content_batches(reader: DocumentReader) -> Iterator[list[bytes]]:
    """The documents of `reader` in lists of about a million bytes, at least one each."""
    batch: list[bytes] = []
    size = 0
    for block in reader.blocks():
        for content in block:
            batch.append(content)
            size += len(content)
            if size >= BATCH_BYTES or len(batch) >= BATCH_DOCUMENTS:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch


def text_batches(reader: DocumentReader) -> Iterator[list[str]]:
    """The documents of `reader` as texts, in lists of about a million bytes."""
    for contents in _content_batches(reader):
        yield [content.decode("utf-8") for content in contents]


def _encode(batches: Iterator[_Texts], job: _Job, workers: int) -> Iterator[_Batch]:
    """Encoded `batches`, in order, while this process reads and writes.

    Never more than two batches per worker or thread are under way.
    """
    pool: Executor
    if workers == 1:
        job.encoder.encode_utf8([])  # loaded once, not by every thread
        num_encoding = ENCODING_THREADS
        pool, run = ThreadPoolExecutor(num_encoding), job.run
    else:
        # Not fork: the threads of a tokenizer that was already used do not survive it.
        context = multiprocessing.get_context("spawn")
        num_encoding = workers
        pool = ProcessPoolExecutor(workers, context, initializer=_start_worker, initargs=(job,))
        run = _run_in_worker
    pending: deque[Future[_Batch]] = deque()
    try:
        for batch in batches:
            pending.append(pool.submit(run, batch))
            if len(pending) >= 2 * num_encoding:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    except BrokenProcessPool as error:
        raise DataError(
            "a tokenizing process died, most likely for want of memory -> fewer --workers"
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


_worker_state: dict[str, Any] = {}


def _start_worker(job: _Job) -> None:
    """In a worker: one thread per process, before `tokenizers` is imported and starts more."""
    os.environ["RAYON_NUM_THREADS"] = "1"
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _worker_state["job"] = job
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A pool's worker waits for work for ever when its parent was killed: it holds the pipe open
    by itself."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _run_in_worker(texts: _Texts) -> _Batch:
    job: _Job = _worker_state["job"]
    return job.run(texts)
