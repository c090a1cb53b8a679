"""Prometheus: the newest metrics of the run on a port of loopback, for who knows the token."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Mapping
from pathlib import Path

import yaml

from verl import env
from verl.errors import ConfigError
from verl.journal.places import private_opener
from verl.observability.tracker import Tracker, absent_package, scalar_metrics
from verl.serving import HttpRequest, HttpResponse, Server, loopback, secret

PORT = "VERL_PROMETHEUS_PORT"
FILE = "prometheus.yml"


class PrometheusTracker(Tracker):
    """Answers ``/metrics`` with ``verl_metric{metric="critic/score/mean"}`` and ``verl_step`` until the run ends.

    ``prometheus.yml`` in the run's folder, which only the user may read, has address and token:
    ``prometheus --config.file=prometheus.yml``, or ``scrape_config_files`` of another configuration.
    """

    def __init__(self, project_name: str, experiment_name: str, config: Mapping[str, object] | None = None):
        super().__init__(project_name, experiment_name, config)
        try:
            import prometheus_client
        except ImportError as error:
            raise absent_package("prometheus", "prometheus-client") from error
        self._registry = prometheus_client.CollectorRegistry()
        self._metrics = prometheus_client.Gauge(
            "verl_metric", "Newest value of a metric of the run.", ["metric"], registry=self._registry
        )
        self._step = prometheus_client.Gauge("verl_step", "Its step.", registry=self._registry)
        self._text, self._media = prometheus_client.generate_latest, prometheus_client.CONTENT_TYPE_LATEST
        try:
            port = env.get_int(PORT, 0)
            if not 0 <= port < 1 << 16:
                raise ValueError("0 to 65535 are ports")
            self._socket = loopback(port)
        except (ConfigError, ValueError) as error:
            raise ConfigError(f"no such port for Prometheus: {error}", key=PORT, got=env.get(PORT)) from error
        self._port, self._token = self._socket.getsockname()[1], secret.new_key()
        self._loop = asyncio.new_event_loop()
        self._serves = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="prometheus", daemon=True)

    def start(self, total_steps: int, first_step: int = 0) -> None:
        trainer = (self.config or {}).get("trainer") or {}
        self.place = Path(trainer.get("default_local_dir") or ".") / FILE
        labels = {"project": self.project_name, "experiment": self.experiment_name}
        job = {
            "job_name": "verl",
            "authorization": {"credentials": self._token},
            "static_configs": [{"targets": [f"127.0.0.1:{self._port}"], "labels": labels}],
        }
        self.place.parent.mkdir(parents=True, exist_ok=True)
        fresh = self.place.with_name(f"{FILE}.part")
        with open(fresh, "w", encoding="utf-8", opener=private_opener) as file:
            yaml.safe_dump({"scrape_configs": [job]}, file, sort_keys=False)
        os.replace(fresh, self.place)
        self._thread.start()

    def log(self, data: Mapping[str, object], step: int) -> None:
        for key, value in scalar_metrics(data).items():
            self._metrics.labels(key).set(value)
        self._step.set(step)

    def finish(self, exit_code: int = 0) -> None:
        if self._thread.is_alive():
            self._serves.wait()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
        self._socket.close()
        if self.place is not None:
            self.place.unlink(missing_ok=True)

    def _serve(self) -> None:
        async def answer(request: HttpRequest) -> HttpResponse:
            return HttpResponse(content=self._text(self._registry), media=self._media)

        owner = {True: "prometheus", False: None}
        server = Server({("GET", "/metrics"): answer}, lambda shown: owner[secret.same(shown, self._token)])
        try:
            self._loop.run_until_complete(server.start(self._socket))
        finally:
            self._serves.set()
        self._loop.run_forever()
        self._loop.run_until_complete(server.close())
        self._loop.close()
