"""Callback `prometheus`: an endpoint with the metrics of the run, by the prometheus_client
library."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from threading import Thread
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from bigtrain.errors import ExtensionError
from bigtrain.run.run_view import RunView
from bigtrain.run.shipped.families import ENTRY, FAMILIES
from bigtrain.settings.run_config import RunConfig
from bigtrain.settings.sections.extensions import PrometheusSettings
from bigtrain.system.listening import exposure


class Prometheus(Collector):
    """Endpoint ``http://HOST:PORT/metrics`` of the main rank, from the first step of a launch to
    its end. Exports the metrics of the last logged step and evaluation, as ``bigtrain_NAME``."""

    def __init__(
        self, settings: PrometheusSettings, config: RunConfig, warn: Callable[[str], None]
    ) -> None:
        self._settings, self._warn = settings, warn
        self._view: RunView | None = None
        self._serving: tuple[WSGIServer, Thread] | None = None

    def start(self, view: RunView) -> None:
        """Listen. Raises ExtensionError if the address cannot be listened at."""
        self._view = view
        registry = CollectorRegistry()
        registry.register(self)
        port, address = self._settings.port, self._settings.address
        try:
            self._serving = start_http_server(port, address, registry)
        except OSError as error:
            raise ExtensionError(
                f"{address}:{port} cannot be listened at ({error.strerror}) -> use another "
                "settings.port"
            ) from error
        if reached_from := exposure(address):
            self._warn(f"prometheus: listens {reached_from}, without encryption or a password")

    def step(self, view: RunView) -> None:
        """Store the metrics for the next request."""
        self._view = view

    evaluation = end = step

    def close(self, view: RunView) -> None:
        """Close the endpoint."""
        if self._serving is not None:
            server, thread = self._serving
            server.shutdown()
            server.server_close()
            thread.join()

    def collect(self) -> Iterator[Metric]:
        """Return the metrics, for a request."""
        view = self._view
        if view is None:
            return
        config = view.config
        yield GaugeMetricFamily("bigtrain_total_steps", "train.steps", config.train.total_steps)
        run = GaugeMetricFamily("bigtrain_run", "run directory; always 1", labels=["directory"])
        run.add_metric([str(view.directory)], 1.0)
        yield run
        for family in FAMILIES:
            values = family.values(view)
            metric_class = CounterMetricFamily if family.is_count else GaugeMetricFamily
            labels = [ENTRY] if family.has_entries else []
            metric = metric_class(f"bigtrain_{family.name}", family.meaning, labels=labels)
            for entry, value in values.items():
                metric.add_metric([entry] if family.has_entries else [], value)
            if values:
                yield metric
