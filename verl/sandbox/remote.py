"""The remote alternative: a service with the interface of Sandbox Fusion, which runs programs on its own machines."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import Any
from urllib.parse import urlsplit

from verl.errors import SandboxError
from verl.sandbox.limits import CallCase, Limits, StdinCase
from verl.sandbox.outcome import CaseResult, Outcome, Status
from verl.sandbox.service import Service, ServiceError
from verl.sandbox.verdicts import Compare, judge

PATH = "/run_code"
COMPILE_SECONDS = 10.0
EXTRA_SECONDS = 20.0
"""What a request may take on top of the program's own time: a place in the service's queue, and attempts."""


class RemoteSandbox:
    """Runs programs at a service: ``POST <url>`` with ``{code, language, stdin, compile_timeout, run_timeout,
    memory_limit_MB}``. Has the methods of `Pool` that both can have.

    Args:
        url: ``http://host:port``, or with the whole path.
        max_concurrent: requests at once.
        language: of the programs.

    Raises:
        ConfigError: the url is none.
    """

    def __init__(
        self, url: str, max_concurrent: int = 64, language: str = "python", key: str = "reward.sandbox_fusion.url"
    ):
        endpoint = url if urlsplit(url).path.strip("/") else url.rstrip("/") + PATH
        self._service = Service(endpoint, key, max_concurrent=max_concurrent)
        self._language = language

    def run(self, program: str, stdin: str = "", limits: Limits | None = None) -> Outcome:
        """Run a program there.

        Raises:
            SandboxError: the service did not answer, or says that it failed itself; the program is not to blame.
        """
        limits = limits or Limits()
        question = {
            "code": program,
            "language": self._language,
            "stdin": stdin,
            "compile_timeout": COMPILE_SECONDS,
            "run_timeout": limits.seconds,
            "memory_limit_MB": limits.memory_mb,
        }
        try:
            answer = self._service.ask(question, limits.seconds + EXTRA_SECONDS)
        except ServiceError as error:
            raise SandboxError(error.message, key=error.key, fix="See whether the sandbox service runs.") from error
        return _read(answer, limits, self._service.url)

    def speaking(self, language: str) -> RemoteSandbox:
        """The same service for programs in another language; both share the bound on requests at once."""
        other = copy(self)
        other._language = language
        return other

    def run_cases(
        self,
        program: str,
        cases: Sequence[StdinCase],
        limits: Limits | None = None,
        *,
        compare: Compare | None = None,
        stop_at_failure: bool = False,
    ) -> list[CaseResult]:
        """As `Pool.run_cases`, one request per case. Raises SandboxError for a `CallCase`, which is unknown there."""
        results = []
        for case in cases:
            if isinstance(case, CallCase):
                raise SandboxError("a sandbox service runs whole programs and calls no functions of them")
            results.append(judge(case, self.run(program, case.stdin, limits), compare))
            if stop_at_failure and not results[-1].passed:
                break
        return results


def _read(answer: Any, limits: Limits, url: str) -> Outcome:
    """The service's answer as an outcome."""
    if not isinstance(answer, dict) or answer.get("status") not in ("Success", "Failed"):
        message = answer.get("message") if isinstance(answer, dict) else answer
        raise SandboxError(f"the sandbox service at {url} failed: {str(message)[:200]}")
    compiled, ran = _result(answer, "compile_result"), _result(answer, "run_result")
    if compiled and (compiled.get("status") != "Finished" or compiled.get("return_code") not in (0, None)):
        return _outcome("error", compiled, limits, "it does not compile")
    status, code = ran.get("status"), ran.get("return_code")
    if status == "TimeLimitExceeded":
        return _outcome("timeout", ran, limits, f"stopped after its {limits.seconds:g} s")
    if answer["status"] == "Success" and status == "Finished" and code == 0:
        return _outcome("ok", ran, limits, "")
    if isinstance(code, int) and code < 0:
        return _outcome("crash", ran, limits, f"killed by signal {-code}")
    return _outcome("error", ran, limits, f"ended with exit code {code}")


def _outcome(status: Status, result: dict[str, Any], limits: Limits, detail: str) -> Outcome:
    """The texts are cut as in our own sandbox, and a program that wrote too much has the same outcome."""
    most = limits.output_kb * 1024
    texts = [str(result.get(name) or "") for name in ("stdout", "stderr")]
    if status == "ok" and any(len(text) > most for text in texts):
        status, detail = "output", f"it wrote more than {limits.output_kb} KB"
    code, seconds = result.get("return_code"), result.get("execution_time")
    return Outcome(
        status=status,
        stdout=texts[0][:most],
        stderr=texts[1][:most],
        exit_code=code if isinstance(code, int) and code >= 0 else None,
        signal=-code if isinstance(code, int) and code < 0 else None,
        seconds=float(seconds) if isinstance(seconds, (int, float)) else 0.0,
        detail=detail,
    )


def _result(answer: dict[str, Any], name: str) -> dict[str, Any]:
    section = answer.get(name)
    return section if isinstance(section, dict) else {}
