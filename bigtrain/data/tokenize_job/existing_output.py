"""What an output already holds: nothing, an unfinished or finished dataset, or foreign files."""

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
"""What a dataset that is not finished may consist of."""


def inputs_outside(output: Path, sources: Sequence[Source]) -> list[Source]:
    """`sources` without what the command itself writes into a folder that it also reads.

    Raises DataError where nothing is left, or an input is the output itself.
    """
    # Not the real path of every source: that looks at every folder above each of many files.
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
        raise DataError(f"every input lies in --output {output}")
    return outside


def is_own(workspace: Workspace) -> bool:
    """Whether the output is free or an unfinished dataset; not where that was finished just now.

    Raises DataError where it holds anything else.
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
        # Looked for only now: another rank may have begun the work just before.
        if not workspace.directory.is_dir():
            raise
    for path in output.iterdir():
        if not OWN_NAMES.fullmatch(path.name):
            raise DataError(
                f"{path} is not part of the unfinished dataset in {output}; nothing was "
                "written -> name another --output, or remove it first"
            )


def finished_manifest(
    request: BuildRequest, sources: Sequence[Source], workspace: Workspace
) -> Manifest:
    """The manifest in the output, if it is of this input. Raises DataError saying what differs."""
    output = request.output
    manifest = read_manifest(output)
    current: Manifest | None = manifest
    # Under other options it is refused anyway, and would not be read in the same way.
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
            f"{output} holds a dataset of other {' and '.join(different)}; nothing was written -> "
            "name another --output, or remove it first"
        )
    open_dataset(output, check="sizes")
    if current is not None and current is not manifest:
        # With the new times, so that the next start need not read the inputs.
        draft = output / f"{MANIFEST_NAME}.{workspace.token}.partial"
        with suppress(OSError):  # a dataset that may only be read: the next start looks again
            write_manifest(output, current, draft)
    workspace.remove()
    return manifest


def _confirmed(
    request: BuildRequest, sources: Sequence[Source], manifest: Manifest
) -> Manifest | None:
    """`manifest` with the times of its touched inputs, if these hold what it was made of."""
    confirmed = confirm_sources(manifest.sources, sources, request.reading())
    if confirmed is None:
        return None
    logger.warning(
        "the times of input files changed; all of them hold what %s was made of", request.output
    )
    return manifest.model_copy(update={"sources": confirmed})


def _are_same_options(manifest: Manifest, request: BuildRequest) -> bool:
    """Whether the options give the same dataset. One of a version without beginnings of texts is
    the same where the tokenizer adds none."""
    old, new = manifest.options, request.options
    if old.beginning_of_text is not None or old == new:
        return old == new
    if old.model_copy(update={"beginning_of_text": new.beginning_of_text}) != new:
        return False
    if new.beginning_of_text == "auto" and new.chat:
        return True
    return not request.beginning_ids(load_tokenizer(request.tokenizer))


def _is_same_tokenizer(manifest: Manifest, name: str) -> bool:
    """By its files; where these differ it is loaded, which takes seconds."""
    found = fingerprint(name)
    if found is not None and found == manifest.tokenizer.files_xxh3:
        return True
    return load_tokenizer(name).hash == manifest.tokenizer.hash


def _is_same_template(manifest: Manifest, request: BuildRequest) -> bool:
    if not request.options.chat:
        return True
    template = request.find_template(load_tokenizer(request.tokenizer))
    return (None if template is None else template.hash) == manifest.tokenizer.chat_template
