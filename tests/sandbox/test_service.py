"""Questions to an HTTP service come back in time, whatever the service does."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from tests.harness.sandbox_service import HttpService, serving
from verl.errors import ConfigError
from verl.sandbox import service as service_module
from verl.sandbox.service import Service, ServiceError


@pytest.fixture
def http() -> Iterator[HttpService]:
    with serving(lambda question: {"echo": question}) as running:
        yield running


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_module, "FIRST_PAUSE", 0.02)


def test_a_question_is_answered(http: HttpService):
    assert Service(http.url + "/ask?x=1", "some.key").ask({"a": [1, "ü"]}, 5) == {"echo": {"a": [1, "ü"]}}
    assert http.paths == ["/ask?x=1"]


@pytest.mark.parametrize("trouble", [408, 429, 500, 502, 503, 504, b"{no json", b"", "half", "reset"])
def test_trouble_that_passes_is_asked_again(http: HttpService, trouble):
    http.script = [trouble, trouble]
    assert Service(http.url, "some.key").ask("q", 60) == {"echo": "q"}
    assert len(http.asked) == 3


@pytest.mark.parametrize("trouble", [500, b"{no json", "half", "reset", b"[" * 100_000])
def test_trouble_that_stays_ends_after_three_attempts(http: HttpService, trouble):
    http.script = [trouble] * 10
    with pytest.raises(ServiceError, match=r"some\.key: the service at http://127\.0\.0\.1:\d+ gave no answer"):
        Service(http.url, "some.key").ask("q", 60)
    assert len(http.asked) == 3


@pytest.mark.parametrize("status", [400, 401, 403, 404, 302])
def test_a_refusal_is_not_asked_again_and_nobody_is_sent_elsewhere(http: HttpService, status: int):
    http.script = [status]
    with pytest.raises(ServiceError, match=f"status {status}"):
        Service(http.url, "some.key").ask("q", 60)
    assert len(http.asked) == 1 and http.paths == ["/"]


@pytest.mark.parametrize("trouble", ["drip", 30.0])
def test_a_slow_answer_is_given_up_at_the_time_for_everything(http: HttpService, trouble):
    http.script = [trouble] * 10
    begin = time.monotonic()
    with pytest.raises(ServiceError, match="no answer in time"):
        Service(http.url, "some.key").ask("q", 0.5)
    assert time.monotonic() - begin < 15.0, "the answer takes thirty seconds"


def test_a_service_that_is_not_there_is_an_error():
    with pytest.raises(ServiceError, match="ConnectionRefusedError"):
        Service("http://127.0.0.1:9", "some.key").ask("q", 60)


def test_after_five_failures_in_a_row_it_is_left_alone_for_a_while(http: HttpService, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(service_module, "ATTEMPTS", 1)
    asker = Service(http.url, "some.key")
    http.script = [500] * 5
    for _ in range(5):
        with pytest.raises(ServiceError, match="status 500"):
            asker.ask("q", 5)
    with pytest.raises(ServiceError, match="5 questions in a row failed"):
        asker.ask("q", 5)
    assert len(http.asked) == 5
    later = SimpleNamespace(sleep=time.sleep, monotonic=lambda: time.monotonic() + service_module.OPEN_SECONDS)
    monkeypatch.setattr(service_module, "time", later)
    assert asker.ask("q", 5) == {"echo": "q"}


def test_no_more_requests_at_once_than_agreed(http: HttpService):
    asker, gate = Service(http.url, "some.key", max_concurrent=2), threading.Event()
    http.script = [gate] * 8
    threads = [threading.Thread(target=asker.ask, args=("q", 60)) for _ in range(8)]
    for thread in threads:
        thread.start()
    while http.now < 2:
        time.sleep(0.01)
    time.sleep(0.1)  # for a third, if there were one
    gate.set()
    for thread in threads:
        thread.join()
    assert http.most_at_once == 2 and len(http.asked) == 8


def test_no_place_in_time_is_an_error(http: HttpService):
    asker, gate = Service(http.url, "some.key", max_concurrent=1), threading.Event()
    http.script = [gate]
    thread = threading.Thread(target=asker.ask, args=("q", 60))
    thread.start()
    while not http.now:
        time.sleep(0.01)
    with pytest.raises(ServiceError, match=r"no place within 0\.2 s"):
        asker.ask("q", 0.2)
    gate.set()
    thread.join()


@pytest.mark.parametrize("url", ["localhost:80", "ftp://host/x", "file:///etc/passwd", "http://", ""])
def test_an_address_that_is_none_is_refused(url: str):
    with pytest.raises(ConfigError, match=r"some\.key: not the address of a service"):
        Service(url, "some.key")


def test_an_answer_beyond_all_measure_is_not_read_to_its_end(http: HttpService, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(service_module, "LARGEST_ANSWER", 1000)
    http.script = [b'"' + b"x" * 2000 + b'"'] * 3
    with pytest.raises(ServiceError, match="more than 1000 bytes"):
        Service(http.url, "some.key").ask("q", 60)
