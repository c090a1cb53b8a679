"""Over-sampling that keeps what is not done: the next batch goes on with it, turn by turn, and calls nothing twice."""

from __future__ import annotations

import asyncio
import json

import pytest

from tests.agent_loop.test_manager import prompts, settings
from tests.harness.conversations import Echo, manager, rollout, rows, schema, tool_file
from tests.harness.models import tiny_tokenizer
from tests.harness.samplers import tiny_model
from verl.agent_loop import AgentLoopBase, AgentLoopManager, AgentLoopOutput, register, unfinished
from verl.agent_loop.runner import RowRunner
from verl.agent_loop.unfinished import EARLIER, ENOUGH, LEFT, Members, output_of, plain_output
from verl.metrics import MetricSet
from verl.protocol import DataProto
from verl.rollout.base import Completion
from verl.rollout.hf.sampler import HFSampler

QUESTION = [{"role": "user", "content": "hi"}]


def call(text: str) -> str:
    return f"<tool_call>\n{json.dumps({'name': 'echo', 'arguments': {'text': text}})}\n</tool_call>"


class Tokenwise:
    """Draws the script of a row, one character per token; turn by turn, and only so many tokens before an abort.

    Args:
        scripts: uid -> what each turn says.
        patience: requests by id that are cut short, and after how many new tokens; each once. Meanwhile all others
            wait, so that these are in flight when enough are done.
    """

    def __init__(self, tokenizer, scripts, patience):
        self.tokenizer, self.scripts, self.patience = tokenizer, scripts, dict(patience)
        self.log, self.version, self.waiting, self.stopped = [], 0, [], False

    async def generate(self, request):
        uid, _, turn = request.uid.partition("/")
        self.log.append((request.id, len(request.generated_prefix)))
        ids = [*self.tokenizer.encode(self.scripts[uid][int(turn or 0)]), self.tokenizer.eos_token_id]
        start = len(request.generated_prefix)
        short = self.patience.pop(request.id, None)
        while self.patience and (short is None) and uid == "u0":
            await asyncio.sleep(0.001)
        if short is not None:
            ids = ids[: start + short]
            event = asyncio.Event()
            self.waiting.append(event)
            await event.wait()
        new = tuple(ids[start:])
        reason = "stop" if short is None else "abort"
        return Completion(request.id, new, (-0.5 - self.version,) * len(new), reason, (self.version,) * len(new))

    async def abort(self, request_ids=None):
        for event in self.waiting:
            event.set()
        count, self.waiting = len(self.waiting), []
        return count


def on_disk(batch: DataProto, tmp_path) -> DataProto:
    batch.save_to_disk(str(tmp_path / "batch"))
    return DataProto.load_from_disk(str(tmp_path / "batch"))


def later(asked: DataProto, made: DataProto) -> DataProto:
    """The same rows with their states, as the next batch."""
    columns = {**asked.non_tensor_batch, EARLIER: made.non_tensor_batch[LEFT]}
    return DataProto.from_dict(non_tensors=columns, meta_info=dict(asked.meta_info))


@pytest.fixture
def talk(tmp_path):
    """Two rows with a tool: one of one turn, one of two; and what an undisturbed sampler makes of them."""
    tokenizer = tiny_tokenizer()
    tools = tool_file(tmp_path, (f"{Echo.__name__}", schema("echo", text={"type": "string"}), {"reward": 0.5}))
    config = rollout(multi_turn__enable=True, multi_turn__tool_config_path=tools)
    scripts = {"u0": ["yes"], "u1": [call("a"), call("b"), "done"]}

    def run(sampler, batch, enough=None, loops=None):
        batch.meta_info = {} if enough is None else {ENOUGH: enough}
        return (loops or manager(config, sampler, tokenizer)).generate_sequences(batch)

    def sampler(patience=()):
        return Tokenwise(tokenizer, scripts, patience)

    Echo.log.clear()
    expected = run(sampler(), rows(QUESTION, QUESTION))
    calls = [entry for entry in Echo.log if entry[0] == "execute"]
    assert calls == [("execute", {"text": "a"}), ("execute", {"text": "b"})]
    Echo.log.clear()
    return run, sampler, expected, lambda one: manager(config, one, tokenizer)


@pytest.mark.parametrize("through_a_file", [False, True])
def test_a_conversation_goes_on_with_the_turn_in_flight_and_no_tool_is_called_twice(talk, tmp_path, through_a_file):
    """Row 1 is left in its second turn with three tokens; the next batch has other weights."""
    run, make, expected, loops_of = talk
    sampler = make({"u1-0-1": 3})
    loops = loops_of(sampler)
    asked = rows(QUESTION, QUESTION)
    first = run(sampler, asked, 1, loops)
    states = first.non_tensor_batch[LEFT]
    assert states[0] is None and states[1]["turn"] == 1 and len(states[1]["part"]["token_ids"]) == 3
    assert first.meta_info["metrics"]["rollout/partial/left"].value == 1
    assert [entry[0] for entry in Echo.log] == ["create", "execute"], "the instance stays"
    asked = later(asked, first).select_idxs([1])
    asked = on_disk(asked, tmp_path) if through_a_file else asked
    sampler.version = 1
    second = run(sampler, asked, 1, loops)
    width = expected.tensors["responses"].shape[1]
    assert second.tensors["responses"][0, :width].tolist() == expected.tensors["responses"][1].tolist()
    assert second.tensors["response_mask"][0, :width].tolist() == expected.tensors["response_mask"][1].tolist()
    assert [entry[0] for entry in Echo.log] == ["create", "execute", "execute", "release"]
    assert sampler.log[-3:] == [("u1-0-1", 0), ("u1-0-1", 3), ("u1-0-2", 0)]
    mask = second.tensors["response_mask"][0].bool()
    versions, logs = second.tensors["token_versions"][0][mask], second.tensors["rollout_log_probs"][0][mask]
    old = len(sampler.tokenizer.encode(call("a"))) + 1 + 3
    assert versions.tolist() == [0] * old + [1] * (len(versions) - old)
    assert logs.tolist() == [-0.5 - version for version in versions.tolist()]
    assert second.non_tensor_batch[LEFT][0] is None
    assert list(second.non_tensor_batch["tool_rewards"][0]) == [0.5, 0.5]
    metrics = second.meta_info["metrics"]
    assert metrics["rollout/partial/resumed"].value == 1 and metrics["rollout/partial/versions/max"].value == 2


def test_a_tool_with_memory_of_a_process_that_is_gone_makes_the_conversation_begin_anew(talk, monkeypatch):
    run, make, expected, _ = talk
    sampler = make({"u1-0-1": 3})
    asked = rows(QUESTION, QUESTION)
    first = run(sampler, asked, 1)
    monkeypatch.setattr("verl.agent_loop.tool_agent.PROCESS", "another")
    second = run(sampler, later(asked, first).select_idxs([1]), 1)
    assert [entry[1] for entry in Echo.log if entry[0] == "execute"] == [{"text": "a"}, {"text": "a"}, {"text": "b"}]
    assert second.meta_info["metrics"]["rollout/partial/restarted"].value == 1
    width = expected.tensors["responses"].shape[1]
    assert second.tensors["responses"][0, :width].tolist() == expected.tensors["responses"][1].tolist()


def test_a_sample_that_is_done_waits_for_the_others_of_its_prompt_and_is_not_made_again():
    sampler = HFSampler(tiny_model(vocab=259), max_num_seqs=4, full_determinism=True)
    config = settings(response_length=30, ignore_eos=False)
    loops = AgentLoopManager(config, sampler, tiny_tokenizer())
    uids = [f"u{i // 2}" for i in range(8)]
    asked = prompts([[5 + i // 2, 9] for i in range(8)], uids, sample_index=[0, 1] * 4)
    whole = loops.generate_sequences(prompts([[5 + i // 2, 9] for i in range(8)], uids))
    parts, rounds, left = {}, 0, asked
    while left is not None:
        left.meta_info[ENOUGH] = 1
        made = loops.generate_sequences(left)
        states = list(made.non_tensor_batch[LEFT])
        for row, state in enumerate(states):
            if state is None:
                key = left.non_tensor_batch["uid"][row], int(left.non_tensor_batch["sample_index"][row])
                parts[key] = made.select_idxs([row])
        open_ = [row for row, state in enumerate(states) if state is not None]
        assert len({left.non_tensor_batch["uid"][row] for row in open_}) * 2 == len(open_), "whole prompts"
        left = later(left, made).select_idxs(open_) if open_ else None
        rounds += 1
    assert rounds > 1 and len(parts) == 8
    for row in range(8):
        mine = parts[uids[row], row % 2]
        count = int(whole.tensors["response_mask"][row].sum())
        assert int(mine.tensors["response_mask"][0].sum()) == count
        assert mine.tensors["responses"][0, :count].tolist() == whole.tensors["responses"][row, :count].tolist()


def test_a_trajectory_goes_on_in_the_process_that_has_its_tools():
    """Two runners: the row that the second one left comes first in the next batch, and goes to the second again."""
    tokenizer, seen = tiny_tokenizer(), []
    sampler = Tokenwise(tokenizer, {"u0": ["yes"], "u1": ["no"]}, {"u1-0-0": 1})
    loops = AgentLoopManager(settings(response_length=50), sampler, tokenizer)

    class Runner(RowRunner):
        async def run(self, number, row, *rest):
            seen.append((self.name, row["uid"]))
            return await super().run(number, row, *rest)

    runners = [Runner(loops.config, sampler, tokenizer) for _ in range(2)]
    for name, runner in zip("ab", runners):
        runner.name = name
    loops.run_in(runners)
    asked = prompts([[1], [2]], ["u0", "u1"], sample_index=[0, 0])
    asked.meta_info[ENOUGH] = 1
    made = loops.generate_sequences(asked)
    loops.generate_sequences(later(asked, made).select_idxs([1]))
    assert seen == [("a", "u0"), ("b", "u1"), ("b", "u1")]


@register("cannot_go_on_later")
class Stubborn(AgentLoopBase):
    """A user's loop, with something of its own between two answers."""

    async def run(self, sampling_params, **row):
        prompt, ids = [1], []
        for _ in range(2):
            done = await self.server_manager.generate(row["uid"], prompt_ids=prompt, sampling_params=sampling_params)
            assert done.finish_reason == "stop"
            ids += done.token_ids
        return AgentLoopOutput(prompt, ids, [1] * len(ids), finish_reason="stop")


def test_a_loop_that_cannot_go_on_later_is_waited_for():
    tokenizer = tiny_tokenizer()
    sampler = Tokenwise(tokenizer, {"u0": ["yes"], "u1": ["first", "second"]}, {"u1-0-0": 2})
    batch = rows(QUESTION, QUESTION, agent_name=["single_turn_agent", "cannot_go_on_later"])
    batch.meta_info[ENOUGH] = 1
    made = AgentLoopManager(settings(response_length=50), sampler, tokenizer).generate_sequences(batch)
    assert list(made.non_tensor_batch[LEFT]) == [None, None]
    assert sampler.log[-3:] == [("u1-0-0", 0), ("u1-0-0", 2), ("u1-0-1", 0)]


def test_a_trajectory_survives_as_plain_data():
    measures = MetricSet()
    measures.add("tool_calls/answered", 2.0, "sum")
    measures.add("mean", 0.25, weight=3.0)
    output = AgentLoopOutput([1], [2], [1], [-0.1], token_versions=[4], measures=measures, step_rewards=[(0, 1.0)],
                             extra_fields={"trajectory": [{"role": "x"}]}, failure=ValueError("no"))  # fmt: skip
    back = output_of(plain_output(output))
    assert dict(back.measures.items()) == dict(measures.items()) and str(back.failure) == "no"
    assert (back.response_ids, back.token_versions, back.step_rewards) == ([2], [4], [(0, 1.0)])
    members = Members(["a", "b", "a"])
    assert [members.end(0), members.end(1), members.end(2)] == [[], [1], [0, 2]] and members.num_complete == 2
    assert unfinished.PROCESS
