"""Prometheus: an endpoint on this machine's own address that says how the run is now."""

from __future__ import annotations

import threading
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, start_http_server

from keepstep.observe.sinks.base import About, values_of

PORT = 9464
"""What exporters that stand for themselves use by custom."""
_HOST = "127.0.0.1"


class Prometheus:
    """Holds the newest values; who wants their history scrapes them."""

    lasting = False

    def __init__(self, about: About) -> None:
        self._about = about
        self._port = about.option or PORT
        registry = CollectorRegistry()
        self._metric = Gauge("keepstep_metric", "Newest value of a logged metric", ["run", "name"], registry=registry)
        self._step = Gauge("keepstep_step", "Completed optimizer steps", ["run"], registry=registry)
        self._failures = Counter("keepstep_failures", "Attempts that failed", ["run"], registry=registry)
        self._registry = registry
        self._server: Any = None
        self._thread: threading.Thread | None = None

    def open(self) -> str:
        try:
            self._server, self._thread = start_http_server(self._port, _HOST, self._registry)
        except OSError as error:
            raise OSError(
                f"port {self._port} of {_HOST}: {error.strerror}; --sinks prometheus:PORT takes another"
            ) from None
        self._failures.labels(self._about.name)  # 0 from the start: a rate needs it
        return f"http://{_HOST}:{self._port}/metrics"

    def reached(self, noted: dict[str, int]) -> dict[str, int]:
        return {}

    def metrics(self, lines: list[dict[str, Any]]) -> None:
        for line in lines:
            self._step.labels(self._about.name).set(line["step"])
            for name, value in values_of(line).items():
                self._metric.labels(self._about.name, name).set(value)

    def event(self, event: dict[str, Any]) -> None:
        if event.get("event") == "failed":
            self._failures.labels(self._about.name).inc()

    def close(self, status: str) -> None:
        self.abandon()

    def abandon(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            server.shutdown()
            server.server_close()
