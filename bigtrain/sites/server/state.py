"""The run that an outer server serves: members, and one of the two ways to exchange."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from bigtrain.sites.metrics import LEFT_OUT, RETURNED
from bigtrain.sites.protocol import HEARTBEAT_SECONDS, Header, RefusedError
from bigtrain.sites.server.deliveries import ServerExchange
from bigtrain.sites.server.direct import DirectExchange
from bigtrain.sites.server.members import Members, Rules, described, refuse_index
from bigtrain.sites.server.store import Store


class OuterServerState:
    """The state behind the requests. Methods may be called from several threads; what they return
    is on disk.

    log: writes a line to the server's log. clock: seconds that ascend.
    """

    def __init__(
        self,
        store: Store,
        rules: Rules,
        log: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.members = Members(store, rules, log, clock)
        run = store.run()
        self.exchange = None if run is None else self._build(run)

    def _build(self, run: Header) -> ServerExchange | DirectExchange:
        if run["exchange"] == "server":
            return ServerExchange(self.members, run)
        if self.members.rules.is_asynchronous:
            raise RefusedError(
                "sites.exchange = direct: a server with --asynchronous holds the weights itself -> "
                "sites.exchange: server, or a server without --asynchronous"
            )
        return DirectExchange(self.members)

    def act(
        self, action: str, header: Header, payload: memoryview, body: bytes | bytearray
    ) -> tuple[Header, bytes]:
        """Return header and payload of the reply to a request, whose fields were checked."""
        site, run = header.get("site"), header.get("run", "")
        if site is not None:
            self.members.hear(site, run, is_beat=action == "heartbeat")
        if action == "heartbeat":
            return {}, b""
        if action == "wait":
            return self.members.wait(header["base"], header["seconds"], header.get("heard")), b""
        assert site is not None
        if action == "join":
            return self.join(site, header), b""
        self.members.refuse_stranger(site, run)
        if action == "leave":
            self.leave(site, header.get("reason", ""))
            return {}, b""
        assert self.exchange is not None  # where a site has joined
        return self.exchange.act(action, header, payload, body)

    def join(self, site: int, request: Header) -> Header:
        """Count a site that begins, or is back, as a member. Raises RefusedError."""
        members = self.members
        with members.changed:
            exchange = self.exchange
            if exchange is None:
                refuse_index(site, int(request["sites"]["count"]))
                exchange = self._build(described(request))  # before it is on disk: it may fail
            before = members.admit(site, request)
            self.exchange = exchange
            summary = members.summary()
            if not before.is_active and summary["number"]:
                members.note(RETURNED, f"site {site}", "joined")
            members.log(f"site {site} joined at outer step {summary['number']}")
            own = exchange.joined(site, request)
            self.tick()
            members.changed.notify_all()
            return {
                **summary,
                **own,
                "is_asynchronous": members.rules.is_asynchronous,
                "window_seconds": members.rules.window_seconds,
                "heartbeat_seconds": HEARTBEAT_SECONDS,
            }

    def leave(self, site: int, reason: str = "") -> None:
        """Stop waiting for a site: it has trained to its end, or stops. reason: why its change
        cannot be used, if it ends for that."""
        members = self.members
        with members.changed:
            row = replace(members.row(site), is_active=False, is_training=False, has_left=True)
            members.store.write_site(row)
            members.log(f"site {site} left" + (f": {reason}" if reason else ""))
            if reason:
                members.note(LEFT_OUT, f"site {site}", reason)
            assert self.exchange is not None
            self.exchange.left(site, reason)
            self.tick()

    def tick(self) -> None:
        """Do what is due by now. A failure leaves the state as it was and is logged once; the next
        call repeats the work."""
        members = self.members
        with members.changed:
            members.attempt(members.note_now)
            if self.exchange is not None:
                members.attempt(self.exchange.tick)
