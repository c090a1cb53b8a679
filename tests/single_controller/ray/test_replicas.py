"""Replicas that are Ray processes: one is killed while it samples, and every prompt still gets its answers."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from dataclasses import replace

import pytest

from tests.harness.models import tiny_model_dir
from tests.harness.samplers import requests, sample
from tests.harness.vision import pictures
from tests.rollout.hf.test_vision import requests as requests_with_images
from verl.models import load_causal_lm
from verl.rollout.base import Sampler
from verl.rollout.hf.sampler import HFSampler
from verl.rollout.hosted import RemoteSampler
from verl.rollout.service import SamplerService
from verl.single_controller.base import ClassWithInitArgs
from verl.single_controller.ray import host_object, runtime

pytestmark = pytest.mark.slow


@pytest.fixture
def ray():
    runtime.start_cluster([2], "cpu", {"address": "local", "num_cpus": 4, "object_store_memory": 200 << 20})
    yield
    runtime.stop_cluster()


def test_a_killed_actor_costs_no_answer_and_changes_none(ray, tmp_path):
    folder = str(tiny_model_dir(tmp_path))
    handles = [
        host_object(ClassWithInitArgs(HFSampler, folder, device="cpu"), f"sampler[{i}]", timeout=120) for i in range(2)
    ]
    replicas = SamplerService({handle.name: RemoteSampler(handle) for handle in handles})
    wanted = requests([tuple(range(10 + i, 20 + i)) for i in range(6)], 8, max_tokens=450, ignore_eos=True)
    victim = handles[0]._fleet.members[0].pid

    async def run():
        tasks = [asyncio.ensure_future(replicas.generate(request)) for request in wanted]
        while (await handles[0].call(Sampler.stats))["steps"] < 3:
            await asyncio.sleep(0.001)
        os.kill(victim, signal.SIGKILL)
        return await asyncio.wait_for(asyncio.gather(*tasks), 240)

    found = asyncio.run(run())
    assert replicas.stats()["replicas_lost"] == 1 and replicas.stats()["resent"] > 0
    assert Counter(done.request_id.split("-")[0] for done in found) == {str(i): 8 for i in range(6)}
    assert [done.token_ids for done in found] == [d.token_ids for d in sample(HFSampler(folder, device="cpu"), wanted)]


def test_images_reach_an_actor_with_all_their_bits(ray, seeing_model):
    """As pictures and as the processor made them; the samples of a prompt are separate requests."""
    folder = str(seeing_model())
    handle = host_object(ClassWithInitArgs(HFSampler, folder, full_determinism=True), "sampler", timeout=120)
    jobs = list(requests_with_images(folder, load_causal_lm(folder).config))
    jobs = [replace(job, images=pictures([(56, 56)]) if job.multi_modal_inputs else None) for job in jobs]
    here = HFSampler(folder, full_determinism=True)
    expected, got = sample(here, jobs), sample(RemoteSampler(handle), jobs)
    assert [(one.token_ids, one.log_probs) for one in got] == [(one.token_ids, one.log_probs) for one in expected]
    handle.close()
