"""vLLM's own server behind `rollout.name=server`: the same numbers as in process, new weights, abort, and its death."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import urllib.request
from contextlib import contextmanager

import psutil
import pytest

from tests.engines_real.vllm.test_in_process import PROMPTS, TOLERANCE, as_batch, difference
from tests.harness.engines import make_engine
from tests.harness.samplers import requests, sample
from verl.algorithms.losses import PPOPolicyLoss
from verl.config import ActorConfig
from verl.errors import RolloutError
from verl.outcomes import run_now
from verl.ports import free_port
from verl.rollout import Request, SamplingParams
from verl.rollout.lost import EngineLostError
from verl.rollout.server.openai import EXTENSION
from verl.rollout.server.process import ServerProcess
from verl.rollout.server.sampler import ServerSampler
from verl.weight_sync import chunk_weights

START_SECONDS = 600.0
CONTEXT = 1024  # of the model in `folder`


@contextmanager
def started(folder, *flags):
    """A server of a model's folder, ended with all of its processes."""
    port = free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), "--port", str(port)]
    command += ["--host", "127.0.0.1", "--dtype", "float32", "--enforce-eager", *flags]
    command += ["--logprobs-mode", "processed_logprobs", "--worker-extension-cls", EXTENSION]
    environment = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    process = ServerProcess.foreign(command, port, environment, name="vLLM's server")
    run_now(process.wait_until_up(START_SECONDS))
    children = psutil.Process(process.process.pid).children(recursive=True)
    yield process
    process.close()
    for left in psutil.wait_procs(children, 10)[1]:  # of a server whose guard was killed
        left.kill()


@pytest.fixture(scope="module")
def server(folder):
    with started(folder, "--max-num-seqs", "8") as process:
        yield process


def over(server, folder, **options):
    return ServerSampler(server.url, model=str(folder), max_start_wait=5.0, retry_delay=0.1, **options)


def tokens_generated(server) -> float:
    """What vLLM counts itself."""
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("vllm:generation_tokens_total{"))


async def until_it_generates(server, before: float) -> None:
    while await asyncio.to_thread(tokens_generated, server) <= before:
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_of_the_server_and_of_the_trainer_are_equal(server, folder, temperature):
    sampler = over(server, folder)
    wanted = requests(PROMPTS, samples=3, max_tokens=12, temperature=temperature, ignore_eos=True)
    found = sample(sampler, wanted)
    assert difference(make_engine(folder), wanted, found, temperature) < TOLERANCE
    assert sampler._dialect.name == "vllm" and sampler.max_model_len == CONTEXT
    assert [done.token_ids for done in sample(sampler, wanted)] == [done.token_ids for done in found]


def test_after_three_steps_of_training_they_differ_until_the_weights_are_synced(server, folder, tmp_path):
    sampler, engine = over(server, folder, weights_dir=str(tmp_path)), make_engine(folder)
    original = [(name, tensor.clone()) for name, tensor in engine.export_weights()]
    wanted = requests(PROMPTS, samples=2, max_tokens=8, ignore_eos=True)
    batch = as_batch(wanted, sample(sampler, wanted))
    batch.tensors["old_log_probs"] = batch.tensors["rollout_log_probs"]
    batch.tensors["advantages"] = batch.tensors["response_mask"] * 1.0
    for _ in range(3):
        engine.train_batch(batch, PPOPolicyLoss(ActorConfig()), temperature=1.0)
    assert difference(engine, wanted, sample(sampler, wanted)) > 1e-2
    asyncio.run(sampler.update_weights(chunk_weights(engine.export_weights(), 1 << 16, 2), 2))
    assert difference(engine, wanted, sample(sampler, wanted)) < TOLERANCE
    asyncio.run(sampler.update_weights(chunk_weights(original, 1 << 16, 3), 3))
    assert difference(make_engine(folder), wanted, sample(sampler, wanted)) < TOLERANCE


def test_an_aborted_request_returns_what_it_has(server, folder):
    sampler = over(server, folder)

    async def run():
        long = Request("long", PROMPTS[1], SamplingParams(max_tokens=480, ignore_eos=True))
        before = tokens_generated(server)
        task = asyncio.ensure_future(sampler.generate(long))
        await until_it_generates(server, before)
        await sampler.abort()
        return await asyncio.wait_for(task, 30)

    done = asyncio.run(run())
    assert done.finish_reason == "abort" and 0 < len(done.token_ids) < 480
    assert len(done.log_probs) == len(done.token_ids)


def test_what_the_server_refuses_is_said_in_its_words(server, folder):
    sampler = over(server, folder)
    sample(sampler, [Request("a", (5,), SamplingParams(max_tokens=1))])
    sampler.max_model_len = 10**6  # as if nobody had told us the context
    with pytest.raises(RolloutError, match=r"refuses the request \(400\).*max_model_len"):
        sample(sampler, [Request("a", (5,), SamplingParams(max_tokens=CONTEXT + 1))])


def test_sleep_and_wake_are_taken(server, folder):
    sampler = over(server, folder)

    async def run():
        await sampler.sleep(1)
        await sampler.wake()
        return await sampler.generate(Request("a", PROMPTS[0], SamplingParams(max_tokens=3, ignore_eos=True)))

    assert len(asyncio.run(run()).token_ids) == 3


def test_a_killed_server_is_an_error_for_every_request_and_no_hang(server, folder):
    sampler = over(server, folder, max_attempts=2, cooldown=0.2)
    wanted = requests(PROMPTS, samples=2, max_tokens=400, ignore_eos=True)

    async def run():
        before = tokens_generated(server)
        tasks = [asyncio.ensure_future(sampler.generate(request)) for request in wanted]
        await until_it_generates(server, before)
        os.kill(server.process.pid, signal.SIGKILL)
        return await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 60)

    assert all(isinstance(error, EngineLostError) for error in asyncio.run(run()))
