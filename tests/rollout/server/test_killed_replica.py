"""Replicas are real processes, one is killed while it samples: nothing is missing, nothing doubled, nothing changed."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections import Counter

import pytest

from tests.harness.models import tiny_model_dir
from tests.harness.samplers import requests, sample, stopped_at_work
from verl.errors import RolloutError
from verl.rollout.hf.sampler import HFSampler
from verl.rollout.server.host import LISTENING
from verl.rollout.server.process import KEY
from verl.rollout.server.sampler import ServerSampler
from verl.rollout.service import SamplerService
from verl.weight_sync import chunk_weights

COUNT = 2
SAMPLES = 8
SECRET = "a key that both sides know"
TIMEOUT = 86400.0
"""Seconds a request may take, which nobody has to wait for when its connection breaks."""
HANGS = 240.0
"""Seconds after which nothing will come any more."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_model_dir(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def hosts(folder):
    """Samplers in processes of their own, with their addresses."""
    command = [sys.executable, "-m", "verl.rollout.server.host", f"actor_rollout_ref.model.path={folder}"]
    environment = {**os.environ, KEY: SECRET}
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) for _ in range(COUNT)]
    try:
        yield [(process, process.stdout.readline().removeprefix(LISTENING).strip()) for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait(60)


def over(url, folder):
    return ServerSampler(url, model=str(folder), timeout=TIMEOUT, max_attempts=1, retry_delay=0.05, api_key=SECRET)


@pytest.mark.slow
def test_new_weights_reach_hosts_in_other_processes_and_bad_ones_do_not(hosts, folder, tmp_path):
    replicas = SamplerService({url: over(url, folder) for _, url in hosts})
    reference = HFSampler(str(folder), device="cpu")
    weights = [(name, tensor * 1.5) for name, tensor in reference.model.state_dict().items()]
    wanted = requests([(10, 11, 12)], 4, max_tokens=8, ignore_eos=True)

    async def update(sampler):
        await sampler.update_weights(chunk_weights(weights, 1 << 12, 6), 6)

    before = sample(replicas, wanted)
    asyncio.run(update(replicas))
    asyncio.run(update(reference))
    after, expected = sample(replicas, wanted), sample(reference, wanted)
    assert [d.token_ids for d in after] == [d.token_ids for d in expected]
    assert [d.log_probs for d in after] != [d.log_probs for d in before]
    assert {v for d in after for v in d.token_versions} == {6}
    original = list(HFSampler(str(folder), device="cpu").model.state_dict().items())
    asyncio.run(replicas.update_weights(chunk_weights(original, 1 << 12, 7), 7))
    assert [d.log_probs for d in sample(replicas, wanted)] == [d.log_probs for d in before]
    other = SamplerService({url: over(url, folder) for _, url in hosts})  # which loads nothing itself
    with pytest.raises(RolloutError, match=r"other weights.*Got 7.*8"):
        asyncio.run(other.publish(8))
    asyncio.run(other.publish(7))
    assert other.version == 7 and other.stats()["replicas_alive"] == COUNT


@pytest.mark.slow
def test_every_prompt_gets_exactly_its_samples_when_a_replica_is_killed_in_mid_generation(
    hosts, folder, monkeypatch, record_property
):
    replicas = SamplerService({url: over(url, folder) for _, url in hosts})
    prompts = [tuple(range(10 + i, 20 + i)) for i in range(6)]
    wanted = requests(prompts, SAMPLES, max_tokens=400, ignore_eos=True, seed=5)
    victim, other = hosts[0][0], replicas.replicas[1].sampler
    generate, sent = other.generate, []

    async def noted(request):
        sent.append(time.monotonic())
        return await generate(request)

    monkeypatch.setattr(other, "generate", noted)

    async def run():
        warm = await asyncio.gather(*(replicas.generate(request) for request in requests(prompts[:2], 1, max_tokens=2)))
        tasks = await stopped_at_work(
            victim.pid,
            ask=lambda: [asyncio.ensure_future(replicas.generate(request)) for request in wanted],
            owes=lambda tasks: replicas.replicas[0].load > 0,
        )
        busy = replicas.replicas[0].load
        os.kill(victim.pid, signal.SIGKILL)
        killed = time.monotonic()
        return warm, busy, killed, await asyncio.wait_for(asyncio.gather(*tasks), HANGS)

    warm, busy, killed, found = asyncio.run(run())
    assert len(warm) == 2 and busy > 0, "the killed replica was in the middle of something"
    assert replicas.stats()["replicas_lost"] == 1
    assert Counter(done.request_id.split("-")[0] for done in found) == {str(i): SAMPLES for i in range(len(prompts))}
    names = {done.request_id for done in found}
    record_property("noticed_seconds", replicas.replicas[0].lost_at - killed)
    record_property("recovered_seconds", max(sent) - killed)  # the last of its requests went to the other one
    record_property("lost", len(wanted) - len(names))
    record_property("doubled", len(found) - len(names))
    assert len(names) == len(wanted)
    assert replicas.stats()["resent"] >= busy
    expected = sample(HFSampler(str(folder), device="cpu"), wanted)
    assert [done.token_ids for done in found] == [done.token_ids for done in expected]
    assert max(abs(a - b) for d, e in zip(found, expected) for a, b in zip(d.log_probs, e.log_probs)) < 2e-5
