"""A hub on this machine: the few routes that the client of Hugging Face asks for when a folder is uploaded."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class FakeHub(ThreadingHTTPServer):
    """Keeps what was created and committed; refuses everything if ``refuses`` is set. ``variables`` lead to it."""

    daemon_threads = True

    def __init__(self, refuses: int = 0):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.variables = {"HF_ENDPOINT": self.url, "HF_TOKEN": "hf_test", "HF_HUB_OFFLINE": "0"}
        self.refuses = refuses
        self.created: list[dict] = []
        self.files: dict[str, bytes] = {}
        self.tokens: set[str | None] = set()


class _Handler(BaseHTTPRequestHandler):
    server: FakeHub

    def do_GET(self) -> None:
        self._answer({"name": "me", "orgs": []} if "whoami" in self.path else {"id": "me/model", "siblings": []})

    def do_POST(self) -> None:
        hub, body = self.server, self.rfile.read(int(self.headers.get("Content-Length") or 0))
        hub.tokens.add(self.headers.get("Authorization"))
        if hub.refuses:
            self._answer({"error": "no"}, hub.refuses)
        elif self.path == "/api/repos/create":
            hub.created.append(json.loads(body))
            self._answer({"url": f"{hub.url}/me/model", "name": "me/model"})
        elif "/preupload/" in self.path:
            names = [file["path"] for file in json.loads(body)["files"]]
            self._answer({"files": [{"path": n, "uploadMode": "regular", "shouldIgnore": False} for n in names]})
        elif "/commit/" in self.path:
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    hub.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            self._answer({"commitUrl": f"{hub.url}/me/model/commit/0", "commitOid": "0" * 40, "pullRequestUrl": None})
        else:
            self._answer({})

    def _answer(self, said: object, status: int = 200) -> None:
        data = json.dumps(said).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *words: object) -> None:
        pass


@contextmanager
def fake_hub(refuses: int = 0) -> Iterator[FakeHub]:
    hub = FakeHub(refuses)
    threading.Thread(target=hub.serve_forever, args=(0.05,), daemon=True).start()
    try:
        yield hub
    finally:
        hub.shutdown()
        hub.server_close()
