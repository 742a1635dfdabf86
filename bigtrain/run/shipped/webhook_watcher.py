"""Watcher of a run for the callback `webhook`: a program that outlives the process it watches.

    python -I -S webhook_watcher.py < PIPE

It reads messages, one JSON object per line: first the settings, then ``step``, and at the end
``last`` (text or null). If the process is gone without ``last``, the run has died. It sees neither
the loss of the host, nor the end of a container or job that takes all processes with it. Standard
library only, so that it starts in milliseconds.
"""

from __future__ import annotations

import html
import json
import os
import select
import signal
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any

_STDIN = 0
_KILLED = (
    "has died: its process ended without an error of its own (killed, out of memory, ended by the "
    "watchdog, or by a signal outside of its steps)"
)


def main() -> None:
    """Watch until the run ends."""
    # Ignore signals that schedulers send to all processes of a job: the run may still save.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    # An orphan in a separate session: launchers that end a rank and its descendants, or its process
    # group, do not end it. `bigtrain.launchers.agent` waits for it.
    if os.fork():
        os._exit(0)
    lines = Lines()
    first = lines.read(None)
    if not first:
        return
    settings = first.pop(0)
    process = os.pidfd_open(settings["pid"]) if hasattr(os, "pidfd_open") else None
    watch(settings, lines, first, [] if process is None else [process])


def watch(
    settings: Mapping[str, Any],
    lines: Lines,
    received: list[dict[str, Any]],
    process: list[int],
) -> None:
    """Send a message when the run stalls, and one when it ends or dies. received: the messages read
    so far; process: descriptor of the watched process, if the system has one."""
    step, moved_at, stall_seconds = None, time.monotonic(), settings["stall_seconds"]
    has_stalled = False
    while True:
        for message in received:
            if "step" in message:
                step, moved_at, has_stalled = message["step"], time.monotonic(), False
            if "last" in message:
                if message["last"] is not None:
                    post(settings, message["last"], step)
                return
        wait_seconds = None  # a stall is reported once
        if stall_seconds is not None and not has_stalled:
            wait_seconds = moved_at + stall_seconds - time.monotonic()
        messages = lines.read(wait_seconds, process)
        if messages is None:
            post(settings, _KILLED, step)
            return
        received = messages
        has_waited = wait_seconds is not None and time.monotonic() >= moved_at + stall_seconds
        if not received and has_waited:
            has_stalled = True
            post(settings, f"has stalled: no step was finished for {stall_seconds:g} s", step)


class Lines:
    """Messages from standard input."""

    def __init__(self) -> None:
        self._partial_line = b""

    def read(self, wait_seconds: float | None, descriptors: list[int] | None = None) -> Any:
        """Return the messages that arrive within `wait_seconds` (None: no limit); None at the end
        of the input, or if any of `descriptors` is readable and the input is not."""
        timeout = None if wait_seconds is None else max(0.0, wait_seconds)
        ready, _, _ = select.select([_STDIN, *(descriptors or ())], [], [], timeout)
        if not ready:
            return []
        data = os.read(_STDIN, 1 << 16) if _STDIN in ready else b""
        if not data:
            return None
        *lines, self._partial_line = (self._partial_line + data).split(b"\n")
        return [json.loads(line) for line in lines]


def post(settings: Mapping[str, Any], text: str, step: int | None) -> None:
    """Send a message; one line on standard error if that fails, without the address."""
    position = f"step {step} of {settings['total_steps']}"
    if step is None:
        position = "before its first step"
    line = f"bigtrain: {settings['run']} {text} [{position}]"
    body = json.dumps({"text": html.escape(line, quote=False)}).encode()
    try:
        request = urllib.request.Request(
            settings["url"], body, {"Content-Type": "application/json"}, method="POST"
        )
        opener = urllib.request.build_opener(_NoRedirects)
        with opener.open(request, timeout=settings["timeout_seconds"]):
            pass
    except Exception as error:
        print(f"webhook: message not sent: {reason_of(error)}", file=sys.stderr, flush=True)


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Handler that refuses redirects, which urllib would follow with a GET, without the message."""

    def redirect_request(self, *_: Any) -> None:
        """Return no further request, so that the redirect's status is an error."""


def reason_of(error: Exception) -> str:
    """Return why a request failed, without its address, which may be a secret."""
    if isinstance(error, urllib.error.HTTPError):
        moved = " (moved: write the new address)" if 300 <= error.code < 400 else ""
        return f"HTTP status {error.code}{moved}"
    if isinstance(error, urllib.error.URLError):
        return str(error.reason)
    return str(error) if isinstance(error, OSError) else type(error).__name__


if __name__ == "__main__":
    main()
