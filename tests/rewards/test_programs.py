"""Programs of models: at a service (a small real server on this machine) and in the sandbox of this machine."""

from __future__ import annotations

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tests.harness.sandboxes import HERE
from tests.rewards.files import Letters, batch
from verl.config import PPOTrainerConfig, record_reads, replace
from verl.errors import SandboxError
from verl.rewards import (
    RewardFunction,
    RewardSample,
    Scorer,
    ScoringLimits,
    check_reward_data,
    default_compute_score,
    load_reward_manager,
    programs,
)
from verl.rewards.programs import Sandbox, code_runner, does_not_compile
from verl.sandbox import Outcome
from verl.sandbox import service as http_service
from verl.sandbox.trial import RIGHT, WRONG


def answer(status: str = "Success", ran: str = "Finished", code: int = 0, stdout: str = "", **more) -> dict:
    result = {"status": ran, "return_code": code, "stdout": stdout, "stderr": "", "execution_time": 0.01}
    return {"status": status, "message": "", "compile_result": None, "run_result": result, **more}


class Service(ThreadingHTTPServer):
    """Echoes what a program reads, doubled where the program says so, unless it has been told what to answer."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[dict] = []
        self.queue: list[tuple[int, object]] = []
        self.at_once = self.most_at_once = 0
        self.expected, self.pause = 1, 0.0
        self.lock = threading.Condition()
        self.url = f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Service

    def do_POST(self) -> None:
        service = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with service.lock:
            service.asked.append({"path": self.path, **body})
            service.at_once += 1
            service.most_at_once = max(service.most_at_once, service.at_once)
            service.lock.notify_all()
            service.lock.wait_for(lambda: service.most_at_once >= service.expected, 60)
            status, said = service.queue.pop(0) if service.queue else (200, None)
        time.sleep(service.pause)  # for more, if they came
        if said is None and body["code"] in (RIGHT, WRONG):
            said = answer(stdout="42\n") if body["code"] == RIGHT else answer("Failed", "Error", 3)
        if said is None:
            said = answer(stdout=body["stdin"] * (2 if "double" in body["code"] else 1))
        data = said if isinstance(said, bytes) else json.dumps(said).encode()
        with service.lock:
            service.at_once -= 1
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *words: object) -> None:
        pass


@pytest.fixture(autouse=True)
def what_this_machine_offers(monkeypatch):
    """Where a layer is missing, programs run without it: what is tested here is their scores."""
    real = programs.default_pool
    monkeypatch.setattr(programs, "default_pool", lambda allow=(): real(allow or HERE["allow_missing"]))


@pytest.fixture
def service(monkeypatch):
    monkeypatch.setattr(http_service, "FIRST_PAUSE", 0.01)
    server = Service()
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def test_a_program_is_sent_with_its_input_and_limits(service):
    assert code_runner(service.url, 4, 256).run("double", "21", 3.0).stdout == "2121"
    (asked,) = service.asked
    assert asked == {
        "path": "/run_code", "code": "double", "language": "python", "stdin": "21", "compile_timeout": 10.0,
        "run_timeout": 3.0, "memory_limit_MB": 256,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("said", "status"),
    [
        (answer("Failed", "Error", 1), "error"),
        (answer("Failed", "TimeLimitExceeded", None), "timeout"),
        (answer("Success", "Finished", 3), "error"),
        (answer("Failed", compile_result={"status": "Error", "return_code": 1, "stderr": "bad"}), "not compiled"),
    ],
)
def test_what_became_of_a_program_is_told(service, said, status):
    service.queue.append((200, said))
    found = code_runner(service.url).run("x", "", 1.0)
    assert ("not compiled" if does_not_compile(found) else found.status) == status


def test_a_busy_service_is_asked_again(service):
    service.queue += [(503, {}), (429, {})]
    assert code_runner(service.url).run("x", "1", 1.0).stdout == "1"
    assert len(service.asked) == 3


@pytest.mark.parametrize(
    "queue",
    [[(503, {})] * 3, [(404, {})], [(200, b"no json")] * 3, [(200, {"status": "SandboxError"})], [(200, [1])]],
    ids=["busy", "not there", "no json", "its own fault", "a list"],
)
def test_a_service_that_fails_is_an_error_of_the_service_not_of_the_program(service, queue):
    service.queue += queue
    with pytest.raises(SandboxError):
        code_runner(service.url).run("x", "", 1.0)
    assert len(service.asked) == len(queue)


def test_all_that_name_a_service_share_its_places(service):
    service.pause = 0.05
    own = threading.BoundedSemaphore(1)
    for places, most in ((None, 3), (own, 1)):
        service.most_at_once, service.expected = 0, most
        runners = [code_runner(service.url, 3, None, places) for _ in range(12)]
        threads = [threading.Thread(target=runner.run, args=("x", "", 60.0)) for runner in runners]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert service.most_at_once == most
    assert len(service.asked) == 24


def test_programs_of_a_batch_are_scored_through_the_service(service):
    tests = {"inputs": ["1", "2"], "outputs": ["11", "22"]}
    rows = ["```python\ndouble\n```", "```python\nsame\n```", "nothing"]
    function = RewardFunction.of(default_compute_score, {"sandbox_fusion_url": service.url, "memory_limit_mb": 64})
    scorer = Scorer(function, ScoringLimits(num_workers=4))
    results = scorer.score([RewardSample("taco", text, tests) for text in rows])
    assert [result.score for result in results] == [1.0, 0.0, 0.0]
    assert results[0].extra["passed"] == 2 and {asked["memory_limit_MB"] for asked in service.asked} == {64}
    service.queue += [(404, {})] * 6
    failed = scorer.score([RewardSample("taco", rows[0], tests)])[0].failure
    assert failed is not None and "status 404" in failed.message, "the sample has no score, not a zero"
    scorer.close()


@pytest.mark.parametrize("manager", ["naive", "prime"])
def test_a_run_sends_programs_to_the_service_that_its_settings_name(service, manager):
    settings = {"url": service.url, "max_concurrent": 3, "memory_limit_mb": 99}
    config = replace(
        PPOTrainerConfig(),
        **{f"reward.sandbox_fusion.{name}": value for name, value in settings.items()},
        **{"reward.reward_manager.name": manager, "reward.timeout": 20.0},
    )
    service.pause = 0.05
    tests = {"inputs": ["1"], "outputs": ["11"]}
    data = batch(["double"] * 8 + ["same"], [tests] * 9, source="taco")
    with record_reads() as reads:
        check_reward_data(config, ["taco"])
        made = load_reward_manager(config, Letters())
    assert made(data)["reward_tensor"].sum(-1).tolist() == [1.0] * 8 + [0.0]
    assert {f"reward.sandbox_fusion.{name}" for name in settings} <= reads
    assert {asked["memory_limit_MB"] for asked in service.asked} == {99} and len(service.asked) == 2 + 9
    assert manager == "prime" or service.most_at_once == 3
    made.close()


def test_a_weaker_sandbox_is_used_where_the_settings_name_the_layer(monkeypatch):
    asked = []

    class Place:
        def run(self, code, stdin, limits):
            told = {RIGHT: Outcome("ok", "42\n"), WRONG: Outcome("error", exit_code=3)}
            return told.get(code, Outcome("ok", stdin))

    monkeypatch.setattr(programs, "default_pool", lambda allow_missing: asked.append(list(allow_missing)) or Place())
    config = replace(PPOTrainerConfig(), **{"reward.sandbox_fusion.allow_missing": ["landlock"]})
    with record_reads() as reads:
        check_reward_data(config, ["taco"])
        made = load_reward_manager(config, Letters())
    assert made(batch(["x"], [{"inputs": ["1"], "outputs": ["1"]}], source="taco"))["reward_tensor"].sum() == 1.0
    assert "reward.sandbox_fusion.allow_missing" in reads and asked[0] == asked[-1] == ["landlock"]
    made.close()


def test_a_run_whose_service_does_not_answer_is_refused_before_it_begins(monkeypatch):
    monkeypatch.setattr(http_service, "FIRST_PAUSE", 0.01)
    config = replace(PPOTrainerConfig(), **{"reward.sandbox_fusion.url": "http://127.0.0.1:9"})
    check_reward_data(config, ["openai/gsm8k"])
    with pytest.raises(SandboxError, match=r"reward\.sandbox_fusion\.url.*gave no answer"):
        check_reward_data(config, ["openai/gsm8k", "apps"])


SUMS = {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7\n"]}
CALLS = {"fn_name": "add", "inputs": [[1, 2], [3, 4]], "outputs": [3, 7]}


@pytest.fixture(scope="module")
def sandbox():
    made = code_runner(memory_limit_mb=256, allow_missing=HERE["allow_missing"])
    made.check()
    return made


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("print(sum(map(int, input().split())))", "ok"),
        ("def f(:", "not compiled"),
        ("exec('1 2')", "error"),
        ("1 / 0", "error"),
        ("while True: pass", "timeout"),
        ("x = bytearray(1 << 31)", "memory"),
        ("import socket; socket.create_connection(('127.0.0.1', 80))", "error"),
        ("print('x' * (4 << 20))", "output"),
    ],
)
def test_what_became_of_a_program_here_is_told(sandbox, code, status):
    found = sandbox.run(code, "1 2", 2.0 if status == "timeout" else 20.0)
    assert ("not compiled" if does_not_compile(found) else found.status) == status


GOOD = "print(sum(map(int, input().split())))"
FORGED = """
import os, sys, gc, inspect
for name in ("/proc/self/environ", "/proc/1/cmdline", "/tmp/expected"):
    try:
        print(open(name).read())
    except OSError:
        pass
print("passed", "score", 1.0)
os._exit(0)
"""
ADD = "def add(a, b):\n    return a + b"
EXITS = "def add(a, b):\n    raise SystemExit(0)"
ANSWERS = [
    (GOOD, SUMS, 1.0),
    ("print(3)", SUMS, 0.5),
    (FORGED, SUMS, 0.0),
    (ADD, CALLS, 1.0),
    (FORGED, CALLS, 0.0),
    (EXITS, CALLS, 0.0),
    ("", CALLS, 0.0),
]


def test_answers_of_a_batch_are_scored_side_by_side(sandbox):
    scorer = Scorer(RewardFunction.of(default_compute_score, {"memory_limit_mb": 256}), ScoringLimits(timeout=25))
    results = scorer.score([RewardSample("apps", f"```python\n{code}\n```", tests) for code, tests, _ in ANSWERS])
    assert [result.score for result in results] == [score for *_, score in ANSWERS]
    scorer.close()


def test_a_run_with_programs_starts_the_sandbox_before_anything_else(sandbox, monkeypatch):
    checked = []

    def check(self):
        checked.append(self)

    monkeypatch.setattr(Sandbox, "check", check)
    check_reward_data({"reward": {"sandbox_fusion": {"memory_limit_mb": 77}}}, ["openai/gsm8k"])
    check_reward_data({"reward": {"sandbox_fusion": {"memory_limit_mb": 77}}}, ["openai/gsm8k", "taco"])
    assert len(checked) == 1
