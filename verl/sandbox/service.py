"""Asks an HTTP service for something that can be said in JSON, and always comes back: in time, with bounded attempts.

For services that the person who starts a run names in the configuration. An address never comes from a model, and
redirects are not followed, so an answer cannot send us anywhere else.
"""

from __future__ import annotations

import http.client
import json
import random
import socket
import ssl
import threading
import time
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from verl.errors import ConfigError, VerlError
from verl.json_text import read_json

ATTEMPTS = 3
"""Most requests for one question."""
HEADERS = {"Content-Type": "application/json", "Accept": "application/json"}
FIRST_PAUSE = 0.25
BUSY = (408, 425, 429, 500, 502, 503, 504)
LARGEST_ANSWER = 64 << 20
OPEN_AFTER, OPEN_SECONDS = 5, 30.0
SHOWN = 200


class ServiceError(VerlError, RuntimeError):
    """A service gave no usable answer."""


class Service:
    """One address that takes JSON by POST and answers with JSON. Safe to use from several threads.

    Args:
        url: ``http://host:port/path``.
        key: the setting that holds it, for messages.
        max_concurrent: most requests at once; others wait for a place, within their time.

    Raises:
        ConfigError: the url is none.
    """

    def __init__(self, url: str, key: str, *, max_concurrent: int = 64):
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError("not the address of a service", key=key, got=url, allowed="http://host:port/path")
        if max_concurrent < 1:
            raise ConfigError("must be at least 1", key=key, got=max_concurrent)
        self.url, self._key = url, key
        self._address = (parts.hostname, parts.port or (443 if parts.scheme == "https" else 80))
        self._path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        # Callers' threads: a place for the length of a request; the lock for the count of failures, never for a wait.
        self._places = threading.BoundedSemaphore(max_concurrent)
        self._lock = threading.Lock()
        self._failures, self._closed_until = 0, 0.0

    def ask(self, question: Any, seconds: float) -> Any:
        """The answer to one question.

        Args:
            seconds: the time for everything: waiting for a place, all attempts, and the pauses between them.

        Raises:
            ServiceError: no answer in that time, or none that is JSON; at once where the last questions all failed and
                the service is being left alone for a while.
        """
        deadline = time.monotonic() + seconds
        with self._lock:
            if time.monotonic() < self._closed_until:
                raise self._error(f"left alone for a while, because {self._failures} questions in a row failed")
        if not self._places.acquire(timeout=seconds):
            raise self._error(f"no place within {seconds:g} s")
        try:
            answer = self._ask_again(json.dumps(question).encode(), deadline)
        except ServiceError:
            self._note(failed=True)
            raise
        finally:
            self._places.release()
        self._note(failed=False)
        return answer

    def _ask_again(self, body: bytes, deadline: float) -> Any:
        problem = "no time left"
        for number in range(ATTEMPTS):
            pause = FIRST_PAUSE * 2 ** (number - 1) * (0.5 + random.random()) if number else 0.0
            if time.monotonic() + pause >= deadline:
                break
            time.sleep(pause)
            try:
                status, data = self._ask_once(body, deadline)
                if status == 200:
                    return read_json(data)
                problem = f"status {status}: {data[:SHOWN].decode('utf-8', 'replace')}"
                if status not in BUSY:
                    break
            except (OSError, http.client.HTTPException, ValueError) as error:
                late = time.monotonic() >= deadline
                problem = "no answer in time" if late else f"{type(error).__name__}: {str(error)[:SHOWN]}"
        raise self._error(problem)

    def _ask_once(self, body: bytes, deadline: float) -> tuple[int, bytes]:
        """(status, body). A server that sends a byte now and then does not keep us longer than the deadline."""
        left = max(deadline - time.monotonic(), 0.001)
        if self._tls is None:
            connection = http.client.HTTPConnection(*self._address, timeout=left)
        else:
            connection = http.client.HTTPSConnection(*self._address, timeout=left, context=self._tls)
        timer = None
        try:
            connection.connect()
            timer = threading.Timer(max(deadline - time.monotonic(), 0.001), _cut, [connection.sock])
            timer.daemon = True
            timer.start()
            connection.request("POST", self._path, body, HEADERS)
            answer = connection.getresponse()
            data = answer.read(LARGEST_ANSWER + 1)
            if len(data) > LARGEST_ANSWER:
                raise ValueError(f"an answer of more than {LARGEST_ANSWER} bytes")
            return answer.status, data
        finally:
            if timer is not None:
                timer.cancel()
            connection.close()

    def _note(self, failed: bool) -> None:
        with self._lock:
            self._failures = self._failures + 1 if failed else 0
            if self._failures >= OPEN_AFTER:
                self._closed_until = time.monotonic() + OPEN_SECONDS

    def _error(self, problem: str) -> ServiceError:
        return ServiceError(f"the service at {self.url} gave no answer ({problem})", key=self._key)


def _cut(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
