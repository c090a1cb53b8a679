"""A replica that is there for a while: it takes its share, and what it has not finished goes on elsewhere."""

from __future__ import annotations

import asyncio

import pytest

from tests.harness.samplers import prompt, requests, sample, tiny_model
from verl.rollout.hf.sampler import HFSampler
from verl.rollout.service import SamplerService

ASKED = requests([prompt(5, seed) for seed in range(6)], max_tokens=60, ignore_eos=True)


def sampler() -> HFSampler:
    return HFSampler(tiny_model(), max_num_seqs=2, full_determinism=True)


def test_what_a_replica_that_is_taken_back_had_begun_goes_on_elsewhere_with_the_same_tokens():
    """Two requests run at a time, so four wait for the replica that comes, and are taken from it amid their tokens."""
    service = SamplerService({"own": sampler()}, slots=2, is_joined=True)

    async def run():
        asked = [asyncio.ensure_future(service.generate(request)) for request in ASKED]
        await asyncio.sleep(0)
        lent = sampler()
        await service.add("lent", lent)
        while lent.stats()["response_tokens"] < 20:
            await asyncio.sleep(0)
        taken = await service.take_back(["lent"])
        assert [one.name for one in service.replicas] == ["own"]
        assert not any(one.done() for one in asked[2:])
        return taken, lent, list(await asyncio.gather(*asked))

    taken, lent, done = asyncio.run(run())
    undisturbed = sample(sampler(), ASKED)
    assert [one.token_ids for one in done] == [one.token_ids for one in undisturbed]
    for one, other in zip(done, undisturbed):  # a prefix is computed at once, with other rounding
        assert one.log_probs == pytest.approx(other.log_probs, abs=2e-5)
        assert one.finish_reason == "length" and len(one.token_versions) == 60 and not one.is_interrupted
    assert taken.tokens == lent.stats()["response_tokens"] >= 20
    assert taken.completed == len(taken.moved) == 2 and {one[0] for one in taken.moved} <= {f"row{n}" for n in range(6)}
    assert sum(kept for _, _, kept in taken.moved) == taken.tokens
    assert service.stats()["interrupted"] == 2


def test_a_request_that_is_given_up_while_its_replica_is_taken_back_does_not_go_on():
    service = SamplerService({"own": sampler(), "lent": sampler()}, slots=2, is_joined=True)

    async def run():
        asked = [asyncio.ensure_future(service.generate(request)) for request in ASKED[:2]]
        while any(not one.ids for one in service.replicas):
            await asyncio.sleep(0)
        (name,) = service.replicas[1].ids
        await service.abort([name])
        taken = await service.take_back(["lent"])
        done = {one.request_id: one for one in await asyncio.gather(*asked)}
        return name, taken, done

    name, taken, done = asyncio.run(run())
    assert not taken.moved
    assert {which: one.finish_reason for which, one in done.items()} == {
        request.id: "abort" if request.id == name else "length" for request in ASKED[:2]
    }
