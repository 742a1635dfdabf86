"""Callback `webhook`: messages when the run ends, dies or stalls, in Slack's format."""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from bigtrain.errors import ExtensionError
from bigtrain.run.run_view import RunView
from bigtrain.run.shipped import webhook_watcher
from bigtrain.settings.run_config import RunConfig
from bigtrain.settings.sections.extensions import WebhookSettings

_EXTRA_SECONDS = 5.0


class Webhook:
    """Sender of the messages of a run: a separate process (`webhook_watcher`), which gets each step
    through a pipe, and notices when this process has ended for any reason."""

    def __init__(
        self, settings: WebhookSettings, config: RunConfig, warn: Callable[[str], None]
    ) -> None:
        """Start the watcher. Raises ExtensionError without an address."""
        # The address of the webhook, which no message may contain.
        if settings.url_file is not None:
            source, key = f"the file {settings.url_file}", "settings.url_file"
            try:
                url = Path(settings.url_file).expanduser().read_text(encoding="utf-8").strip()
            except (OSError, UnicodeDecodeError) as error:
                reason = getattr(error, "strerror", None) or type(error).__name__
                raise ExtensionError(
                    f"{source} cannot be read on the main rank ({reason}) -> correct {key}"
                ) from None
        else:
            source, key = f"the environment variable {settings.url_env}", "settings.url_env"
            url = os.environ.get(settings.url_env, "").strip()
        if not url.startswith(("http://", "https://")):
            problem = "does not contain the address of a webhook" if url else "is empty or not set"
            raise ExtensionError(
                f"{source} {problem} on the main rank -> write http(s)://... there, or correct "
                f"{key}"
            )
        self._settings, self._warn = settings, warn
        directory = Path(config.output.directory).resolve()
        self._last: str | None = None
        self._has_warned = False
        self._watcher = subprocess.Popen(
            [sys.executable, "-I", "-S", webhook_watcher.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            # `bigtrain.launchers.agent` takes processes with the variable RANK for ranks.
            env={name: value for name, value in os.environ.items() if name != "RANK"},
            bufsize=0,
        )
        self._watcher.wait()  # the process ends at once: its fork is the watcher
        assert self._watcher.stdin is not None
        self._send(
            url=url,
            pid=os.getpid(),
            stall_seconds=settings.stall_seconds,
            timeout_seconds=settings.timeout_seconds,
            run=f"run {directory.name} on {socket.gethostname()} ({directory})",
            total_steps=config.train.total_steps,
        )
        os.set_blocking(self._watcher.stdin.fileno(), False)

    def start(self, view: RunView) -> None:
        """Report the step from which this launch continues."""
        self._send(step=view.step)

    step = start

    def end(self, view: RunView) -> None:
        """Choose the last message: the run is complete, or was stopped by a signal."""
        if view.stopped_by is None:
            loss = view.metrics.get("loss")
            self._last = "is complete" + ("" if loss is None else f", loss {loss:.4g}")
        else:
            self._last = f"was stopped by {view.stopped_by} and saved; the same command resumes it"

    def close(self, view: RunView) -> None:
        """Let the watcher send the last message, and wait for it to end."""
        if view.error is not None:
            self._last = f"has died: {view.error}"
        stdin, stdout = self._watcher.stdin, self._watcher.stdout
        assert stdin is not None
        assert stdout is not None
        limit = self._settings.timeout_seconds + _EXTRA_SECONDS
        _wait_for(stdin, select.POLLOUT, limit)  # full while the watcher sends a message
        self._send(last=self._last, step=view.step)
        stdin.close()
        _wait_for(stdout, select.POLLIN, limit)
        stdout.close()

    def _send(self, **message: Any) -> None:
        assert self._watcher.stdin is not None
        try:
            # A full pipe takes none of the bytes: a later step replaces the message.
            self._watcher.stdin.write(json.dumps(message).encode() + b"\n")
        except OSError:
            if not self._has_warned:
                self._has_warned = True
                self._warn("webhook: its process has ended, so no message will be sent")


def _wait_for(pipe: IO[bytes], event: int, seconds: float) -> None:
    poll = select.poll()  # select takes no file descriptors above 1023
    poll.register(pipe, event)
    poll.poll(1000 * seconds)
