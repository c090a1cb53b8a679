"""The run's metrics as Prometheus reads them: with its token, on loopback, until the run ends."""

from __future__ import annotations

import json
import math
import stat
import threading
from http.client import HTTPConnection
from pathlib import Path

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from verl.errors import ConfigError
from verl.metrics import notices, reset_notices
from verl.observability.backends.prometheus import PORT, PrometheusTracker
from verl.observability.tracking import Tracking
from verl.serving import Server, loopback

NAME = 'val-core/a "b"/mean@8'


def request(port: int, **headers: str) -> tuple[int, str]:
    connection = HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", "/metrics", headers=headers)
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, text


def port_of(place: Path) -> int:
    (job,) = yaml.safe_load(place.read_text())["scrape_configs"]
    return int(job["static_configs"][0]["targets"][0].removeprefix("127.0.0.1:"))


def in_folder(folder: Path) -> Tracking:
    reset_notices()
    return Tracking("sums", "first", "prometheus", {"trainer": {"default_local_dir": str(folder)}})


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "prometheus"]


def test_prometheus_reads_the_newest_metrics_with_the_address_and_token_of_the_file(tmp_path):
    with Tracking("sums", "first", "prometheus", {"trainer": {"default_local_dir": str(tmp_path)}}) as tracking:
        tracking.start(2)
        place = tmp_path / "prometheus.yml"
        assert stat.S_IMODE(place.stat().st_mode) == 0o600
        (job,) = yaml.safe_load(place.read_text())["scrape_configs"]
        (target,) = job["static_configs"]
        assert target["labels"] == {"project": "sums", "experiment": "first"}
        port = port_of(place)
        bearer = {"authorization": f"Bearer {job['authorization']['credentials']}"}
        tracking.log({NAME: 0.25, "critic/score/mean": 1.0, "note": "text"}, 1)
        tracking.log({"critic/score/mean": math.nan}, 2)
        status, text = request(port, **bearer)
        samples = [one for family in text_string_to_metric_families(text) for one in family.samples]
        values = {one.labels.get("metric", one.name): one.value for one in samples}
        assert status == 200 and math.isnan(values.pop("critic/score/mean"))
        assert values == {NAME: 0.25, "verl_step": 2.0}
        assert request(port)[0] == request(port, authorization="Bearer wrong")[0] == 401
        assert request(port, **bearer, origin="http://evil.example")[0] == 403
        assert job["authorization"]["credentials"] not in json.dumps(tracking.logger["prometheus"].config)
    assert not place.exists()
    with pytest.raises(ConnectionRefusedError):
        request(port, **bearer)


def test_the_file_with_address_and_token_never_replaces_another(tmp_path):
    (tmp_path / "prometheus.yml").write_text("of the user")
    with in_folder(tmp_path) as tracking:
        assert tracking.start(2) == {}, "it holds no metrics"
        ours = tmp_path / "prometheus-2.yml"
        assert stat.S_IMODE(ours.stat().st_mode) == 0o600 and port_of(ours)
        (text,) = notices().values()
        assert "address and token in" in text and str(ours) in text
    assert (tmp_path / "prometheus.yml").read_text() == "of the user" and not ours.exists()


def test_a_server_that_cannot_start_is_one_notice_and_leaves_nothing(tmp_path, monkeypatch):
    async def fails(*_):
        raise RuntimeError("no more descriptors")

    monkeypatch.setattr(Server, "start", fails)
    with in_folder(tmp_path) as tracking:
        tracker = tracking.logger["prometheus"]
        tracking.start(2)
        tracking.log({"x": 1.0}, 1)
        assert not tracking.logger and not threads() and not list(tmp_path.iterdir())
    (text,) = notices().values()
    assert "off from now on (RuntimeError: no more descriptors)" in text
    assert tracker._loop.is_closed() and tracker._socket.fileno() == -1


def test_port_thread_and_file_end_when_the_tracker_is_switched_off(tmp_path):
    with in_folder(tmp_path) as tracking:
        tracking.start(2)
        tracker, port = tracking.logger["prometheus"], port_of(tmp_path / "prometheus.yml")
        tracking.log({"x": 10**400}, 1)
        assert not tracking.logger and not threads() and not list(tmp_path.iterdir())
        with pytest.raises(ConnectionRefusedError):
            request(port)
        assert tracker._loop.is_closed() and "OverflowError" in notices()["trainer.logger=prometheus"]


def test_a_port_that_is_taken_or_none_is_refused_by_its_variable(monkeypatch):
    with loopback() as taken:
        for value in (str(taken.getsockname()[1]), "many", "70000"):
            monkeypatch.setenv(PORT, value)
            with pytest.raises(ConfigError, match=PORT):
                PrometheusTracker("p", "e")


def test_a_tracker_that_never_began_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tracker = PrometheusTracker("p", "e")
    tracker.log({"x": 1.0}, 1)
    tracker.finish()
    assert not list(tmp_path.iterdir())
