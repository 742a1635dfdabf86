"""The run that an outer server serves: members, and one of the two ways to exchange."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from bigtrain.sites import protocol
from bigtrain.sites.metrics import LEFT_OUT, RETURNED
from bigtrain.sites.protocol import Header, JoinRequest, RefusedError
from bigtrain.sites.server.deliveries import ServerExchange
from bigtrain.sites.server.direct import DirectExchange
from bigtrain.sites.server.members import Members, Rules, refuse_index, run_description
from bigtrain.sites.server.store import ServerDirectory


class OuterServerState(Members):
    """The state behind the requests. Methods may be called from several threads; what they return
    is on disk."""

    def __init__(
        self,
        store: ServerDirectory,
        rules: Rules,
        log: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(store, rules, log, clock)
        run = store.run()
        self.exchange = None if run is None else self._build(run)

    def _build(self, run: Header) -> ServerExchange | DirectExchange:
        if run["exchange"] == "server":
            return ServerExchange(self, run)
        if self.rules.is_asynchronous:
            raise RefusedError(
                "sites.exchange = direct: a server with --asynchronous holds the weights itself -> "
                "sites.exchange: server, or a server without --asynchronous"
            )
        return DirectExchange(self)

    def act(
        self, action: str, request: protocol.Request, payload: memoryview
    ) -> tuple[Header, bytes]:
        """Return header and payload of the reply to a request. Raises RefusedError."""
        assert isinstance(request, protocol.SiteRequest)
        self.hear(request.site, request.run)
        if isinstance(request, protocol.WaitRequest):
            return self.wait(request.base, request.seconds, request.heard), b""
        if isinstance(request, JoinRequest):
            return self.join(request), b""
        if action == "heartbeat":
            return {}, b""
        self.member(request.site, request.run)
        if isinstance(request, protocol.LeaveRequest):
            self.leave(request.site, request.reason)
            return {}, b""
        assert self.exchange is not None  # since the site has joined
        handler = self.exchange.handlers.get(action)
        if handler is None:
            run_exchange = "server" if isinstance(self.exchange, ServerExchange) else "direct"
            refused_exchange = "direct" if run_exchange == "server" else "server"
            raise RefusedError(
                f"{action}: the sites of this run have sites.exchange = {run_exchange}, not "
                f"{refused_exchange}"
            )
        return handler(request, payload)

    def join(self, request: JoinRequest) -> Header:
        """Count a site that begins, or is back, as a member; a request without parameters only
        asks whether the site may join. Raises RefusedError."""
        exchange = self.exchange
        if exchange is None and request.parameters is not None:
            # Build it before the run is stored, since that may fail, and without the lock, since
            # all other requests wait for the lock.
            refuse_index(request.site, run_description(request))
            exchange = self._build(run_description(request))
        with self.changed:
            exchange = self.exchange or exchange
            if request.parameters is None or exchange is None:
                self.agreed_run(request)
                return {}
            before = self.admit(request)
            self.exchange = exchange
            summary = self.summary()
            if not before.is_active and summary["number"]:
                self.note(RETURNED, f"site {request.site}", "joined")
            self.log(f"site {request.site} joined at outer step {summary['number']}")
            reply = exchange.joined(request)
            self.tick()
            self.changed.notify_all()
            rules = self.rules
            reply |= {
                "is_asynchronous": rules.is_asynchronous,
                "window_seconds": rules.window_seconds,
            }
            return {**summary, **reply}

    def leave(self, site: int, reason: str = "") -> None:
        """Stop waiting for a site: it has trained to its end, or stops. reason: why its change
        cannot be used, if it ends for that."""
        with self.changed:
            row = replace(self.member(site), is_active=False, is_training=False, has_left=True)
            self.store.write_site(row)
            self.log(f"site {site} left" + (f": {reason}" if reason else ""))
            if reason:
                self.note(LEFT_OUT, f"site {site}", reason)
            assert self.exchange is not None
            self.exchange.left(site, reason)
            self.tick()

    def tick(self) -> None:
        """Make the outer steps that are due. A failure leaves the state as it was and is logged
        once; the next call repeats the work."""
        with self.changed:
            self.pending()
            if self.exchange is not None:
                self.attempt(self.exchange.tick)
