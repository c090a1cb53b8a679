"""A small real HTTP service that answers as it is told: right, busy, slow, drop by drop, half, or not at all.

A number is a status, a fraction the seconds until the answer, an event what has to be set before it.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class HttpService(ThreadingHTTPServer):
    """``answer(question)`` gives the normal answer; ``script`` holds what happens instead, one entry per request."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, answer: Callable[[Any], Any]):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answer, self.script = answer, list[Any]()
        self.asked: list[Any] = []
        self.paths: list[str] = []
        self.lock = threading.Lock()
        self.now = self.most_at_once = 0
        self.url = f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: HttpService

    def do_POST(self) -> None:
        service = self.server
        question = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with service.lock:
            service.asked.append(question)
            service.paths.append(self.path)
            step = service.script.pop(0) if service.script else None
            service.now += 1
            service.most_at_once = max(service.most_at_once, service.now)
        try:
            self._reply(step, question)
        except OSError:  # the client gave up
            return
        finally:
            with service.lock:
                service.now -= 1

    def _reply(self, step: Any, question: Any) -> None:
        status, data, length = 200, b"", None
        if isinstance(step, int):
            status, data = step, b"told to"
        elif isinstance(step, bytes):
            data = step
        elif step == "half":
            data, length = b'{"result": [', 5000
        elif step == "reset":
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
            self.connection.close()
            return
        else:
            if isinstance(step, float):
                time.sleep(step)
            elif isinstance(step, threading.Event):
                step.wait()
            data = json.dumps(self.server.answer(question)).encode()
        self.send_response(status)
        if status == 302:
            self.send_header("Location", self.server.url + "/elsewhere")
        self.send_header("Content-Length", str(len(data) if length is None else length))
        self.end_headers()
        if step == "drip":
            for _ in range(600):
                self.wfile.write(b" ")
                self.wfile.flush()
                time.sleep(0.05)
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """No lines on the console."""


@contextmanager
def serving(answer: Callable[[Any], Any]) -> Iterator[HttpService]:
    service = HttpService(answer)
    thread = threading.Thread(target=service.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield service
    finally:
        service.shutdown()
        service.server_close()
        thread.join(5)
