"""Pass of a model over all documents of a dataset, which writes their log-probabilities.

Documents are divided into parts (`bigtrain.data.shards.scores`); each part is computed by all ranks
and written by the main rank. Every value is computed by one rank of the data-parallel group, so
that a sum over ranks adds zeros to it, and a repeated pass writes equal bytes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
import xxhash

from bigtrain.data.loading.collator import BatchOptions, BatchReader
from bigtrain.data.loading.micro_batch import MicroBatch
from bigtrain.data.samples.documents import DocumentSamples
from bigtrain.data.samples.rated import RatedSamples
from bigtrain.data.samples.token_stream import Indices, split_stream
from bigtrain.data.shards.dataset import TokenDataset
from bigtrain.data.shards.format import IGNORED_LABEL
from bigtrain.data.shards.manifest import Split
from bigtrain.data.shards.scores import (
    MISMATCHED,
    Identity,
    ScorePartRecord,
    ScoreRequest,
    Scores,
    ScoreWriter,
    open_scores,
    scores_directory,
)
from bigtrain.engine.train_engine import TrainEngine
from bigtrain.models.layers.token_loss import TopTokens
from bigtrain.models.weights.checksums import TOKEN_FILES, Sums
from bigtrain.objectives.section import ROWS
from bigtrain.run.checkpointing.checkpoints import MANIFEST
from bigtrain.run.checkpointing.initialize import find_checkpoint
from bigtrain.run.context import RunContext
from bigtrain.run.preflight import Inputs
from bigtrain.run.reporting.progress import OUTPUT_REMEDY
from bigtrain.settings.degrees import MODEL_AXES
from bigtrain.system.files import file_checksum, writing

MAX_ROWS = 8
"""Rows of a forward pass over short documents, as a multiple of the micro-batch."""
_ACTIVITY = "scoring the data"
_IGNORED_KEYS = ("_name_or_path", "transformers_version", "dtype", "torch_dtype")


@dataclass(frozen=True)
class ScoredSplits:
    """Splits of a dataset to score, and the scores to compute."""

    dataset: TokenDataset
    splits: Sequence[Split]
    request: ScoreRequest


def model_identity(context: RunContext, inputs: Inputs, sums: Sums | None) -> Identity:
    """Return the identity of the weights that a run begins with: its configuration, and the
    checksums of the Hugging Face files `sums`, or of a checkpoint's manifest, or the seed of random
    weights. Collective. Raises CheckpointError on every rank without a complete checkpoint."""
    config, hf_config = context.config, inputs.hf_config
    tree = {k: v for k, v in hf_config.to_dict().items() if k not in _IGNORED_KEYS}
    digest = xxhash.xxh3_64(json.dumps(tree, sort_keys=True, default=str).encode())
    name = f"random weights of seed {config.seed}"
    if sums is not None:
        name = str(config.model.path or config.checkpoint.initialize_from)
        # Of the files, only weights change the scores of tokens.
        other_files = {*TOKEN_FILES, "config.json"}
        sums_by_name = [(Path(path).name, file_sum.xxh3) for path, file_sum in sums.items()]
        weight_sums = sorted(entry for entry in sums_by_name if entry[0] not in other_files)
        digest.update(json.dumps(weight_sums).encode())
    elif config.checkpoint.initialize_from is not None:
        name = config.checkpoint.initialize_from
        directory = Path(config.checkpoint.initialize_from)

        def manifest_sum() -> str:
            return file_checksum(find_checkpoint(directory, lambda _text: None) / MANIFEST)

        digest.update(context.long_work.on_main_rank(manifest_sum).encode())
    else:
        digest.update(name.encode())
    if inputs.growth is not None:
        digest.update(f"{inputs.growth.after} rows of seed {config.seed}".encode())
    return Identity(name=name, hash=digest.hexdigest())


def score_dataset(
    context: RunContext, engine: TrainEngine, scored: ScoredSplits, output: Path
) -> Scores:
    """Write the scores of a dataset into its directory of `output`, unless they are complete there,
    and return them. Collective. Raises DataError on every rank if other scores are there."""
    work, request = context.long_work, scored.request
    directory = scores_directory(output, request.data)
    writers: list[ScoreWriter] = []  # the writer of the main rank; empty on other ranks

    @writing(directory, OUTPUT_REMEDY)
    def begin() -> None:
        writers.append(ScoreWriter(directory, request))

    work.on_main_rank(begin)
    rows = ROWS.get(scored.dataset.table.rows)
    num_ids = scored.dataset.table.tokenizer.vocab_size
    top = TopTokens(request.top_k, num_ids) if request.top_k else None
    records: dict[Split, list[ScorePartRecord]] = {}
    longest: dict[Split, int] = {}
    for split in scored.splits:
        stream = split_stream(scored.dataset, split)
        truncates, length = request.long_documents == "truncate", request.sequence_length
        samples = DocumentSamples(stream, length, "truncate" if truncates else "divide")
        rated: RatedSamples | None = None
        if rows is not None and rows.has_mismatched:
            rated_stream = split_stream(scored.dataset, split)
            rated = RatedSamples(rated_stream, length, truncates=truncates)
        longest[split], records[split] = samples.longest, []
        for part in _parts(split, samples, request):
            # A part that an earlier launch wrote is not computed again.
            record = work.on_main_rank(lambda part=part: writers[0].finished(part.name))  # type: ignore[misc]
            if record is None:
                arrays = _compute(context, engine, samples, part=part, request=request, top=top)
                if rated is not None:
                    arrays[MISMATCHED] = _mismatched_sums(context, engine, rated, part)

                @writing(directory, OUTPUT_REMEDY)
                def write(part: _Part = part, arrays: dict[str, Any] = arrays) -> ScorePartRecord:
                    return writers[0].write(part.name, part.first, part.num_tokens, arrays)

                record = work.on_main_rank(write)
            records[split].append(record)

    @writing(directory, OUTPUT_REMEDY)
    def close() -> None:
        writers[0].close(records, longest)

    work.on_main_rank(close)
    return work.on_every_rank(lambda: open_scores(directory))[context.world.rank]


@dataclass(frozen=True)
class _Part:
    """Documents `first` to `last` (exclusive), with their number of tokens and the indices of the
    samples."""

    name: str
    first: int
    last: int
    num_tokens: int
    samples: Indices


def _parts(split: Split, samples: DocumentSamples, request: ScoreRequest) -> Iterator[_Part]:
    """Yield parts of about `request.part_tokens` stored values; a token has `top_k` values."""
    part_tokens = max(1, request.part_tokens // max(1, request.top_k))
    lengths = samples.document_lengths
    # A document belongs to the part in which its last token is.
    last_tokens = np.maximum(np.cumsum(lengths) - 1, 0)
    _, first_documents = np.unique(last_tokens // part_tokens, return_index=True)
    borders = [*first_documents.tolist(), len(lengths)]
    for number, (first, last) in enumerate(pairwise(borders)):
        low, high = np.searchsorted(samples.documents, [first, last]).tolist()
        num_tokens = int(lengths[first:last].sum())
        yield _Part(f"{split}-{number:05d}", first, last, num_tokens, np.arange(low, high))


def _compute(
    context: RunContext,
    engine: TrainEngine,
    samples: DocumentSamples,
    *,
    part: _Part,
    request: ScoreRequest,
    top: TopTokens | None,
) -> dict[str, npt.NDArray[Any]]:
    """Return the arrays of a part, on every rank; `top`: tokens to store. Collective."""
    top_k, num_samples = request.top_k, len(part.samples)
    num_tokens = part.num_tokens if request.kind != "documents" else 0
    num_top = num_tokens if top_k else 0
    values: dict[str, npt.NDArray[Any]] = {
        "sums": np.zeros(num_samples, np.float64),
        "targets": np.zeros(num_samples, np.int64),
        "tokens": np.zeros(num_tokens if request.kind == "tokens" else 0, np.float32),
        "top_values": np.zeros((num_top, top_k), np.float32),
        "top_ids": np.zeros((num_top, top_k), np.int32),
    }

    # Score the samples of this rank, in micro-batches of similar length.
    document_lengths = samples.document_lengths[part.first : part.last]
    document_begins = np.cumsum(document_lengths) - document_lengths
    reader = BatchReader(samples, BatchOptions())
    # Of the ranks of a model-parallel group, which get equal scores, one adds them to the sum.
    is_counted = engine.mesh.coordinates.is_first("data", *MODEL_AXES)
    lengths = samples.lengths[part.samples]
    for sample_numbers, batch in _batches(engine, part.samples, lengths, reader.read):
        context.heartbeat.set_activity(_ACTIVITY, slow=True)
        scores = engine.token_scores(batch, top).numpy()
        if not is_counted:
            continue
        labels = batch.labels.numpy()
        for row, number in enumerate(sample_numbers.tolist()):
            num_targets = int(samples.lengths[number]) - 1  # the first token has no score
            # Columns: log-probability of the target, values of the top tokens, their ids.
            row_scores = scores[row, :num_targets]
            sample = number - int(part.samples[0])
            values["sums"][sample] = row_scores[:, 0].sum(dtype=np.float64)
            values["targets"][sample] = (labels[row, :num_targets] != IGNORED_LABEL).sum()
            document = samples.documents[number] - part.first
            begin = int(document_begins[document] + samples.offsets[number])
            positions = slice(begin + 1, begin + 1 + num_targets)
            if request.kind == "tokens":
                values["tokens"][positions] = row_scores[:, 0]
            if num_top:
                values["top_values"][positions] = row_scores[:, 1 : 1 + top_k]
                values["top_ids"][positions] = row_scores[:, 1 + top_k :]

    # Each value was computed by one rank, so that sums over ranks are exact.
    summed = {name: _summed(array, engine) for name, array in values.items()}
    # The values of a document are the sums over its samples.
    documents = samples.documents[part.samples] - part.first
    arrays: dict[str, npt.NDArray[Any]] = {}
    for name in ("sums", "targets"):
        arrays[name] = np.zeros(part.last - part.first, summed[name].dtype)
        np.add.at(arrays[name], documents, summed[name])
    if request.kind == "tokens":
        arrays["tokens"] = summed["tokens"]
    if top_k:
        arrays |= {name: summed[name] for name in ("top_values", "top_ids")}
    return arrays


def _mismatched_sums(
    context: RunContext, engine: TrainEngine, rated: RatedSamples, part: _Part
) -> npt.NDArray[np.float64]:
    """Return the log-probability of the mismatched answer to every document in a part, float64
    [documents], on every rank. Collective."""
    reader = BatchReader(rated, BatchOptions())

    def read_mismatched(numbers: Indices, rows: int) -> MicroBatch:
        # The second row of each pair has the mismatched answer.
        return reader.read(numbers, rows).of_pairs().every_second(1)

    documents = np.arange(part.first, part.last)
    lengths = rated.mismatched_lengths(documents)
    sums = np.zeros(len(documents), np.float64)
    is_counted = engine.mesh.coordinates.is_first("data", *MODEL_AXES)
    for numbers, batch in _batches(engine, documents, lengths, read_mismatched):
        context.heartbeat.set_activity(_ACTIVITY, slow=True)
        target_scores = engine.token_scores(batch).numpy()[: len(numbers), :, 0]
        if is_counted:
            sums[numbers - part.first] = target_scores.sum(1, dtype=np.float64)
    return _summed(sums, engine)


def _batches(
    engine: TrainEngine,
    samples: Indices,
    lengths: Indices,
    read: Callable[[Indices, int], MicroBatch],
) -> Iterator[tuple[Indices, MicroBatch]]:
    """Yield this rank's part of `samples`, longest first, as indices of samples and the micro-batch
    with these samples, which is as wide as the longest sample of all ranks. Every rank gets an
    equal number of micro-batches, padded after the last sample. lengths: tokens of each sample;
    read: returns samples in a number of rows."""
    plan, data_rank = engine.plan, engine.mesh.coordinates.data_rank
    longest_first = np.argsort(-lengths, kind="stable")
    sorted_samples, sorted_widths = samples[longest_first], lengths[longest_first] - 1
    begin = 0
    while begin < len(sorted_samples):
        # Short samples fill the token budget of a micro-batch with more rows.
        width = max(1, int(sorted_widths[begin]))
        rows = plan.micro_batch_size * max(1, min(MAX_ROWS, plan.sequence_length // width))
        rank_begin = begin + data_rank * rows
        numbers = sorted_samples[rank_begin : rank_begin + rows]
        batch = read(numbers, rows)
        inputs = batch.input_ids[:, :width].contiguous()
        labels = batch.labels[:, :width].contiguous()
        yield numbers, MicroBatch(inputs, labels)
        begin += rows * plan.data_size


def _summed(array: npt.NDArray[Any], engine: TrainEngine) -> npt.NDArray[Any]:
    """Return the sum of `array` over the data-parallel ranks, which score different samples: each
    element is zero on all ranks but one."""
    if not array.size:
        return array
    total = torch.from_numpy(array).to(engine.device)
    dist.all_reduce(total, group=engine.mesh.replicas)
    summed: npt.NDArray[Any] = total.cpu().numpy()
    return summed
