"""Existing contents of an output: nothing, an unfinished or finished dataset, or foreign files."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from bigtrain.data.shards.dataset import open_dataset
from bigtrain.data.shards.manifest import (
    ERRORS_NAME,
    MANIFEST_NAME,
    TOKENIZER_DIRECTORY,
    WORK_DIRECTORY,
    Manifest,
    read_manifest,
    write_manifest,
)
from bigtrain.data.sources.discovery import Source
from bigtrain.data.tokenize_job.change_detection import confirm_sources, untouched
from bigtrain.data.tokenize_job.request import BuildRequest
from bigtrain.data.tokenize_job.workspace import Workspace
from bigtrain.data.tokenizers.fingerprint import fingerprint
from bigtrain.data.tokenizers.tokenizer import load_tokenizer
from bigtrain.errors import DataError
from bigtrain.system.files import require_free

logger = logging.getLogger(__name__)

OWN_NAMES = re.compile(
    rf"(train|held_out)-\d+\.(bin|idx|mask|blocks)|{ERRORS_NAME}|{TOKENIZER_DIRECTORY}"
    rf"|{re.escape(WORK_DIRECTORY)}(\.\w+\.partial)?"
)
"""Files of an unfinished dataset."""


def inputs_outside(output: Path, sources: Sequence[Source]) -> list[Source]:
    """Return `sources` without files that the command itself writes into a folder that it also
    reads.

    Raises DataError if none remain, or if an input is the output itself.
    """
    # Avoid the real path of every source: it checks every folder above each of many files.
    targets = (os.path.abspath(output), os.path.realpath(output))
    folders = tuple(target + os.sep for target in targets)
    outside = []
    for source in sources:
        if source.address is not None or source.is_standard_input:
            outside.append(source)
            continue
        path = os.path.abspath(source.path)
        if path in targets:
            raise DataError(f"--output {output} is one of the inputs")
        if not path.startswith(folders):
            outside.append(source)
    if not outside:
        raise DataError(f"every input is inside --output {output}")
    return outside


def is_own(workspace: Workspace) -> bool:
    """Return whether the output is free or an unfinished dataset; False if that was finished just
    now.

    Raises DataError if it contains anything else.
    """
    try:
        _require_own(workspace)
    except DataError:
        if not workspace.is_finished():
            raise
        return False
    return True


def _require_own(workspace: Workspace) -> None:
    output = workspace.output
    try:
        require_free(output)
        return
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


def finished_manifest(
    request: BuildRequest, sources: Sequence[Source], workspace: Workspace
) -> Manifest:
    """Return the manifest in the output if it matches this input. Raise DataError with the
    differences."""
    output = request.output
    manifest = read_manifest(output)
    current: Manifest | None = manifest
    # With other options it is refused anyway, and would be read differently.
    same_options = _are_same_options(manifest, request)
    if same_options and not untouched(manifest.sources, sources):
        current = _confirmed(request, sources, manifest)
    different = [
        what
        for what, same in (
            ("input files", current is not None),
            ("tokenizer", _is_same_tokenizer(manifest, request.tokenizer)),
            ("chat template", _is_same_template(manifest, request)),
            ("options", same_options),
        )
        if not same
    ]
    if different:
        raise DataError(
            f"{output} contains a dataset of other {' and '.join(different)}; nothing was written "
            "-> choose another --output, or remove it first"
        )
    open_dataset(output, check="sizes")
    if current is not None and current is not manifest:
        # With the new times, so that the next start does not need to read the inputs.
        draft = output / f"{MANIFEST_NAME}.{workspace.token}.partial"
        with suppress(OSError):  # a read-only dataset: the next start checks again
            write_manifest(output, current, draft)
    workspace.remove()
    return manifest


def _confirmed(
    request: BuildRequest, sources: Sequence[Source], manifest: Manifest
) -> Manifest | None:
    """Return `manifest` with the times of its touched inputs, if their content is unchanged."""
    confirmed = confirm_sources(manifest.sources, sources, request.reading())
    if confirmed is None:
        return None
    logger.warning(
        "the times of input files changed; their content still matches %s", request.output
    )
    return manifest.model_copy(update={"sources": confirmed})


def _are_same_options(manifest: Manifest, request: BuildRequest) -> bool:
    """Return whether the options give the same dataset. A dataset of a version without text
    beginnings is the same if the tokenizer adds none."""
    old, new = manifest.options, request.options
    if old.beginning_of_text is not None or old == new:
        return old == new
    if old.model_copy(update={"beginning_of_text": new.beginning_of_text}) != new:
        return False
    if new.beginning_of_text == "auto" and new.chat:
        return True
    return not request.beginning_ids(load_tokenizer(request.tokenizer))


def _is_same_tokenizer(manifest: Manifest, name: str) -> bool:
    """Compare tokenizers by their files; if these differ, load it, which takes seconds."""
    files_xxh3 = fingerprint(name)
    if files_xxh3 is not None and files_xxh3 == manifest.tokenizer.files_xxh3:
        return True
    return load_tokenizer(name).hash == manifest.tokenizer.hash


def _is_same_template(manifest: Manifest, request: BuildRequest) -> bool:
    if not request.options.chat:
        return True
    template = request.find_template(load_tokenizer(request.tokenizer))
    return (None if template is None else template.hash) == manifest.tokenizer.chat_template
