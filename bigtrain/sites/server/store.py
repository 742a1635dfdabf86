"""Database and files of an outer server: what it has confirmed survives a kill and a full disk.

::

    server.sqlite             the run, its sites, contributions, outer steps and events
    state-000012-ID           weights, momentum and rounding error after outer step 12
    parts/ID                  messages of a site for the next step, as received
    layouts/DIGEST            layout documents of sites

A file is written and synced before the row that names it; files without a row are removed when the
server starts. A transaction is on disk completely, or not at all.
"""

from __future__ import annotations

import json
import secrets
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import astuple, dataclass, fields
from itertools import starmap
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file

from bigtrain.errors import LaunchError
from bigtrain.sites.protocol import DeliverRequest
from bigtrain.system.files import sync_to_disk, write_whole

_SCHEMA = """
CREATE TABLE IF NOT EXISTS run (document TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS sites (
    site INTEGER PRIMARY KEY, run TEXT, num_joins INTEGER, is_active INTEGER, is_training INTEGER,
    has_left INTEGER, number INTEGER, refused TEXT, layout TEXT, plain TEXT, timeout_seconds REAL);
CREATE TABLE IF NOT EXISTS parts (
    site INTEGER, attempt TEXT, rank INTEGER, part INTEGER, file TEXT NOT NULL,
    PRIMARY KEY (site, attempt, rank, part));
CREATE TABLE IF NOT EXISTS deliveries (
    site INTEGER PRIMARY KEY, attempt TEXT, base INTEGER, step INTEGER, last_step INTEGER,
    tokens INTEGER, num_messages INTEGER);
CREATE TABLE IF NOT EXISTS rounds (
    id INTEGER PRIMARY KEY, number INTEGER, attempt TEXT UNIQUE, record TEXT, file TEXT);
CREATE TABLE IF NOT EXISTS events (
    event TEXT, who TEXT, reason TEXT, count INTEGER, PRIMARY KEY (event, who, reason));
"""
_KEPT_RECORDS = 500
_DELIVERED = ("site", "attempt", "base", "step", "last_step", "tokens", "num_messages")


@dataclass(frozen=True)
class SiteRow:
    """A site that has joined.

    run: id of its run directory. num_joins: how often it has started. is_active: other sites wait
    for it. is_training: it took part in an outer step since it joined. number: its last outer step.
    refused: why it takes part in no outer step until it joins again; empty if it may. layout:
    digest. plain: JSON list of parameters.
    """

    site: int
    run: str = ""
    num_joins: int = 0
    is_active: bool = False
    is_training: bool = False
    has_left: bool = False
    number: int = 0
    refused: str = ""
    layout: str = ""
    plain: str = "[]"
    timeout_seconds: float = 600.0


class EventKey(NamedTuple):
    """What equal events have in common, see `OuterEvent`."""

    event: str
    who: str
    reason: str


class ServerDirectory:
    """The directory of an outer server. Methods return when what they wrote is on disk, and raise
    OSError, with nothing changed, if it cannot be written."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        if (directory / "run.json").exists():
            raise LaunchError(
                f"{directory} is of an earlier version of bigtrain (it has a run.json), which this "
                "one does not read -> a new --directory, or that version"
            )
        for name in ("parts", "layouts"):
            (directory / name).mkdir(parents=True, exist_ok=True)
        self._lock = threading.RLock()
        self._unused: list[Path] = []  # files to remove, which lose their row in the transaction
        self._run: dict[str, Any] | None = None
        self._connection = self._connect()
        with self.transaction():
            for statement in filter(str.strip, _SCHEMA.split(";")):
                self._connection.execute(statement)
        # Remove files that no row names, of interrupted writes.
        parts = [f"parts/{name}" for (name,) in self._rows("SELECT file FROM parts")]
        layouts = [f"layouts/{row.layout}" for row in self.sites().values()]
        named = {*self._state_files(), *(self.directory / name for name in parts + layouts)}
        for pattern in ("parts/*", "layouts/*", "state-*"):
            for path in set(self.directory.glob(pattern)) - named:
                path.unlink()

    def _connect(self) -> sqlite3.Connection:
        path = self.directory / "server.sqlite"
        connection = sqlite3.connect(path, timeout=1, isolation_level=None, check_same_thread=False)
        try:
            # Exclusive: a second server is refused, and a full disk cannot break shared memory.
            for pragma in ("locking_mode=EXCLUSIVE", "journal_mode=WAL", "synchronous=FULL"):
                connection.execute(f"PRAGMA {pragma}")
        except sqlite3.OperationalError as error:
            connection.close()
            if "locked" in str(error):
                raise LaunchError(f"another server uses {self.directory} ({error})") from error
            raise OSError(f"{path}: {error}") from error
        except sqlite3.DatabaseError as error:
            connection.close()
            raise LaunchError(
                f"{path} is not a database: {error} -> restore the directory, or choose a new one"
            ) from error
        return connection

    def close(self) -> None:
        """Close the database, for another server."""
        with self._lock:
            self._connection.close()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Make all changes inside durable together, or none; a nested transaction belongs to the
        outer transaction."""
        with self._lock:
            if self._connection.in_transaction:
                yield
                return
            self._unused = []
            try:
                self._connection.execute("BEGIN IMMEDIATE")
                yield
                self._commit()
            except BaseException as error:
                self._run = None
                with suppress(sqlite3.Error):
                    self._connection.rollback()
                if isinstance(error, sqlite3.OperationalError):
                    raise OSError(f"{self.directory / 'server.sqlite'}: {error}") from error
                raise
            for path in self._unused:
                with suppress(OSError):  # then the next start removes it
                    path.unlink()

    def _commit(self) -> None:
        """Commit; if that fails, as with a failed sync, find out whether the transaction is in the
        database nevertheless."""
        # A counter that is written in the transaction: it shows whether COMMIT took effect.
        version = (int(self._scalar("PRAGMA user_version")) + 1) % (1 << 31)
        self._connection.execute(f"PRAGMA user_version = {version}")
        try:
            self._connection.execute("COMMIT")
        except sqlite3.OperationalError:
            with suppress(sqlite3.Error):
                self._connection.close()
            self._connection = self._connect()
            if int(self._scalar("PRAGMA user_version")) != version:
                raise

    def _scalar(self, sql: str) -> Any:
        """Return the only value of a query; None without a row."""
        return next((value for (value,) in self._rows(sql)), None)

    def _rows(self, sql: str, *values: Any) -> list[tuple[Any, ...]]:
        with self._lock:
            return self._connection.execute(sql, values).fetchall()

    def _write(self, sql: str, *values: Any) -> None:
        with self.transaction():
            self._connection.execute(sql, values)

    # The run and its sites

    def run(self) -> dict[str, Any] | None:
        """Return the description of the run, which callers must not change; None in a new
        directory."""
        if self._run is None:  # every request needs it, and it names every parameter
            document = self._scalar("SELECT document FROM run")
            self._run = None if document is None else json.loads(document)
        return self._run

    def write_run(self, document: Mapping[str, Any]) -> None:
        """Replace the description of the run."""
        with self.transaction():
            self._write("DELETE FROM run")
            self._write("INSERT INTO run VALUES (?)", json.dumps(document))
            self._run = dict(document)

    def sites(self) -> dict[int, SiteRow]:
        """Return all sites that have joined."""
        rows = starmap(SiteRow, self._rows("SELECT * FROM sites ORDER BY site"))
        return {row.site: row for row in rows}

    def write_site(self, row: SiteRow) -> None:
        """Replace the row of a site."""
        marks = ", ".join("?" * len(fields(SiteRow)))
        self._write(f"INSERT OR REPLACE INTO sites VALUES ({marks})", *astuple(row))

    def layout(self, digest: str) -> bytes | None:
        """Return a layout document; None where it is not stored."""
        try:
            return (self.directory / "layouts" / digest).read_bytes()
        except FileNotFoundError:
            return None

    def write_layout(self, digest: str, document: bytes | memoryview) -> None:
        """Store a layout document."""
        write_whole(self.directory / "layouts" / digest, document)

    # Contributions (exchange: server)

    def write_part(self, site: int, key: tuple[str, int, int], body: bytes) -> None:
        """Store a message of a site for the next step; a message with an equal key (attempt, rank
        and part) is replaced."""
        path = self.directory / "parts" / secrets.token_hex(8)
        write_whole(path, body)
        condition = "site = ? AND attempt = ? AND rank = ? AND part = ?"
        try:
            with self.transaction():
                self._delete_parts(condition, site, *key)
                self._write("INSERT INTO parts VALUES (?, ?, ?, ?, ?)", site, *key, path.name)
        except BaseException:
            path.unlink(missing_ok=True)
            raise

    def _delete_parts(self, condition: str, *values: Any) -> None:
        rows = self._rows(f"SELECT file FROM parts WHERE {condition}", *values)
        self._unused += [self.directory / "parts" / name for (name,) in rows]
        self._write(f"DELETE FROM parts WHERE {condition}", *values)

    def parts(self, site: int, attempt: str) -> list[Path]:
        """Return the files of an attempt's messages, in the order of ranks and parts."""
        sql = "SELECT file FROM parts WHERE site = ? AND attempt = ? ORDER BY rank, part"
        return [self.directory / "parts" / name for (name,) in self._rows(sql, site, attempt)]

    def deliver(self, delivery: DeliverRequest) -> None:
        """Store that an attempt is complete; remove the site's earlier attempts."""
        with self.transaction():
            self._delete_parts("site = ? AND attempt != ?", delivery.site, delivery.attempt)
            row = [getattr(delivery, name) for name in _DELIVERED]
            self._write("INSERT OR REPLACE INTO deliveries VALUES (?, ?, ?, ?, ?, ?, ?)", *row)

    def deliveries(self) -> dict[int, DeliverRequest]:
        """Return the complete contributions for the next step, by site."""
        rows = self._rows("SELECT * FROM deliveries ORDER BY site")
        deliveries = [dict(zip(_DELIVERED, row, strict=True)) for row in rows]
        return {d["site"]: DeliverRequest.model_construct(**d) for d in deliveries}

    def forget(self, sites: Iterable[int]) -> None:
        """Remove the contributions of sites for the next step."""
        with self.transaction():
            for site in sites:
                self._delete_parts("site = ?", site)
                self._write("DELETE FROM deliveries WHERE site = ?", site)

    # Outer steps

    def record(self) -> dict[str, Any] | None:
        """Return the record of the last outer step; None before the first."""
        record = self._scalar("SELECT record FROM rounds ORDER BY id DESC LIMIT 1")
        return None if record is None else json.loads(record)

    def records_after(self, number: int, limit: int = _KEPT_RECORDS) -> list[dict[str, Any]]:
        """Return the records of the newest outer steps later than `number`, oldest first."""
        sql = "SELECT record FROM rounds WHERE number > ? ORDER BY id DESC LIMIT ?"
        return [json.loads(record) for (record,) in reversed(self._rows(sql, number, limit))]

    def is_committed(self, attempt: str) -> bool:
        """Return whether the outer step of an attempt is in the database."""
        return bool(self._rows("SELECT 1 FROM rounds WHERE attempt = ?", attempt))

    def write_step(
        self,
        record: Mapping[str, Any],
        sites: Iterable[SiteRow],
        events: Mapping[EventKey, int],
        *,
        attempt: str | None = None,
        tensors: Mapping[str, torch.Tensor] | None = None,
        used: Sequence[int] = (),
    ) -> None:
        """Store an outer step: its record, the sites and events after it, and `tensors`, the state
        of the weights, if the server holds them. Remove the contributions of the sites `used`."""
        number = int(record["number"])
        path = self.directory / f"state-{number:06d}-{secrets.token_hex(4)}"
        try:
            if tensors is not None:
                save_file(dict(tensors), path)
                sync_to_disk(path)
                sync_to_disk(self.directory)
            # One transaction, which replaces the state file of the outer step before.
            with self.transaction():
                self._unused += self._state_files()
                name = None if tensors is None else path.name
                self._write("UPDATE rounds SET file = NULL WHERE file IS NOT NULL")
                columns = "rounds (number, attempt, record, file)"
                row = number, attempt, json.dumps(record), name
                self._write(f"INSERT INTO {columns} VALUES (?, ?, ?, ?)", *row)
                for site in sites:
                    self.write_site(site)
                self.forget(used)
                self._write("DELETE FROM events")
                for key, count in events.items():
                    self.write_event(key, count)
        except BaseException:
            path.unlink(missing_ok=True)
            raise

    def _state_files(self) -> list[Path]:
        rows = self._rows("SELECT file FROM rounds WHERE file IS NOT NULL")
        return [self.directory / name for (name,) in rows]

    def state(self) -> dict[str, torch.Tensor] | None:
        """Return the tensors after the last outer step; None if there are none yet."""
        path = next(iter(self._state_files()), None)
        try:
            return None if path is None else load_file(path)
        except Exception as error:  # whatever safetensors raises for a file that is damaged
            raise LaunchError(f"{path} cannot be read: {error} -> restore the directory") from error

    # Events

    def events(self) -> dict[EventKey, int]:
        """Return how often each event happened since the last outer step."""
        rows = self._rows("SELECT * FROM events ORDER BY rowid")
        return {EventKey(event, who, reason): count for event, who, reason, count in rows}

    def write_event(self, key: EventKey, count: int) -> None:
        """Store how often an event has happened."""
        self._write(
            "INSERT INTO events VALUES (?, ?, ?, ?) ON CONFLICT DO UPDATE SET count = ?",
            *(*key, count, count),
        )
