"""The client of a service that runs programs, against a small real server on this machine."""

from __future__ import annotations

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tests.rewards.files import Letters, batch
from verl.config import PPOTrainerConfig, record_reads, replace
from verl.errors import ConfigError, RewardError
from verl.rewards import (
    Limits,
    RewardFunction,
    RewardSample,
    Scorer,
    check_reward_data,
    default_compute_score,
    load_reward_manager,
    sandbox_fusion,
)
from verl.rewards.execution import Outcome, Program
from verl.rewards.sandbox_fusion import SandboxFusion


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
        self.pause = 0.0
        self.lock = threading.Lock()
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
            status, said = service.queue.pop(0) if service.queue else (200, None)
        time.sleep(service.pause)
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


@pytest.fixture
def service(monkeypatch):
    monkeypatch.setattr(sandbox_fusion, "FIRST_PAUSE", 0.01)
    server = Service()
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def test_a_program_is_sent_with_its_input_and_limits(service):
    assert SandboxFusion(service.url, 4, 256).run(Program("double", "21", 3.0)) == Outcome("finished", "2121")
    (asked,) = service.asked
    assert asked == {
        "path": "/run_code", "code": "double", "language": "python", "stdin": "21", "compile_timeout": 10.0,
        "run_timeout": 3.0, "memory_limit_MB": 256,
    }  # fmt: skip


def test_the_path_may_be_part_of_the_address(service):
    SandboxFusion(f"{service.url}/v1/run").run(Program("x"))
    assert service.asked[0]["path"] == "/v1/run"


@pytest.mark.parametrize(
    ("said", "status"),
    [
        (answer("Failed", "Error", 1), "failed"),
        (answer("Failed", "TimeLimitExceeded", None), "timeout"),
        (answer("Success", "Finished", 3), "failed"),
        (answer("Failed", compile_result={"status": "Error", "return_code": 1, "stderr": "bad"}), "not compiled"),
    ],
)
def test_what_became_of_a_program_is_told(service, said, status):
    service.queue.append((200, said))
    assert SandboxFusion(service.url).run(Program("x")).status == status


@pytest.mark.parametrize("status", [429, 500, 502, 503, 504])
def test_a_busy_service_is_asked_again(service, status):
    service.queue += [(status, {}), (status, {})]
    assert SandboxFusion(service.url).run(Program("x", "1")).stdout == "1"
    assert len(service.asked) == 3


@pytest.mark.parametrize(
    ("queue", "tries", "said"),
    [
        ([(503, {})] * 3, 3, "status 503"),
        ([(404, {})], 1, "status 404"),
        ([(200, b"no json")] * 3, 3, "JSONDecodeError"),
        ([(200, {"status": "SandboxError", "message": "no room"})], 1, "no room"),
        ([(200, [1])], 1, "failed"),
    ],
)
def test_a_service_that_fails_is_an_error_of_the_service_not_of_the_program(service, queue, tries, said):
    service.queue += queue
    with pytest.raises(RewardError, match=said):
        SandboxFusion(service.url).run(Program("x"))
    assert len(service.asked) == tries


def test_a_service_that_is_not_there_is_told(monkeypatch):
    monkeypatch.setattr(sandbox_fusion, "FIRST_PAUSE", 0.01)
    with pytest.raises(RewardError, match=r"reward\.sandbox_fusion\.url.*gave no result"):
        SandboxFusion("http://127.0.0.1:9").run(Program("x"))


@pytest.mark.parametrize("url", ["localhost:8080", "ftp://host", "http://", ""])
def test_what_is_no_address_is_refused(url):
    with pytest.raises(ConfigError, match=r"reward\.sandbox_fusion\.url"):
        SandboxFusion(url)


def test_no_more_programs_than_allowed_run_at_once(service):
    service.pause = 0.05
    runner = SandboxFusion(service.url, max_concurrent=3)
    threads = [threading.Thread(target=runner.run, args=(Program("x", str(i)),)) for i in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert service.most_at_once == 3 and len(service.asked) == 12


def test_programs_of_a_batch_are_scored_through_the_service(service):
    tests = {"inputs": ["1", "2"], "outputs": ["11", "22"]}
    rows = ["```python\ndouble\n```", "```python\nsame\n```", "nothing"]
    function = RewardFunction.of(default_compute_score, {"sandbox_fusion_url": service.url, "memory_limit_mb": 64})
    scorer = Scorer(function, Limits(num_workers=4))
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
    assert {asked["memory_limit_MB"] for asked in service.asked[1:]} == {99} and len(service.asked) == 10
    assert manager == "prime" or service.most_at_once == 3
    made.close()


def test_a_run_whose_service_does_not_answer_is_refused_before_it_begins(monkeypatch):
    monkeypatch.setattr(sandbox_fusion, "FIRST_PAUSE", 0.01)
    config = replace(PPOTrainerConfig(), **{"reward.sandbox_fusion.url": "http://127.0.0.1:9"})
    check_reward_data(config, ["openai/gsm8k"])
    with pytest.raises(RewardError, match="gave no result"):
        check_reward_data(config, ["openai/gsm8k", "apps"])
