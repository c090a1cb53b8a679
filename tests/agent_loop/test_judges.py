"""Servers of a judge: who is let in, what becomes of requests whose server dies, and when the run gives up."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import urllib.error
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from tests.harness.models import tiny_model_dir
from tests.harness.served_judges import greedy_reply, judges_over, question, reply_of
from tests.harness.waiting import wait_until
from verl.agent_loop import judges as module
from verl.agent_loop.judges import SHARED, JudgeSections, Progress, count_servers
from verl.config import PPOTrainerConfig, replace
from verl.errors import VerlError
from verl.metrics import notices
from verl.rollout.lost import EngineLostError
from verl.rollout.model_facts import ModelFacts
from verl.rollout.sglang import sampler as sglang
from verl.rollout.vllm import arguments as vllm

RM = "reward.reward_model"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_model_dir(tmp_path_factory.mktemp("judge"))


@pytest.fixture(scope="module")
def judges(folder):
    """Two servers, which every test leaves alive."""
    two = judges_over(folder, data_parallel_size=2)
    two.start("cpu")
    yield two
    two.close()


def pids(judges):
    return [judges._processes[number].process.pid for number in range(judges.count)]


def killed_in_flight(judges, victims, texts):
    """The answers to these texts while the servers ``victims`` are killed with their requests in flight."""
    for pid in victims:
        os.kill(pid, signal.SIGSTOP)  # a request that arrives now is in flight until the kill
    with ThreadPoolExecutor(len(texts)) as threads:
        asking = [threads.submit(question, judges.address, text) for text in texts]
        wait_until(lambda: sum(one.load for one in judges._service.replicas) >= len(victims))
        loads = [one.load for one in judges._service.replicas]
        for pid in victims:
            os.kill(pid, signal.SIGKILL)
        return loads, [reply_of(answer.result()) for answer in asking]


@pytest.mark.slow
def test_an_answer_is_that_of_the_model_and_needs_the_key(judges, folder):
    expected = greedy_reply(folder, "grade 7")
    assert reply_of(question(judges.address, "grade 7")) == expected
    place, _, key = judges.address.partition("/")
    for wrong in (place, f"{place}/{key[:-1]}", f"{place}/{key}x", f"{place}/v1"):
        with pytest.raises(urllib.error.HTTPError) as refused:
            question(wrong, "grade 7")
        assert refused.value.code == 401 and key not in refused.value.read().decode()
    drawn = [reply_of(question(judges.address, "grade 7", temperature=1, max_tokens=32)) for _ in range(2)]
    assert drawn[0] != drawn[1], "equal requests draw different answers"


@pytest.mark.slow
def test_equal_requests_with_equal_seeds_draw_equally(judges):
    def drawn(seed):
        return reply_of(question(judges.address, "grade 7", temperature=1, max_tokens=32, seed=seed))

    with ThreadPoolExecutor(3) as threads:
        answers = list(threads.map(drawn, [3, 3, 3]))
    assert len({*answers, drawn(3)}) == 1 and drawn(4) != answers[0]


@pytest.mark.slow
def test_what_a_judge_cannot_follow_is_refused_by_name(judges):
    for field, value, words in (("max_tokens", 5000, f"{RM}.rollout.max_model_len"), ("logit_bias", {"1": 2}, "logit")):
        with pytest.raises(urllib.error.HTTPError) as refused:
            question(judges.address, "grade 7", **{field: value})
        assert refused.value.code == 400 and words in refused.value.read().decode()


@pytest.mark.slow
@pytest.mark.parametrize("number", [1, 2], ids=["one of two dies", "both die"])
def test_requests_of_servers_that_die_are_answered_all_the_same(judges, folder, number):
    texts = [f"grade {n}" for n in range(6)]
    wait_until(lambda: judges._service.stats()["replicas_alive"] == 2)
    before = judges.restarts
    judges.metrics()
    loads, replies = killed_in_flight(judges, pids(judges)[:number], texts)
    assert sum(loads) > 0
    assert replies == [greedy_reply(folder, text) for text in texts]
    wait_until(lambda: judges._service.stats()["replicas_alive"] == 2, lambda: judges.error)
    metrics = judges.metrics()
    assert metrics["reward_model/restarts"] == before + number and metrics["reward_model/replicas"] == 2
    assert metrics["reward_model/requests"] == len(texts) and metrics["reward_model/resent"] >= number
    assert "SIGKILL" in notices()[f"{RM}, restart {before + 1}"]


@pytest.mark.slow
def test_a_server_that_stays_silent_and_cannot_restart_is_given_up(tmp_path):
    folder = tiny_model_dir(tmp_path / "judge")
    lone = judges_over(folder, hang_seconds=5.0, **{"server.max_restarts": 1})
    lone.start("cpu")
    try:
        (pid,) = pids(lone)
        shutil.rmtree(folder)
        os.kill(pid, signal.SIGSTOP)
        wait_until(lambda: lone.error)
        assert "judge server 0 was lost 2 times in a row" in lone.error and str(folder) in lone.error
        with pytest.raises(VerlError, match="max_restarts"):
            lone.check()
        with pytest.raises(urllib.error.HTTPError) as refused:
            question(lone.address, "grade 7")
        assert refused.value.code == 503 and "was lost 2 times" in refused.value.read().decode()
        assert not psutil.pid_exists(pid)
    finally:
        lone.close()


HANGING = """from verl.rollout.hf.sampler import HFSampler

draw = HFSampler._draw


def draw_later(sampler, rows, parts):
    open({gate!r}, "rb").close()  # returns once the test has opened the pipe, too
    return draw(sampler, rows, parts)


HFSampler._draw = draw_later
"""


@pytest.mark.slow
def test_a_server_whose_engine_hangs_is_restarted_though_it_answers(folder, tmp_path, monkeypatch):
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    (tmp_path / "hanging_engine.py").write_text(HANGING.format(gate=str(gate)))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    lone = judges_over(folder, hang_seconds=10.0)
    sections = lone._sections
    lone._sections = JudgeSections(sections.rollout, replace(sections.model, external_lib="hanging_engine"))
    lone.start("cpu")
    try:
        with ThreadPoolExecutor(1) as threads:
            asking = threads.submit(question, lone.address, "grade 7")
            wait_until(lambda: lone.restarts, lambda: lone.error)
            opened = os.open(gate, os.O_RDWR)
            assert reply_of(asking.result()) == greedy_reply(folder, "grade 7")
            os.close(opened)
        assert "has 1 request(s) and has computed nothing for 10 s" in notices()[f"{RM}, restart 1"]
    finally:
        lone.close()


def test_a_server_hangs_that_is_silent_or_has_requests_and_stands_still():
    progress = Progress(10.0, now=0.0)
    progress.heard(1.0, {"steps": 3, "requests": 0})
    progress.heard(12.0, {"steps": 3, "requests": 0})
    assert not progress.hang(12.0, load=0), "it has nothing to do"
    progress.heard(23.0, {"steps": 3, "requests": 0})
    assert progress.hang(23.0, load=2) == "it has 2 request(s) and has computed nothing for 10 s"
    progress.heard(23.0, {"steps": 4, "requests": 0})
    assert not progress.hang(33.0, load=2)
    progress.heard(33.0)
    assert progress.hang(34.0, load=2) == "it has 2 request(s) and has computed nothing for 10 s"
    assert progress.hang(44.0, load=0) == "it has not answered for 10 s"


@pytest.mark.slow
def test_a_restart_that_the_system_refuses_counts_as_a_failed_start(folder, monkeypatch):
    lone = judges_over(folder, **{"server.max_restarts": 1})
    lone.start("cpu")

    def refuse(*_, **__):
        raise OSError("no descriptor is left")

    monkeypatch.setattr(module, "host_process", refuse)
    try:
        os.kill(pids(lone)[0], signal.SIGKILL)
        wait_until(lambda: lone.error)
        assert "was lost 2 times in a row" in lone.error and "OSError: no descriptor is left" in lone.error
    finally:
        lone.close()


@pytest.mark.slow
def test_a_judge_that_is_closed_while_it_starts_ends(folder):
    lone = judges_over(folder)
    released = []
    lone.resources.callback(released.append, "its GPUs")
    with ThreadPoolExecutor(1) as threads:
        starting = threads.submit(lone.start, "cpu")
        wait_until(lambda: lone._thread is not None)
        lone.close()
        with pytest.raises(EngineLostError, match="closed while it started"):
            starting.result()
    assert released == ["its GPUs"]
    assert not any(process.is_alive for process in lone._processes.values())


PROGRAM = """import sys, time
from tests.harness.served_judges import judges_over
judges = judges_over(sys.argv[1])
judges.start("cpu")
print(judges._processes[0].process.pid, flush=True)
sys.stdin.read()
"""


@pytest.mark.slow
def test_servers_end_with_a_controller_that_is_killed(folder):
    controller = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    server = psutil.Process(int(controller.stdout.readline()))
    controller.kill()
    controller.wait()
    wait_until(lambda: not server.is_running() or server.status() == psutil.STATUS_ZOMBIE)


def section(folder, name, **rollout):
    changes = {f"{RM}.rollout.{key}": value for key, value in {"name": name, **rollout}.items()}
    return replace(PPOTrainerConfig(), **{f"{RM}.model_path": str(folder), **changes}).reward.reward_model


def test_engines_get_the_settings_of_the_reward_model(folder):
    settings = {
        "tensor_model_parallel_size": 2, "gpu_memory_utilization": 0.3, "seed": 7, "max_num_seqs": 64,
        "enforce_eager": False, "dtype": "float16", "max_num_batched_tokens": 2048,
    }  # fmt: skip
    assert settings.keys() == {*SHARED}
    of_vllm = JudgeSections.of(section(folder, "vllm", **settings, **{"engine_kwargs": {"vllm": {"swap_space": 4}}}))
    passed = vllm.from_config(of_vllm.rollout, of_vllm.model, "cuda", ModelFacts.of(folder))
    expected = {
        "model": str(folder), "tensor_parallel_size": 2, "gpu_memory_utilization": 0.3, "seed": 7, "max_num_seqs": 64,
        "max_model_len": 1024, "load_format": "auto", "dtype": "float16", "swap_space": 4, "enable_sleep_mode": False,
        "enforce_eager": False, "max_num_batched_tokens": 2048,
    }  # fmt: skip
    assert {name: passed[name] for name in expected} == expected
    of_sglang = JudgeSections.of(section(folder, "sglang", **settings, max_model_len=512))
    command = sglang.command(of_sglang.rollout, of_sglang.model, "cuda", 30000)
    for flag, value in (
        ("tp-size", "2"), ("mem-fraction-static", "0.3"), ("context-length", "512"), ("dtype", "float16"),
        ("random-seed", "7"), ("max-running-requests", "64"), ("host", "127.0.0.1"), ("model-path", str(folder)),
    ):  # fmt: skip
        assert command[command.index(f"--{flag}") + 1] == value
    assert "--disable-cuda-graph" not in command


def test_a_pool_holds_as_many_servers_as_have_room(folder):
    judge = section(folder, "vllm", tensor_model_parallel_size=2, data_parallel_size=3)
    assert count_servers(judge) == 3
    pool = {"enable_resource_pool": True, "nnodes": 1, "n_gpus_per_node": 8}
    assert count_servers(replace(judge, **pool)) == 4
