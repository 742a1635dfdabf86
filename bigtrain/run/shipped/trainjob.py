"""Callback `trainjob`: progress and metrics in ``status.trainerStatus`` of the TrainJob.

Protocol of Kubeflow Trainer 2.2 (feature gate TrainJobStatus; KEP-2779, `pkg/statusserver` and
`trainjob_types.go` of github.com/kubeflow/trainer at 8c0f505): the controller sets three variables
in each pod of the trainer, and takes a POST of at most one status every five seconds.
"""

from __future__ import annotations

import json
import os
import ssl
import threading
import time
import urllib.request
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bigtrain.run.run_view import RunView
from bigtrain.run.shipped.families import FAMILIES
from bigtrain.run.shipped.webhook_watcher import reason_of
from bigtrain.settings.run_config import RunConfig
from bigtrain.settings.sections.extensions import NoSettings

URL, TOKEN, CERTIFICATE = (
    f"KUBEFLOW_TRAINER_SERVER_{name}" for name in ("URL", "TOKEN", "CA_CERT")
)
"""Variables with the address of the status server, the file of the token, which rotates, and the
file of the server's certificate."""
_SECONDS_BETWEEN = 5.0
_TIMEOUT_SECONDS = 5.0
# Limits of the resource's schema.
_MOST_METRICS, _MOST_CHARACTERS, _MOST_SECONDS = 256, 64, 2**31 - 1


class TrainJob:
    """Reporter of the run's progress to the TrainJob that it runs in; outside of a TrainJob, or if
    the feature gate is off, it only logs that."""

    def __init__(
        self, settings: NoSettings, config: RunConfig, warn: Callable[[str], None]
    ) -> None:
        self._warn = warn
        self._url = os.environ.get(URL)
        self._start: tuple[float, int] | None = None  # time (monotonic) and step
        self._changed = threading.Condition()
        self._pending: dict[str, Any] | None = None
        self._is_closing = False
        self._failure: str | None = None
        self._has_warned = False
        self._thread: threading.Thread | None = None

    def start(self, view: RunView) -> None:
        """Begin to report."""
        if not self._url:
            self._warn(
                f"trainjob: {URL} is not set, so progress is not reported: this is not a pod of a "
                "TrainJob, or Kubeflow Trainer's feature gate TrainJobStatus is off"
            )
            return
        self._start = time.monotonic(), view.step
        self._thread = threading.Thread(target=self._send, name="trainjob", daemon=True)
        self._thread.start()
        self.step(view)

    def step(self, view: RunView) -> None:
        """Report the state of the run; the newest one is sent, at most every five seconds."""
        total_steps = view.config.train.total_steps
        status: dict[str, Any] = {"progressPercentage": min(100, 100 * view.step // total_steps)}
        started_at, first_step = self._start or (0.0, view.step)
        num_trained = view.step - first_step
        if num_trained > 0:
            step_seconds = (time.monotonic() - started_at) / num_trained
            remaining_seconds = round(step_seconds * (total_steps - view.step))
            status["estimatedRemainingSeconds"] = min(_MOST_SECONDS, max(0, remaining_seconds))
        values: dict[str, float] = {"step": view.step, "total_steps": total_steps}
        for family in FAMILIES:
            for entry, value in family.values(view).items():
                values[f"{family.name}/{entry}" if entry else family.name] = value
        metrics = [
            {"name": name[:_MOST_CHARACTERS], "value": f"{value:.10g}"}
            for name, value in values.items()
        ]
        now = datetime.now(UTC).isoformat(timespec="seconds")
        with self._changed:
            self._pending = {**status, "metrics": metrics[:_MOST_METRICS], "lastUpdatedTime": now}
            self._changed.notify()
        self._report_failure()

    evaluation = end = step

    def close(self, view: RunView) -> None:
        """Send the last status, and wait for it."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(2 * _TIMEOUT_SECONDS)
        self._report_failure()

    def _send(self) -> None:
        """Send the newest status until `close`, in a thread."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._pending is not None or self._is_closing)
                status, self._pending = self._pending, None
            if status is not None:
                try:
                    self._post(status)
                    self._failure = None
                except Exception as error:
                    self._failure = reason_of(error)
            with self._changed:
                if self._is_closing and self._pending is None:
                    return
                self._changed.wait_for(lambda: self._is_closing, _SECONDS_BETWEEN)

    def _post(self, status: dict[str, Any]) -> None:
        assert self._url is not None
        headers = {"Content-Type": "application/json"}
        if os.environ.get(TOKEN):
            headers["Authorization"] = f"Bearer {Path(os.environ[TOKEN]).read_text().strip()}"
        body = json.dumps({"trainerStatus": status}).encode()
        request = urllib.request.Request(self._url, body, headers, method="POST")
        trusted = ssl.create_default_context(cafile=os.environ.get(CERTIFICATE) or None)
        with urllib.request.urlopen(request, timeout=_TIMEOUT_SECONDS, context=trusted):
            pass

    def _report_failure(self) -> None:
        failure = self._failure
        if failure is not None and not self._has_warned:
            self._has_warned = True
            self._warn(f"trainjob: progress cannot be reported: {failure}")
