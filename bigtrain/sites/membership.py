"""Membership of a site at an outer server: requests, heartbeats, rounds of the direct exchange."""

from __future__ import annotations

import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from bigtrain.errors import LaunchError, TrainingError
from bigtrain.settings.sections.sites import SitesSection
from bigtrain.sites.client import (
    DetachedError,
    RefusedByServerError,
    ServerClient,
    UnreachableError,
    read_token,
)
from bigtrain.sites.protocol import HEARTBEAT_TIMEOUT, Header, RoundPlan

_POLL_SECONDS = 15.0
_LEAVE_SECONDS = 5.0
_COMPARE_SECONDS = 5.0
_LONGEST_REASON = 500
_MOST_NAMED = 8
_OUTER_SETTINGS = ("count", "inner_steps", "outer", "codec")
"""Fields of the section `sites` that the server needs."""
_HEARTBEAT_PAUSE_SECONDS = 0.1


class Membership:
    """Membership of this site at the server, for one rank.

    Every rank may `ask`; further methods are for the main rank, which joins and sends heartbeats.
    Not collective. run: id of the run directory; a second run with this ``sites.index`` is
    refused.
    """

    def __init__(self, sites: SitesSection, run: str) -> None:
        assert sites.server is not None
        token = read_token(Path(sites.token_file or ""))
        certificate = None if sites.certificate_file is None else Path(sites.certificate_file)
        self.sites = sites
        self._run = run
        self._client = ServerClient(sites.server, token, certificate)
        self._ended = threading.Event()
        self._heartbeat: threading.Thread | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of payloads that this rank sent so far."""
        return self._client.num_bytes

    def deadline(self) -> float:
        """Return when a request that begins now times out."""
        return time.monotonic() + self.sites.timeout_seconds

    def ask(
        self,
        action: str,
        header: Mapping[str, Any],
        deadline: float | None = None,
        payload: bytes = b"",
    ) -> Header:
        """Return the header of the reply. Raises DetachedError."""
        return self.fetch(action, header, deadline, payload)[0]

    def fetch(
        self,
        action: str,
        header: Mapping[str, Any],
        deadline: float | None = None,
        payload: bytes = b"",
    ) -> tuple[Header, memoryview]:
        """Return header and payload of the reply. Raises DetachedError."""
        header = {"site": self.sites.index, "run": self._run, **header}
        if deadline is None:
            deadline = self.deadline() + float(header.get("seconds", 0))
        return self._client.ask(action, header, payload, deadline=deadline)

    def join(self, header: Mapping[str, Any]) -> Header:
        """Join, and send heartbeats from now on; return the reply. Raises LaunchError if the server
        is unreachable, serves a different run, or waits for missing sites longer than this site."""
        seconds = self.sites.timeout_seconds
        reply = self.ask("join", {**self._join_fields(), **header})
        window = reply["window_seconds"]
        if window >= seconds:
            raise LaunchError(
                f"sites.timeout_seconds = {seconds:g} is not more than the server's "
                f"--window-seconds = {window:g}, so this site would time out before the server "
                "makes a round without a missing one -> a larger sites.timeout_seconds"
            )
        if self._heartbeat is None:
            # A daemon: a request that hangs must not keep the process from ending.
            self._heartbeat = threading.Thread(target=self._send_heartbeats, daemon=True)
            self._heartbeat.start()
        return reply

    def _join_fields(self) -> Header:
        """Return the fields of a join that follow from the settings."""
        settings = self.sites.model_dump(mode="json")
        return {
            "sites": {key: settings[key] for key in _OUTER_SETTINGS},
            "exchange": self.sites.exchange,
            "timeout_seconds": self.sites.timeout_seconds,
        }

    def compare(self, facts: Mapping[str, Any], allowed: Sequence[str]) -> None:
        """Ask whether this site may join, before its model is built; a server that does not answer
        soon is not waited for. Raises LaunchError if the server would refuse it."""
        header = {"facts": facts, "allowed": allowed, "parameters": None, **self._join_fields()}
        with suppress(UnreachableError):
            self.ask("join", header, time.monotonic() + _COMPARE_SECONDS)

    def _send_heartbeats(self) -> None:
        """Keep a request open all the time: the server sees at once that this process is killed."""
        client = self._client.clone()
        header = {"site": self.sites.index, "run": self._run}
        while not self._ended.wait(_HEARTBEAT_PAUSE_SECONDS):
            with suppress(DetachedError):
                client.ask("heartbeat", header, deadline=time.monotonic() + HEARTBEAT_TIMEOUT / 2)

    def enter(
        self, header: Mapping[str, Any], on_wait: Callable[[], None] | None = None
    ) -> RoundPlan:
        """Enter a round of the direct exchange; return its plan once it is made. on_wait: called
        while the server answers that this site has to wait.

        Raises DetachedError if the server is unreachable for ``sites.timeout_seconds``, LaunchError
        if sites of a new run do not join in that time, TrainingError if the server refuses this
        site.
        """
        entry = {"entry": secrets.token_hex(8), **header}
        end = self.deadline()
        while True:
            reply = self._ask_as_member("enter", {**entry, "seconds": poll_seconds(end)})
            if reply["is_ready"]:
                return RoundPlan.model_validate(reply["plan"])
            if on_wait is not None:
                on_wait()
            if reply["is_new"] and time.monotonic() > end:
                missing = reply["missing"]
                missing_text = ", ".join(map(str, missing[:_MOST_NAMED]))
                missing_text += ", ..." * (len(missing) > _MOST_NAMED)
                reasons = [
                    f"; site {site} was refused: {refusal}"
                    for site, refusal in reply["refused"].items()
                ]
                raise LaunchError(
                    f"site {missing_text} did not join the start within sites.timeout_seconds = "
                    f"{self.sites.timeout_seconds:g}{''.join(reasons[:_MOST_NAMED])} -> see the "
                    "logs of that site and of the outer server; a larger sites.timeout_seconds "
                    "waits longer for a slower one"
                )

    def commit(self, attempt: str, *, is_done: bool, unusable: int | None) -> bool:
        """Vote on an attempt; return whether all members voted that it is done: then it counts, on
        every member. unusable: the site whose values this one cannot use. Raises as `enter`."""
        vote = {"attempt": attempt, "is_done": is_done, "unusable": unusable}
        while True:
            reply = self._ask_as_member("vote", {**vote, "seconds": _POLL_SECONDS})
            if reply["is_decided"]:
                return bool(reply["is_committed"])

    def _ask_as_member(self, action: str, header: Mapping[str, Any]) -> Header:
        """Return the header of the reply. A refusal is a TrainingError: this site has to end."""
        try:
            return self.ask(action, header)
        except RefusedByServerError as error:
            raise TrainingError(
                f"the outer server refuses site {self.sites.index}: {error} -> start this site "
                "again: it resumes from its newest checkpoint"
            ) from error

    def leave(self, reason: str = "") -> str:
        """Leave, so that other sites do not wait for this site. Return why the server could not be
        notified, or an empty text."""
        self._ended.set()
        try:
            deadline = time.monotonic() + _LEAVE_SECONDS
            self.ask("leave", {"reason": reason[:_LONGEST_REASON]}, deadline)
        except DetachedError as error:
            return f"could not notify the server that this site is leaving: {error}"
        return ""

    def own_address(self) -> str:
        """Return the address of this host on the route to the server, where other sites connect."""
        host, port = self.sites.server_place
        family, _, _, _, server_address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(server_address)  # UDP: sends nothing, and chooses the local address
            return str(probe.getsockname()[0])


class ServerStore(dist.Store):
    """Store of the outer server for gloo's handshake between the members of a `generation`."""

    def __init__(self, membership: Membership, generation: str, prefix: str) -> None:
        super().__init__()
        self._membership = membership
        self._generation = generation
        self._prefix = prefix

    def _header(self, key: str) -> Header:
        return {"generation": self._generation, "key": f"{self._prefix}/{key}"}

    def set(self, key: str, value: Any) -> None:
        """Store a value."""
        data = value.encode() if isinstance(value, str) else bytes(value)
        self._membership.ask("put", self._header(key), payload=data)

    def get(self, key: str) -> bytes:
        """Wait for a value and return it. Raises DetachedError after ``sites.timeout_seconds``."""
        deadline = self._membership.deadline()
        while True:
            header = {**self._header(key), "seconds": poll_seconds(deadline)}
            reply, payload = self._membership.fetch("get", header, deadline)
            if reply["is_there"]:
                return bytes(payload)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait for values."""
        for key in keys:
            self.get(key)


def poll_seconds(deadline: float) -> float:
    """Return how long the server may keep a poll, so that its answer comes before `deadline`."""
    return min(_POLL_SECONDS, max(0.1, (deadline - time.monotonic()) / 2))
