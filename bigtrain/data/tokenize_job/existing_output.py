"""Existing contents of an output: nothing, an unfinished or finished dataset, or foreign files.

Detection of changes to inputs since they were tokenized.

Like in git: if size and times are equal, the content counts as unchanged. If times differ (after
a copy, a checkout or `touch`), the input is hashed and compared with the hash computed while
tokenizing: that requires reading a file of lines or text, or the documents of a table.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from bigtrain.data.documents.files import Source
from bigtrain.data.documents.formats import part_reader
from bigtrain.data.documents.reader import ReadOptions, RejectedDocuments, SourcePart
from bigtrain.data.shards.dataset import open_dataset
from bigtrain.data.shards.manifest import (
    CHECKSUM_FIELDS,
    ERRORS_NAME,
    MANIFEST_NAME,
    SPLITS,
    TOKENIZER_DIRECTORY,
    WORK_DIRECTORY,
    Manifest,
    SourceRecord,
    read_manifest,
    same_times,
    write_manifest,
)
from bigtrain.data.tokenize_job.request import BuildRequest
from bigtrain.data.tokenize_job.workspace import Unit, Workspace
from bigtrain.data.tokenizers.cache import files_fingerprint
from bigtrain.data.tokenizers.tokenizer import load_tokenizer
from bigtrain.errors import DataError
from bigtrain.system.files import require_free

logger = logging.getLogger(__name__)

OWN_NAMES = re.compile(
    rf"({'|'.join(SPLITS)})-\d+\.({'|'.join(CHECKSUM_FIELDS)})|{ERRORS_NAME}|{TOKENIZER_DIRECTORY}"
    rf"|{re.escape(WORK_DIRECTORY)}(\.\w+\.partial)?"
)
"""Files of an unfinished dataset."""


def inputs_outside(output: Path, sources: Sequence[Source]) -> list[Source]:
    """Return `sources` without the files in `output`, which may be a folder inside of an input
    folder. Raises DataError if no source remains, or if an input is the output itself."""
    # Avoid the real path of every source: it checks every folder above each of many files.
    targets = (os.path.abspath(output), os.path.realpath(output))
    folders = tuple(target + os.sep for target in targets)
    remaining = []
    for source in sources:
        if source.address is not None or source.is_standard_input:
            remaining.append(source)
            continue
        path = os.path.abspath(source.path)
        if path in targets:
            raise DataError(f"--output {output} is one of the inputs")
        if not path.startswith(folders):
            remaining.append(source)
    if not remaining:
        raise DataError(f"every input is inside --output {output}")
    return remaining


def is_free_or_unfinished(workspace: Workspace) -> bool:
    """Return whether the output is free or an unfinished dataset; False if another process has just
    finished the dataset. Raises DataError if the output contains anything else."""
    output = workspace.output
    try:
        try:
            require_free(output)
            return True
        except DataError:
            # Checked only now: another rank may have started the work just before.
            if not workspace.directory.is_dir():
                raise
        for path in output.iterdir():
            if not OWN_NAMES.fullmatch(path.name):
                raise DataError(
                    f"{path} is not part of the unfinished dataset in {output}; nothing was "
                    "written -> choose another --output, or remove it first"
                )
    except DataError:
        if not workspace.is_finished():
            raise
        return False
    return True


def finished_manifest(
    request: BuildRequest, sources: Sequence[Source], workspace: Workspace
) -> Manifest:
    """Return the manifest in the output if it matches this input; else raise DataError."""
    output = request.output
    manifest = read_manifest(output)
    # Inputs with new times are read again and compared by content; None if an input has changed.
    # With other options the dataset is refused anyway, and its inputs would be read differently.
    confirmed: tuple[SourceRecord, ...] | None = manifest.sources
    same_options = manifest.options == request.options
    if same_options:
        confirmed = confirm_sources(manifest.sources, sources, request.reading())
    has_new_times = confirmed is not None and confirmed != manifest.sources
    if has_new_times:
        logger.warning("the times of input files changed; their content still matches %s", output)
    # Compare tokenizers by their files; if these differ, load the tokenizer, which takes seconds.
    files_xxh3, recorded = files_fingerprint(request.tokenizer), manifest.tokenizer
    same_files = files_xxh3 is not None and files_xxh3 == recorded.files_xxh3
    same_tokenizer = same_files or load_tokenizer(request.tokenizer).hash == recorded.hash
    same_template = True
    if request.options.chat:
        template = request.find_template(load_tokenizer(request.tokenizer))
        same_template = (None if template is None else template.hash) == recorded.chat_template
    different = [
        aspect
        for aspect, is_same in (
            ("input files", confirmed is not None),
            ("tokenizer", same_tokenizer),
            ("chat template", same_template),
            ("options", same_options),
        )
        if not is_same
    ]
    if different:
        raise DataError(
            f"{output} contains a dataset of other {' and '.join(different)}; nothing was written "
            "-> choose another --output, or remove it first"
        )
    open_dataset(output, check="sizes")
    if has_new_times:
        # With the new times, so that the next start does not need to read the inputs.
        current = manifest.model_copy(update={"sources": confirmed})
        draft = output / f"{MANIFEST_NAME}.{workspace.token}.partial"
        with suppress(OSError):  # a read-only dataset: the next start checks again
            write_manifest(output, current, draft)
    workspace.remove()
    return manifest


def confirm_unit(unit: Unit, workspace: Workspace, options: ReadOptions) -> bool:
    """Return whether the inputs of `unit` have the content that the unit was built from; contents
    are compared where the times of files differ. Updates the times in the unit's record, or
    removes the record if a content differs. Call it while holding the unit's lease."""
    record = workspace.unconfirmed([unit]).get(unit.key)
    if record is None:
        return False
    parts = []
    for part, read in zip(unit.parts, record.parts, strict=True):
        times = part.source.record.times
        if same_times(read.times, times):
            parts.append(read)
            continue
        if not _is_unchanged(part, read.xxh3, read.layout_xxh3, options):
            workspace.drop(unit.key)
            return False
        parts.append(replace(read, times=times))
    workspace.write_record(record.model_copy(update={"parts": tuple(parts)}))
    return True


def confirm_sources(
    recorded: Sequence[SourceRecord], sources: Sequence[Source], options: ReadOptions
) -> tuple[SourceRecord, ...] | None:
    """Return `recorded` with the times of `sources` if all contents are unchanged; else None."""
    if [record.identity for record in recorded] != [source.record.identity for source in sources]:
        return None
    confirmed = []
    for record, source in zip(recorded, sources, strict=True):
        if same_times(record.times, source.record.times):
            confirmed.append(record)
            continue
        if not record.parts or not all(
            _is_unchanged(
                SourcePart(source, read.begin, read.end), read.xxh3, read.layout_xxh3, options
            )
            for read in record.parts
        ):
            return None
        confirmed.append(replace(source.record, parts=record.parts))
    return tuple(confirmed)


def _is_unchanged(
    part: SourcePart, xxh3: str, layout_xxh3: str | None, options: ReadOptions
) -> bool:
    """Return whether a part still has the content with these checksums. `layout_xxh3` may be None
    if all parts of a file, other than a table, are compared."""
    if part.source.read_once or (layout_xxh3 is None and part.source.is_hashed_by_documents):
        return False
    reader = part_reader(part, options, RejectedDocuments(True, lambda bad: None))
    try:
        reader.scan_layout()
    except DataError:
        return False  # the next reader reports the error
    return reader.checksum() == xxh3 and layout_xxh3 in (None, reader.layout())
