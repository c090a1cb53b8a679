"""Prometheus: the newest metrics of the run on a port of loopback, for who knows the token."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from pathlib import Path

import yaml

from verl import env
from verl.errors import ConfigError
from verl.journal.places import file_of_run
from verl.metrics import notice
from verl.observability.tracker import Tracker, scalar_metrics, tracker_package
from verl.serving import HttpRequest, HttpResponse, Server, loopback, secret

PORT = "VERL_PROMETHEUS_PORT"
FILE = "prometheus.yml"
END_SECONDS = 10.0
"""That open connections get to end."""


class PrometheusTracker(Tracker):
    """Answers ``/metrics`` with ``verl_metric{metric="critic/score/mean"}`` and ``verl_step`` until the run ends.

    ``prometheus.yml`` in the run's folder, or ``prometheus-2.yml`` ... where there is one, has address and token
    for Prometheus (``--config.file``, or ``scrape_config_files`` of another configuration). Only the user may read it,
    and it ends with the run.
    """

    _file: Path | None = None
    _server: Server | None = None

    def __init__(self, project_name: str, experiment_name: str, config: Mapping[str, object] | None = None):
        super().__init__(project_name, experiment_name, config)
        with tracker_package("prometheus", "pip install prometheus-client"):
            import prometheus_client
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
        self._thread = threading.Thread(target=self._loop.run_forever, name="prometheus", daemon=True)

    def start(self, total_steps: int, first_step: int = 0) -> None:
        self._thread.start()
        self._serve()
        trainer = (self.config or {}).get("trainer") or {}
        self._file = file_of_run(Path(trainer.get("default_local_dir") or ".") / FILE)
        labels = {"project": self.project_name, "experiment": self.experiment_name}
        job = {
            "job_name": "verl",
            "authorization": {"credentials": self._token},
            "static_configs": [{"targets": [f"127.0.0.1:{self._port}"], "labels": labels}],
        }
        self._file.write_text(yaml.safe_dump({"scrape_configs": [job]}, sort_keys=False), encoding="utf-8")
        notice(PORT, f"Prometheus reads the newest metrics of this run by address and token in {self._file}")

    def log(self, data: Mapping[str, object], step: int) -> None:
        for key, value in scalar_metrics(data).items():
            self._metrics.labels(key).set(value)
        self._step.set(step)

    def finish(self, exit_code: int = 0) -> None:
        self.release()

    def release(self) -> None:
        """End thread and port, and delete the file with their address."""
        if self._file is not None:
            self._file.unlink(missing_ok=True)
        if self._thread.is_alive():
            if self._server is not None:
                asyncio.run_coroutine_threadsafe(self._server.close(), self._loop).result(END_SECONDS)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
        self._loop.close()
        self._socket.close()

    def _serve(self) -> None:
        async def answer(request: HttpRequest) -> HttpResponse:
            return HttpResponse(content=self._text(self._registry), media=self._media)

        owner = {True: "prometheus", False: None}
        self._server = Server({("GET", "/metrics"): answer}, lambda shown: owner[secret.same(shown, self._token)])
        asyncio.run_coroutine_threadsafe(self._server.start(self._socket), self._loop).result()
