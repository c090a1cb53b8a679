"""The manager with a sampler that answers from a table: layout of the batch, keys of the requests, failures."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from verl.agent_loop import AgentLoopBase, AgentLoopManager, AgentLoopOutput
from verl.errors import RolloutError
from verl.protocol import DataProto
from verl.rollout.base import Completion, Request


class Table:
    """Answers a prompt with its first token counted down: [3] -> 3, 2, 1; keeps what it was asked."""

    def __init__(self):
        self.requests: list[Request] = []

    async def generate(self, request: Request) -> Completion:
        self.requests.append(request)
        await asyncio.sleep(0)
        tokens = tuple(range(request.token_ids[0], 0, -1))
        return Completion(request.id, tokens, tuple(-0.5 * t for t in tokens), "stop", (4,) * len(tokens))


def settings(**changes):
    sampling = {"temperature": 0.7, "top_p": 0.9, "top_k": -1, "do_sample": True}
    validation = SimpleNamespace(temperature=0.0, top_p=1.0, top_k=-1, do_sample=False)
    agent = SimpleNamespace(default_agent_loop="single_turn_agent")
    base = {
        "seed": 42,
        "response_length": 8,
        "ignore_eos": False,
        "calculate_log_probs": True,
        "val_kwargs": validation,
        "agent": agent,
    }
    return SimpleNamespace(**{**base, **sampling, **changes})


def manager(sampler, **changes) -> AgentLoopManager:
    return AgentLoopManager(settings(), sampler, SimpleNamespace(pad_token_id=0, eos_token_id=9), **changes)


def prompts(ids: list[list[int]], uids: list[str], **columns) -> DataProto:
    arrays = {"raw_prompt_ids": ids, "uid": uids, **columns}
    made = {}
    for name, values in arrays.items():
        made[name] = np.empty(len(values), dtype=object)
        made[name][:] = values
    return DataProto.from_dict(non_tensors=made)


def test_the_batch_is_padded_to_its_longest_rows_on_the_right_sides():
    batch = manager(Table()).generate_sequences(prompts([[3], [1, 7]], ["a", "b"]))
    assert batch.batch["prompts"].tolist() == [[0, 3], [1, 7]]
    assert batch.batch["responses"].tolist() == [[3, 2, 1], [1, 0, 0]]
    assert batch.batch["response_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert batch.batch["input_ids"].tolist() == [[0, 3, 3, 2, 1], [1, 7, 1, 0, 0]]
    assert batch.batch["attention_mask"].tolist() == [[0, 1, 1, 1, 1], [1, 1, 1, 0, 0]]
    assert batch.batch["position_ids"].tolist() == [[0, 0, 1, 2, 3], [0, 1, 2, 2, 2]]
    torch.testing.assert_close(
        batch.batch["rollout_log_probs"], torch.tensor([[-1.5, -1.0, -0.5], [-0.5, 0.0, 0.0]]), atol=0, rtol=0
    )
    assert batch.batch["token_versions"].tolist() == [[4, 4, 4], [4, -1, -1]]
    assert batch.non_tensor_batch["finish_reason"].tolist() == ["stop", "stop"]
    assert batch.meta_info["pad_token_id"] == 0


def test_samples_of_one_prompt_are_told_apart_by_their_order():
    sampler = Table()
    manager(sampler).generate_sequences(prompts([[2], [2], [5]], ["a", "a", "b"]))
    assert [(r.uid, r.sample_index, r.sampling.seed) for r in sampler.requests] == [
        ("a", 0, 42),
        ("a", 1, 42),
        ("b", 0, 42),
    ]


def test_validation_samples_with_its_own_settings():
    sampler = Table()
    rows = prompts([[2]], ["a"])
    loops = manager(sampler)
    loops.generate_sequences(rows)
    rows.meta_info["validate"] = True
    loops.generate_sequences(rows)
    train, val = (r.sampling for r in sampler.requests)
    assert (train.temperature, train.top_p, train.do_sample, train.max_tokens) == (0.7, 0.9, True, 8)
    assert (val.temperature, val.top_p, val.do_sample, val.max_tokens) == (0.0, 1.0, False, 8)


class TwoTurns(AgentLoopBase):
    """Samples, inserts token 6, samples again."""

    async def run(self, sampling_params, **row):
        prompt = await self.prompt_ids(row)
        first = await self.server_manager.generate("x", prompt_ids=prompt, sampling_params=sampling_params)
        second = await self.server_manager.generate("x", prompt_ids=[1], sampling_params=sampling_params)
        n, m = len(first.token_ids), len(second.token_ids)
        return AgentLoopOutput(
            prompt, [*first.token_ids, 6, *second.token_ids], [1] * n + [0] + [1] * m, extra_fields={"turns": 2}
        )


def test_a_row_picks_its_loop_by_dotted_path_and_later_turns_have_keys_of_their_own():
    sampler = Table()
    rows = prompts([[2], [2]], ["a", "b"], agent_name=[f"{__name__}:TwoTurns", None])
    batch = manager(sampler).generate_sequences(rows)
    assert batch.batch["responses"].tolist() == [[2, 1, 6, 1], [2, 1, 0, 0]]
    assert batch.batch["response_mask"].tolist() == [[1, 1, 0, 1], [1, 1, 0, 0]]
    assert batch.non_tensor_batch["turns"].tolist() == [2, None]
    assert "rollout_log_probs" not in batch.batch.keys(), "one loop returned none"
    assert {r.uid for r in sampler.requests} == {"a", "a/1", "b"}


class Failing(AgentLoopBase):
    async def run(self, sampling_params, **row):
        raise ZeroDivisionError("a bug of mine")


def test_a_loop_that_raises_is_named_with_its_row_and_cause():
    rows = prompts([[2], [2]], ["a", "b"], agent_name=[None, f"{__name__}:Failing"])
    with pytest.raises(RolloutError, match=r"Failing.*row 1.*uid b.*a bug of mine") as caught:
        manager(Table()).generate_sequences(rows)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_a_trajectory_is_scored_as_soon_as_it_ends():
    async def score(row, output):
        return float(len(output.response_ids))

    batch = manager(Table(), score=score).generate_sequences(prompts([[3], [1]], ["a", "b"]))
    assert batch.non_tensor_batch["reward_score"].tolist() == [3.0, 1.0]


def test_it_works_inside_a_running_event_loop_too():
    async def inside():
        return manager(Table()).generate_sequences(prompts([[2]], ["a"]))

    assert asyncio.run(inside()).batch["responses"].tolist() == [[2, 1]]


def test_an_unknown_sampling_parameter_is_refused_with_the_nearest_name():
    class Wrong(AgentLoopBase):
        async def run(self, sampling_params, **row):
            return await self.server_manager.generate("x", prompt_ids=[1], sampling_params={"temprature": 1.0})

    loops = manager(Table())
    client_loop = Wrong(loops.config, None, None)
    from verl.agent_loop import SamplerClient

    client_loop.server_manager = SamplerClient(Table(), "a", 0, 0, 8)
    with pytest.raises(RolloutError, match="temperature"):
        asyncio.run(client_loop.run({}))
