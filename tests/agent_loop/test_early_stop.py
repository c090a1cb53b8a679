"""Over-sampling: once enough trajectories are done, the longest are given up and marked as such."""

from __future__ import annotations

import asyncio

import pytest

from tests.agent_loop.test_manager import prompts, settings
from tests.harness.models import tiny_tokenizer
from tests.harness.samplers import tiny_model
from verl.agent_loop import AgentLoopBase, AgentLoopManager, AgentLoopOutput, register
from verl.rollout.base import Completion
from verl.rollout.hf.sampler import HFSampler


class Slow:
    """Answers a prompt after as many turns of the event loop as its first token says, or when it is aborted."""

    def __init__(self):
        self.aborts, self.events, self.asked = 0, {}, []

    async def generate(self, request):
        self.asked.append(request.id)
        event = self.events[request.id] = asyncio.Event()
        for turn in range(request.token_ids[0]):
            if event.is_set():
                return Completion(request.id, (7,) * turn, (-0.1,) * turn, "abort", (0,) * turn)
            await asyncio.sleep(0)
        return Completion(request.id, (7, 9), (-0.1, -0.1), "stop", (0, 0))

    async def abort(self, request_ids=None):
        self.aborts += 1
        for event in self.events.values():
            event.set()
        return len(self.events)


def run(sampler, rate, lengths, meta=None, **columns):
    manager = AgentLoopManager(settings(over_sample_rate=rate, response_length=50), sampler, tiny_tokenizer())
    batch = prompts([[n] for n in lengths], [f"u{i}" for i in range(len(lengths))], **columns)
    batch.meta_info.update(meta or {})
    return manager.generate_sequences(batch)


def test_the_longest_trajectories_are_given_up_and_marked():
    """Ten rows at a rate of 0.2: eight have to be done, the two of 1000 and 2000 turns are not."""
    sampler = Slow()
    batch = run(sampler, 0.2, [1, 2000, 2, 3, 4, 5, 1000, 6, 7, 8])
    assert list(batch.non_tensor_batch["finish_reason"]) == ["stop", "abort", *["stop"] * 4, "abort", *["stop"] * 3]
    assert sampler.aborts == 1 and batch.meta_info["metrics"]["rollout/finish_reason/abort"].value == 0.2


@pytest.mark.parametrize("rate", [0.0, 0.04])
def test_without_a_share_to_give_up_everything_is_waited_for(rate):
    sampler = Slow()
    batch = run(sampler, rate, [1, 300, 2])
    assert set(batch.non_tensor_batch["finish_reason"]) == {"stop"} and sampler.aborts == 0


@pytest.mark.parametrize("meta", [{"validate": True}, {"do_sample": False}])
def test_a_validation_and_a_greedy_baseline_wait_for_every_answer(meta):
    batch = run(Slow(), 0.9, [1, 300, 2], meta)
    assert set(batch.non_tensor_batch["finish_reason"]) == {"stop"}


@register("twice_for_early_stop")
class Twice(AgentLoopBase):
    """Asks, works on something, asks again."""

    async def run(self, sampling_params, **row):
        prompt = await self.prompt_ids(row)
        generate = self.server_manager.generate
        first = await generate(row["uid"], prompt_ids=prompt, sampling_params=sampling_params)
        for _ in range(prompt[0]):
            await asyncio.sleep(0)
        second = await generate(row["uid"], prompt_ids=prompt, sampling_params=sampling_params)
        ids = [*first.token_ids, *second.token_ids]
        return AgentLoopOutput(prompt, ids, [1] * len(ids), finish_reason=second.finish_reason)


def test_a_turn_that_begins_after_the_stop_is_not_sampled():
    sampler = Slow()
    batch = run(sampler, 0.5, [1, 200], agent_name=["twice_for_early_stop"] * 2)
    assert list(batch.non_tensor_batch["finish_reason"]) == ["stop", "abort"]
    assert len(sampler.asked) == 3


def test_with_a_real_model_the_rows_that_are_given_up_keep_what_they_have():
    sampler = HFSampler(tiny_model(vocab=259), max_num_seqs=3, stop_token_ids=())
    batch = run(sampler, 0.5, [5] * 6)
    reasons = list(batch.non_tensor_batch["finish_reason"])
    assert reasons.count("length") >= 3 and "abort" in reasons
    counts = batch.tensors["response_mask"].sum(-1).tolist()
    assert all(n == 50 for n, reason in zip(counts, reasons) if reason == "length")
    assert all(n < 50 for n, reason in zip(counts, reasons) if reason == "abort")
