"""Links among the files of a folder: one rule for all inputs that are discovered, not named.

- A link to a file in the folder is read as that file; if that file is an input itself, it is read
  once. A link to a folder in the folder is not followed: its files are found anyway.
- A link out of the folder is refused by name: otherwise the author of the folder could have any
  file of this machine read. ``--follow-links`` reads it. In a snapshot of the Hugging Face cache
  the blobs of the repository are part of the folder.
- A broken link is refused, and so is anything but a regular file (a pipe, a socket).

An input that is named itself is always followed.
"""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from bigtrain.errors import DataError

logger = logging.getLogger(__name__)

Excluded = Callable[[str], bool]
"""Predicate: whether a path below the folder is excluded."""


@dataclass
class Links:
    """Links in `folder`, which is an input or the fixed part of a glob, as it was named."""

    folder: str
    follow: bool
    _resolved: dict[str, str] = field(default_factory=dict)

    @cached_property
    def _allowed_folders(self) -> tuple[str, ...]:
        """Folders whose files may be read: the folder, and the blobs of a Hugging Face snapshot."""
        root = os.path.realpath(self.folder)
        blobs = [
            str(parent.with_name("blobs"))
            for parent in (Path(root), *Path(root).parents)
            if parent.name == "snapshots"
        ]
        return (root, *blobs[:1])

    def files(self, excluded: Excluded) -> list[tuple[str, str]]:
        """Return the files below the folder that are not excluded: relative paths, and paths to
        open. Raises DataError for a link to a folder elsewhere, unless links are followed."""
        files: list[tuple[str, str]] = []
        visited_folders = {os.path.realpath(self.folder)}
        pending_folders = [(self.folder, "")]
        # A stack of folders to scan, and their paths below the first: the order is of a recursion.
        while pending_folders:
            folder, below = pending_folders.pop()
            try:
                entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
            except OSError as error:
                raise DataError(f"--input {folder}: cannot be read: {error.strerror}") from error
            prefix = "" if folder == "." else folder
            folders = []
            for entry in entries:
                name, path = os.path.join(below, entry.name), os.path.join(prefix, entry.name)
                try:
                    is_folder = entry.is_dir()
                except OSError:  # a link to itself
                    is_folder = False
                if not is_folder:
                    files.append((name, path))
                elif not excluded(name) and self._enters(entry, path, name, visited_folders):
                    folders.append((path, name))
            pending_folders += reversed(folders)
        return files

    def _enters(self, entry: os.DirEntry[str], path: str, name: str, visited: set[str]) -> bool:
        """Return whether to scan a folder: not a second time through a link. visited: real paths of
        scanned folders, which is updated. Raises DataError for a link out of the folder."""
        if not entry.is_symlink():
            if self.follow:  # otherwise no link leads into a folder
                visited.add(os.path.realpath(path))
            return True
        target = os.path.realpath(path)
        if not self.follow and not self._is_inside(target):
            raise self._leads_out(path, name, target)
        if not self.follow or target in visited or self._is_inside(target):
            logger.warning("%s is a link to %s, which is read once", path, target)
            return False
        visited.add(target)
        return True

    def without_duplicates(self, files: Sequence[tuple[str, str]]) -> list[str]:
        """Return the paths to open of `files`, as `Links.files` returns them, without links to
        another file of the list. Raises DataError for a broken link, for a link out of the folder
        if links are not followed, and for anything but a regular file."""
        links = {path: self._target(path, below) for below, path in files}
        if all(target is None for target in links.values()):
            return list(links)
        # Files that are read without a link, and then each link to a further file.
        real_paths = {
            os.path.join(self._parent(path), os.path.basename(path))
            for path, target in links.items()
            if target is None
        }
        paths, duplicates = [], []
        for path, target in links.items():
            if target is not None and target in real_paths:
                duplicates.append(path)
                continue
            if target is not None:
                real_paths.add(target)
            paths.append(path)
        if duplicates:
            logger.warning(
                "%d links to files that are inputs themselves are not read again, such as %s",
                len(duplicates),
                duplicates[0],
            )
        return paths

    def _target(self, path: str, below: str) -> str | None:
        """Return the target of a link, or of a file in a linked folder; None for a plain file."""
        try:
            status = os.stat(path)
        except OSError as error:
            if os.path.islink(path):
                raise DataError(
                    f"--input {self.folder}: {path} is a link to {os.readlink(path)}, which cannot "
                    f"be read ({error.strerror}) -> remove it, or --exclude {below}"
                ) from error
            raise DataError(f"--input {path}: {error.strerror}") from error
        if not stat.S_ISREG(status.st_mode):
            raise DataError(
                f"--input {self.folder}: {path} is not a regular file (a pipe, socket or device) "
                f"-> name it as a separate input, or --exclude {below}"
            )
        parent = self._parent(path)
        if not os.path.islink(path):
            is_inside = self._is_inside(parent)
            target = None if is_inside else os.path.join(parent, os.path.basename(path))
        else:
            target = os.path.realpath(path)
        if target is not None and not self.follow and not self._is_inside(target):
            raise self._leads_out(path, below, target)
        return target

    def _parent(self, path: str) -> str:
        """Return the real path of the folder of `path`: many files share one."""
        folder = os.path.dirname(path) or "."
        if folder not in self._resolved:
            self._resolved[folder] = os.path.realpath(folder)
        return self._resolved[folder]

    def _is_inside(self, target: str) -> bool:
        return any(
            target == folder or target.startswith(folder + os.sep)
            for folder in self._allowed_folders
        )

    def _leads_out(self, path: str, below: str, target: str) -> DataError:
        return DataError(
            f"--input {self.folder}: {path} is a link to {target}, outside of the folder -> "
            f"--follow-links to read the targets of links, or --exclude {below}"
        )
