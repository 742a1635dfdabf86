"""Atomic writing of the page; only an older report is overwritten."""

from __future__ import annotations

from pathlib import Path

from bigtrain.errors import OutputError
from bigtrain.report.page import MARKER
from bigtrain.system.files import write_whole, writing

_REMEDY = "choose another file as --output"
_FIRST_BYTES = 1024


def write_page(path: Path, html: str) -> None:
    """Write the page; replace an older report.

    Raises OutputError if it cannot be written, or if `path` is another file.
    """
    if path.is_dir():
        raise OutputError(
            f"{path}: is a directory -> name a file as --output, {path / 'report.html'}"
        )
    with writing(path, _REMEDY):
        if path.exists() and not _is_report(path):
            raise OutputError(
                f"{path}: exists and is not a bigtrain report, so it is not overwritten "
                "-> choose another file as --output, or remove it first"
            )
        write_whole(path, html.encode())


def _is_report(path: Path) -> bool:
    with path.open("rb") as file:
        start = file.read(_FIRST_BYTES)
    return not start or MARKER.encode() in start
