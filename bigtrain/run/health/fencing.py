"""Fencing: only the newest launch of a run may write its directory, not a stale one.

::

    RUN/generations/00000007.json              the launch that holds the run token
    RUN/generations/00000006.superseded.json   stale launches: generation, attempt, host, pid, ...

After a network partition a scheduler may start a run again while processes of the earlier launch
still run. So every launch acquires a run token, a fencing token that never expires: the next
generation number, claimed by a hard link, which only one process can create (open with O_EXCL if
links are not supported); it then renames the files of earlier launches. Before every change of the
directory the main rank checks that the file of this launch still has its name: opening a file
queries an NFS server, while listings may be cached for up to half a minute. One operation that was
permitted an instant before may still be executed; checkpoints are complete regardless of who
commits them.

The main rank calls all this; nothing is collective. Imports no torch.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import socket
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from bigtrain.errors import RunRemovedError, StaleLaunchError
from bigtrain.system.files import create_whole

DIRECTORY = "generations"
_HOLDER_NAME = re.compile(r"(\d{8,})\.json")
_STALE_SUFFIX = ".superseded.json"
_SECONDS_BETWEEN_CHECKS = 0.5


@dataclass(frozen=True)
class TokenHolder:
    """Launch of a run that holds the run token. attempt: random. launch: the elastic launcher's id
    of the launch (it survives the launcher's restarts), or else empty. since: UTC,
    human-readable."""

    generation: int
    attempt: str
    host: str
    pid: int
    slurm_job_id: str | None
    launch: str
    since: str

    def __str__(self) -> str:
        job = f", Slurm job {self.slurm_job_id}" if self.slurm_job_id else ""
        return (
            f"generation {self.generation} (host {self.host}, process {self.pid}{job}, since "
            f"{self.since})"
        )


@dataclass
class RunToken:
    """Fencing token of a launch for its run directory."""

    run_directory: Path
    holder: TokenHolder
    _checked_at: float = field(default=0.0)
    _was_lost: bool = field(default=False)

    def check(self) -> None:
        """Raise StaleLaunchError if a later launch holds the directory, RunRemovedError if
        deleted."""
        if self._is_removed():
            raise RunRemovedError(
                f"{self.run_directory} was removed while the run wrote to it, with its checkpoints "
                "-> restore them, or start the run again to start over"
            )
        newer = self.newer_launch()
        if newer is not None:
            raise StaleLaunchError(
                f"{self.run_directory} is held by {newer}; this is generation "
                f"{self.holder.generation}, a stale launch, which stops writing"
            )

    def lost(self) -> bool:
        """Return whether `check` would raise; reads the directory at most twice a second."""
        now = time.monotonic()
        if not self._was_lost and now - self._checked_at >= _SECONDS_BETWEEN_CHECKS:
            self._checked_at = now
            self._was_lost = self._is_removed() or self.newer_launch() is not None
        return self._was_lost

    def _is_removed(self) -> bool:
        """Return whether the run directory was removed: both the records of launches and the first
        file of the run are missing. A save may have created other files since."""
        for name in (DIRECTORY, "config.json"):
            try:
                (self.run_directory / name).stat()
            except FileNotFoundError:
                continue
            except OSError:
                pass  # a file system that does not respond may recover
            return False
        return True

    def newer_launch(self) -> str | None:
        """Return the later launch that holds the directory, human-readable; or None."""
        newest = newest_holder(self.run_directory)
        if newest is not None and newest.generation >= self.holder.generation:
            return str(newest) if newest.generation > self.holder.generation else None
        # The listing is outdated and lacks this launch, or this launch's file has been renamed.
        path = _holder_path(self.run_directory, self.holder.generation)
        is_renamed = _read_holder(path) is None and _stale_path(path).exists()
        if not is_renamed:  # without either file: a user removed them
            return None
        # A later launch has renamed it, but the listing is outdated: open the next few files.
        for generation in range(self.holder.generation + 1, self.holder.generation + 10):
            later = _read_holder(_holder_path(self.run_directory, generation))
            if later is not None:
                return str(later)
        return "a later launch of the run"


@dataclass
class RunClaim:
    """Claim of a launch on its run directory. token: the main rank's, once acquired; generation:
    its number, on every rank."""

    run_directory: Path
    token: RunToken | None = None
    generation: int | None = None

    def check(self) -> None:
        """Raise as `RunToken.check`, on the main rank; other ranks have no run token. Not
        collective."""
        if self.token is not None:
            self.token.check()

    def is_lost(self) -> bool:
        """Return whether `check` would raise; reads the directory at most twice a second."""
        return self.token is not None and self.token.lost()

    def is_stale(self) -> bool:
        """Return whether a later launch holds the run directory, if this rank can see it."""
        if self.token is not None:
            return self.token.newer_launch() is not None
        newest = newest_holder(self.run_directory)
        return newest is not None and newest.generation > (self.generation or 0)


def acquire(run_directory: Path, environment: Mapping[str, str]) -> RunToken:
    """Acquire the run token of `run_directory` (created if missing) and fence off its holder.
    Raises StaleLaunchError if an elastic launcher restarts a run that another launch has acquired
    in the meantime: the two would fence each other off forever."""
    directory = run_directory / DIRECTORY
    directory.mkdir(parents=True, exist_ok=True)
    # torchrun's id of this launch; each requeue of a Slurm job is another launch.
    names = ("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "SLURM_RESTART_COUNT")
    ids = [environment.get(name, "") for name in names]
    has_elastic_launcher = ids[0] != ""
    launch = ":".join(ids) if has_elastic_launcher else ""
    attempt = secrets.token_hex(4)

    # Refuse a restart of a launch whose token another launch has acquired.
    is_restart = environment.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    current = newest_holder(run_directory)
    if is_restart and launch and current is not None and current.launch != launch:
        for stale in map(_read_holder, directory.glob(f"*{_STALE_SUFFIX}")):
            if stale is not None and stale.launch == launch:
                raise StaleLaunchError(
                    f"{run_directory} is held by {current}, which acquired it from this launch "
                    f"({launch}); it is not restarted -> end this launch"
                )

    # Claim the next generation number.
    while True:
        newest = max(_generations(directory), default=0)
        holder = TokenHolder(
            generation=newest + 1,
            attempt=attempt,
            host=socket.gethostname(),
            pid=os.getpid(),
            slurm_job_id=environment.get("SLURM_JOB_ID"),
            launch=launch,
            since=datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC"),
        )
        path = _holder_path(run_directory, holder.generation)
        content = json.dumps(asdict(holder)).encode() + b"\n"
        if not create_whole(path, content, path.with_name(f".{attempt}.draft")):
            # Usually another launch has created it. But if the reply to this launch's link was
            # lost, the NFS client has retried and found the link of this launch.
            existing = _read_holder(path)
            if existing is None or existing.attempt != attempt:
                continue
        # A launch with an outdated listing may have claimed a number that had become free.
        if max(_generations(directory)) == holder.generation:
            break

    # Fence off earlier launches, which check the file name before they write.
    for number in _generations(directory):
        if number < holder.generation:
            path = _holder_path(run_directory, number)
            try:
                path.rename(_stale_path(path))
            except FileNotFoundError:
                continue  # an even later launch was faster
    return RunToken(run_directory, holder)


def newest_holder(run_directory: Path) -> TokenHolder | None:
    """Return the launch that holds the run token, or None."""
    for number in sorted(_generations(run_directory / DIRECTORY), reverse=True):
        holder = _read_holder(_holder_path(run_directory, number))
        if holder is not None:
            return holder
    return None


def _generations(directory: Path) -> list[int]:
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        return []
    return [int(match[1]) for match in map(_HOLDER_NAME.fullmatch, names) if match]


def _holder_path(run_directory: Path, generation: int) -> Path:
    return run_directory / DIRECTORY / f"{generation:08d}.json"


def _stale_path(path: Path) -> Path:
    return path.with_name(path.name.removesuffix(".json") + _STALE_SUFFIX)


def _read_holder(path: Path) -> TokenHolder | None:
    try:
        return TokenHolder(**json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError):
        return None
