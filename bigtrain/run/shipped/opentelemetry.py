"""Callback `opentelemetry`: the metrics of the run to an OTLP endpoint, by OpenTelemetry's SDK."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable

from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.metrics import CallbackOptions, Observation
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
from opentelemetry.sdk.resources import SERVICE_NAME, Resource

from bigtrain.errors import ExtensionError
from bigtrain.run.run_view import RunView
from bigtrain.run.shipped.families import ENTRY, FAMILIES, Family
from bigtrain.settings.run_config import RunConfig
from bigtrain.settings.sections.extensions import NoSettings

_PROTOCOLS = ("OTEL_EXPORTER_OTLP_METRICS_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_PROTOCOL = "http/protobuf"
_LOGGER = logging.getLogger("opentelemetry")


class OpenTelemetry:
    """Exporter of the metrics of the last logged step and evaluation, as ``bigtrain.NAME``.
    Endpoint, headers, interval, service name and resource attributes come from the standard
    environment variables (``OTEL_...``), as the SDK reads them in the main rank."""

    def __init__(
        self, settings: NoSettings, config: RunConfig, warn: Callable[[str], None]
    ) -> None:
        """Raises ExtensionError if the environment asks for OTLP over anything but HTTP."""
        self._warn = warn
        self._failures = _Failures()
        self._view: RunView | None = None
        self._provider: MeterProvider | None = None
        name = next((name for name in _PROTOCOLS if os.environ.get(name)), None)
        if name is not None and os.environ[name] != _PROTOCOL:
            raise ExtensionError(
                f"{name}={os.environ[name]} is not supported -> {name}={_PROTOCOL}"
            )

    def start(self, view: RunView) -> None:
        """Begin to export."""
        self._view = view
        _LOGGER.addHandler(self._failures)
        _LOGGER.propagate = False
        attributes = {"bigtrain.run.directory": str(view.directory)}
        # The user's name of the service, which the SDK reads, has precedence.
        has_service_name = bool(os.environ.get("OTEL_SERVICE_NAME"))
        has_service_name |= SERVICE_NAME in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
        if not has_service_name:
            attributes[SERVICE_NAME] = "bigtrain"
        resource = Resource.create(dict(attributes))
        reader = PeriodicExportingMetricReader(OTLPMetricExporter())
        self._provider = MeterProvider([reader], resource, shutdown_on_exit=False)
        meter = self._provider.get_meter("bigtrain")
        for family in FAMILIES:
            create = (
                meter.create_observable_counter
                if family.is_count
                else meter.create_observable_gauge
            )
            callbacks = [self._observing(family)]
            create(f"bigtrain.{family.name}", callbacks, family.unit, family.meaning)

    def _observing(self, family: Family) -> Callable[[CallbackOptions], Iterable[Observation]]:
        def observe(_: CallbackOptions) -> Iterable[Observation]:
            values = {} if self._view is None else family.values(self._view)
            for entry, value in values.items():
                yield Observation(value, {ENTRY: entry} if family.has_entries else {})

        return observe

    def step(self, view: RunView) -> None:
        """Store the metrics, which the SDK's thread exports at its interval; show the SDK's first
        warning."""
        self._view = view
        if self._failures.first is not None and not self._failures.is_reported:
            self._failures.is_reported = True
            self._warn(f"opentelemetry: {self._failures.first}; further warnings are not shown")

    evaluation = end = step

    def close(self, view: RunView) -> None:
        """Export for the last time."""
        if self._provider is not None:
            self._provider.shutdown()
            self.step(view)
            _LOGGER.removeHandler(self._failures)
            _LOGGER.propagate = True


class _Failures(logging.Handler):
    """First warning of the SDK, which repeats them at every interval; shown by the main thread."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.first: str | None = None
        self.is_reported = False

    def emit(self, record: logging.LogRecord) -> None:
        self.first = self.first or " ".join(record.getMessage().split())[:300]
