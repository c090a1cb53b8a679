"""One vLLM engine over two processes (tensor parallel): it samples what one process samples, follows new weights, and
ends with whoever holds it."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.harness.samplers import requests, sample
from verl.errors import RolloutError
from verl.rollout import Request, SamplingParams
from verl.rollout.hf.sampler import HFSampler
from verl.rollout.lost import EngineLostError
from verl.rollout.vllm import weight_transfer
from verl.rollout.vllm.sampler import VLLMSampler
from verl.weight_sync import chunk_weights

PROMPTS = [(40, 41, 42), (50, 51, 52, 53, 54, 55), tuple(range(60, 90))]
WANTED = requests(PROMPTS, samples=2, max_tokens=8, ignore_eos=True)
ARGUMENTS = {"dtype": "float32", "enforce_eager": True, "max_num_seqs": 8}
TWO = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
BUCKET = 1 << 14
SECONDS = 60


@pytest.fixture(scope="module")
def two(folder):
    made = VLLMSampler({"model": str(folder), **ARGUMENTS, **TWO})
    yield made
    made.close()


@pytest.fixture(scope="module")
def one(folder):
    made = VLLMSampler({"model": str(folder), **ARGUMENTS})
    yield made
    made.close()


@pytest.fixture(scope="module")
def weights(folder):
    return list(HFSampler(str(folder), device="cpu").model.state_dict().items())


def update(sampler, weights, version, factor=1.0):
    scaled = ((name, value * factor) for name, value in weights)
    asyncio.run(sampler.update_weights(chunk_weights(scaled, BUCKET, version), version))


def workers():
    """The processes of the engine that this process started."""
    return [child for child in psutil.Process().children(recursive=True) if "VLLM::Worker" in " ".join(child.cmdline())]


def wait_until_gone(processes):
    _, alive = psutil.wait_procs(processes, SECONDS)
    assert not alive


def test_two_processes_sample_what_one_samples_and_follow_three_updates(one, two, weights):
    assert len(workers()) == 2
    seen = []
    for version, factor in enumerate((1.0, 1.05, 0.95, 1.1)):
        for sampler in (one, two) if version else ():
            update(sampler, weights, version, factor)
        expected, found = sample(one, WANTED), sample(two, WANTED)
        assert [done.token_ids for done in found] == [done.token_ids for done in expected]
        for done, right in zip(found, expected):
            assert done.log_probs == pytest.approx(right.log_probs, abs=1e-5)
            assert set(done.token_versions) == {version}
        seen.append(found[0].log_probs)
    assert len(set(seen)) == 4, "every update is seen"


def test_sleep_and_abort_reach_both_processes(two, weights):
    update(two, weights, 5)

    async def run():
        await two.sleep(1)
        with pytest.raises(RolloutError, match="it sleeps"):
            await two.generate(WANTED[0])
        await two.wake()
        long = Request("long", PROMPTS[1], SamplingParams(max_tokens=400, ignore_eos=True))
        task = asyncio.ensure_future(two.generate(long))
        while not any(running.token_ids for running in two._running.values()):
            await asyncio.sleep(0.01)
        assert await two.abort(["long"]) == 1
        return await task, await two.generate(WANTED[0])

    part, next_one = asyncio.run(run())
    assert part.finish_reason == "abort" and 0 < len(part.token_ids) < 400
    assert len(next_one.token_ids) == 8


def test_after_a_stream_that_broke_off_nothing_is_sampled_until_a_whole_one_came(one, two, weights):
    chunks = list(chunk_weights(weights, BUCKET, 6))

    def failing():
        yield from chunks[: len(chunks) // 2]
        raise RolloutError("the trainer is gone")

    with pytest.raises(RolloutError, match="the trainer is gone"):
        asyncio.run(two.update_weights(failing(), 6))
    with pytest.raises(RolloutError, match="send them again"):
        sample(two, WANTED[:1])
    for sampler in (one, two):
        update(sampler, weights, 7, 1.02)
    found, expected = sample(two, WANTED), sample(one, WANTED)
    assert [done.token_ids for done in found] == [done.token_ids for done in expected]
    assert found[0].log_probs == pytest.approx(expected[0].log_probs, abs=1e-5)


def test_an_engine_that_loses_a_process_is_lost_and_leaves_none_behind(two):
    """Last of those that share this engine."""
    both = workers()
    both[1].kill()
    wait_until_gone(both[1:])
    with pytest.raises(EngineLostError, match="vLLM failed"):
        sample(two, WANTED[:1])
    with pytest.raises(EngineLostError, match="vLLM failed"):
        sample(two, WANTED[:1])
    wait_until_gone(both)


def test_its_processes_end_with_the_one_that_holds_it_even_in_an_update(folder, tmp_path):
    before = set(weight_transfer.SHARED_MEMORY.glob("verl-weights-*"))
    holder = subprocess.Popen(
        [sys.executable, "-m", "tests.engines_real.vllm.held", str(folder)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[3],
    )
    assert holder.stdout is not None
    try:
        said = next(line for line in holder.stdout if line.startswith("workers"))
        both = [psutil.Process(int(pid)) for pid in said.split()[1:]]
        assert len(both) == 2 and set(weight_transfer.SHARED_MEMORY.glob("verl-weights-*")) - before
    finally:
        holder.kill()
        holder.wait()
    wait_until_gone(both)
    assert not set(weight_transfer.SHARED_MEMORY.glob("verl-weights-*")) - before


def test_a_number_of_processes_that_does_not_divide_the_heads_is_refused_in_the_engine_s_words(folder):
    with pytest.raises(RolloutError, match=r"did not start.*divisible"):
        VLLMSampler({"model": str(folder), **ARGUMENTS, **TWO, "tensor_parallel_size": 3})
