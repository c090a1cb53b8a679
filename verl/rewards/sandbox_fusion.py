"""A service with the interface of Sandbox Fusion runs programs: ``POST <url>`` with the code, the output comes back."""

from __future__ import annotations

import http.client
import json
import random
import threading
import time
import urllib.error
import urllib.request
from contextlib import AbstractContextManager
from typing import Any
from urllib.parse import urlsplit

from verl.errors import ConfigError, RewardError
from verl.rewards.execution import Outcome, Program

URL_KEY = "reward.sandbox_fusion.url"
PATH = "/run_code"
COMPILE_SECONDS = 10.0
EXTRA_SECONDS = 10.0
"""What a request may take beside the program's own time: waiting for a place, starting it."""
TRIES = 3
FIRST_PAUSE = 0.5
BUSY = (429, 500, 502, 503, 504)
LARGEST_ANSWER = 8 << 20

_places: dict[tuple[str, int], threading.BoundedSemaphore] = {}
_places_lock = threading.Lock()


class SandboxFusion:
    """One service.

    Args:
        url: ``http://host:port`` or with the whole path (``.../run_code``).
        max_concurrent: most requests at once, over all that name this service in this process.
        memory_limit_mb: memory of one program.
        places: a semaphore to use instead of that of the service.

    Raises:
        ConfigError: the url is none.
    """

    def __init__(
        self,
        url: str,
        max_concurrent: int = 64,
        memory_limit_mb: int = 1024,
        places: AbstractContextManager[Any] | None = None,
    ):
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError("is no address of a service", key=URL_KEY, got=url, allowed="http://host:port/run_code")
        self.url = url if parts.path.strip("/") else url.rstrip("/") + PATH
        self.memory_limit_mb = memory_limit_mb
        self._places = places if places is not None else places_of(self.url, max_concurrent)

    def run(self, program: Program) -> Outcome:
        """Run a program there; busy and silent services are asked three times, with growing pauses."""
        body = {
            "code": program.code,
            "language": "python",
            "stdin": program.stdin,
            "compile_timeout": COMPILE_SECONDS,
            "run_timeout": program.seconds,
            "memory_limit_MB": program.memory_mb or self.memory_limit_mb,
        }
        with self._places:
            return _outcome(self._ask(json.dumps(body).encode(), program.seconds + EXTRA_SECONDS), self.url)

    def check(self) -> None:
        """Ask the service for the smallest program."""
        self.run(Program("pass"))

    def _ask(self, body: bytes, seconds: float) -> Any:
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        problem = ""
        for number in range(TRIES):
            if number:
                time.sleep(FIRST_PAUSE * 2 ** (number - 1) * (0.5 + random.random()))
            request = urllib.request.Request(self.url, data=body, headers=headers, method="POST")
            try:
                with urllib.request.urlopen(request, timeout=seconds) as answer:
                    text = answer.read(LARGEST_ANSWER + 1)
                if len(text) > LARGEST_ANSWER:
                    raise RewardError("the sandbox service sent too long an answer", key=URL_KEY, got=self.url)
                return json.loads(text)
            except urllib.error.HTTPError as error:
                problem = f"status {error.code}"
                error.close()
                if error.code not in BUSY:
                    break
            except (OSError, http.client.HTTPException, ValueError) as error:
                problem = f"{type(error).__name__}: {error}"
        raise RewardError(
            f"the sandbox service gave no result ({problem})",
            key=URL_KEY,
            got=self.url,
            fix="The sample has no score; see whether the service runs.",
        )


def places_of(url: str, most: int) -> threading.BoundedSemaphore:
    """The semaphore of a service in this process, so that all scorers together keep its limit."""
    with _places_lock:
        return _places.setdefault((url, most), threading.BoundedSemaphore(most))


def _outcome(answer: Any, url: str) -> Outcome:
    """The service's answer; a fault of the service itself is an error, one of the program an outcome."""
    if not isinstance(answer, dict) or answer.get("status") not in ("Success", "Failed"):
        said = answer.get("message") if isinstance(answer, dict) else answer
        raise RewardError(f"the sandbox service failed: {str(said)[:200]}", key=URL_KEY, got=url)
    compiled, ran = answer.get("compile_result") or {}, answer.get("run_result") or {}
    stdout, stderr = str(ran.get("stdout") or ""), str(ran.get("stderr") or compiled.get("stderr") or "")
    if compiled and (compiled.get("status") != "Finished" or compiled.get("return_code") not in (0, None)):
        return Outcome("not compiled", stdout, stderr)
    if ran.get("status") == "TimeLimitExceeded":
        return Outcome("timeout", stdout, stderr)
    good = answer["status"] == "Success" and ran.get("status") == "Finished" and ran.get("return_code") == 0
    return Outcome("finished" if good else "failed", stdout, stderr)
