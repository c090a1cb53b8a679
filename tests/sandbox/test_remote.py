"""The client of a Sandbox Fusion service, against a small real server that runs programs in our own sandbox."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.harness.sandbox_service import HttpService, serving
from verl.errors import SandboxError
from verl.sandbox import CallCase, Limits, RemoteSandbox, StdinCase
from verl.sandbox import service as service_module


def fusion(
    status: str = "Success", ran: str = "Finished", code: int = 0, out: str = "", err: str = "", **more: Any
) -> Any:
    result = {"status": ran, "return_code": code, "stdout": out, "stderr": err, "execution_time": 0.25}
    return {"status": status, "message": "", "compile_result": None, "run_result": result, **more}


def behave(question: dict) -> dict:
    """A service whose programs say themselves what becomes of them."""
    code, stdin = question["code"], question["stdin"]
    if code == "echo":
        return fusion(out=stdin)
    if code == "slow":
        return fusion("Failed", "TimeLimitExceeded", None)
    if code == "error":
        return fusion("Failed", "Finished", 1, err="ValueError: x")
    if code == "crash":
        return fusion("Failed", "Finished", -11)
    if code == "flood":
        return fusion(out="x" * 100_000)
    if code == "syntax":
        compiled = {"status": "Finished", "return_code": 1, "stderr": "SyntaxError"}
        return {"status": "Failed", "message": "", "compile_result": compiled, "run_result": None}
    return {"status": "SandboxError", "message": "no machine is free"}


@pytest.fixture
def http() -> Iterator[HttpService]:
    with serving(behave) as running:
        yield running


def test_a_program_is_sent_as_the_service_wants_it(http: HttpService):
    outcome = RemoteSandbox(http.url).run("echo", "abc", Limits(seconds=3, memory_mb=100))
    assert outcome.ok and outcome.stdout == "abc" and outcome.seconds == 0.25
    assert http.paths == ["/run_code"]
    assert http.asked == [
        {
            "code": "echo",
            "language": "python",
            "stdin": "abc",
            "compile_timeout": 10.0,
            "run_timeout": 3,
            "memory_limit_MB": 100,
        }
    ]


def test_a_whole_address_is_taken_as_it_is(http: HttpService):
    RemoteSandbox(http.url + "/faas/run").run("echo")
    assert http.paths == ["/faas/run"]


@pytest.mark.parametrize(
    ("program", "status", "detail"),
    [
        ("slow", "timeout", "stopped after its 5 s"),
        ("error", "error", "ended with exit code 1"),
        ("crash", "crash", "killed by signal 11"),
        ("flood", "output", "it wrote more than 64 KB"),
        ("syntax", "error", "it does not compile"),
    ],
)
def test_what_becomes_of_a_program_is_an_outcome(http: HttpService, program: str, status: str, detail: str):
    outcome = RemoteSandbox(http.url).run(program)
    assert (outcome.status, outcome.detail) == (status, detail)
    assert len(outcome.stdout) <= 64 * 1024


def test_a_fault_of_the_service_is_no_outcome_of_the_program(http: HttpService, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(service_module, "FIRST_PAUSE", 0.01)
    remote = RemoteSandbox(http.url)
    with pytest.raises(SandboxError, match="no machine is free"):
        remote.run("anything else")
    http.script = [500] * 3
    with pytest.raises(SandboxError, match="See whether the sandbox service runs"):
        remote.run("echo")
    http.script = [b"[]"]
    with pytest.raises(SandboxError, match="failed"):
        remote.run("echo")


@pytest.mark.parametrize(
    "run_result", [None, [], "x", {"stdout": None, "return_code": "0"}, {"status": "Finished", "return_code": None}]
)
def test_an_answer_in_a_strange_form_never_counts_as_success(http: HttpService, run_result):
    http.answer = lambda _: {"status": "Success", "run_result": run_result}
    assert RemoteSandbox(http.url).run("echo").status == "error"


def test_cases_are_judged_here(http: HttpService):
    remote = RemoteSandbox(http.url)
    cases = [StdinCase("1", "1"), StdinCase("2", "3"), StdinCase("4", "4")]
    assert [result.verdict for result in remote.run_cases("echo", cases)] == ["passed", "wrong", "passed"]
    assert [result.verdict for result in remote.run_cases("echo", cases, stop_at_failure=True)] == ["passed", "wrong"]
    assert all("expected" not in question for question in http.asked)
    with pytest.raises(SandboxError, match="calls no functions"):
        remote.run_cases("echo", [CallCase("f")])  # type: ignore[list-item]
