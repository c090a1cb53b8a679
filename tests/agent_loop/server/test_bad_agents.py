"""Agents that raise, hang or return nonsense cost their own row, and one dead sampler ends the batch."""

from __future__ import annotations

import asyncio
import sys
import threading
import time

import openai
import pytest

from tests.agent_loop.server.scripted import TOKENIZER, Scripted, rollout, rows, settings
from verl.agent_loop import SamplerClient
from verl.agent_loop.server import loop
from verl.agent_loop.server.agent import AgentFailure, load_agent, read_outcome
from verl.agent_loop.server.loop import OpenAIAgentLoop
from verl.errors import ConfigError, RolloutError
from verl.metrics import notices, reset_notices

USER = {"role": "user", "content": "hi"}


CLIENT = openai.OpenAI(base_url="http://127.0.0.1:9", api_key="none", max_retries=0)
"""Making a client takes long, compared to the time limits here."""
WAIT = 45.0
"""Seconds for what happens at once unless something is broken; less than the minute that an agent has."""


def one_call(base_url, api_key, model="policy"):
    found = CLIENT.with_options(base_url=base_url, api_key=api_key)
    return found.chat.completions.create(model=model, messages=[USER]).choices[0].message.content


def raises(**kwargs):
    raise ValueError("the tool is broken")


def hangs(**kwargs):
    while True:
        time.sleep(0.01)


async def hangs_async(**kwargs):
    await asyncio.sleep(1000)


async def blocks_its_loop(**kwargs):
    while True:
        time.sleep(0.01)


def exits(**kwargs):
    sys.exit(3)


def returns_text(**kwargs):
    return "great"


def returns_nan(**kwargs):
    return float("nan")


def calls_nothing(**kwargs):
    return 1.0


BAD = {
    raises: "ValueError: the tool is broken",
    hangs: "took longer than 1 s",
    hangs_async: "took longer than 1 s",
    blocks_its_loop: "took longer than 1 s",
    exits: "SystemExit: 3",
    returns_text: "returned 'great', which is no reward",
    returns_nan: "returned nan, which is no reward",
}
STUCK = [hangs, hangs_async, blocks_its_loop]


@pytest.mark.parametrize("bad", BAD, ids=lambda f: f.__name__)
def test_a_bad_agent_costs_its_own_row_and_a_time_out_does_not_pay(bad, monkeypatch):
    reset_notices()
    as_it_is = loop.run_agent

    async def run_agent(function, given, timeout):  # a good one keeps the limit that is set
        return await as_it_is(function, given, 1.0 if given["row"]["uid"] == "u0" and bad in STUCK else timeout)

    monkeypatch.setattr(loop, "run_agent", run_agent)

    def agent(base_url, api_key, row, model):
        one_call(base_url, api_key)
        return bad() if row["uid"] == "u0" else 1.0

    if asyncio.iscoroutinefunction(bad):

        async def agent(base_url, api_key, row, model):
            await asyncio.to_thread(one_call, base_url, api_key)
            return await bad() if row["uid"] == "u0" else 1.0

    made = rollout(Scripted("a", "b"), agent, rows(2))
    columns = made.non_tensor_batch
    left_out = "stop" if bad in STUCK else "abort"  # a policy that dawdles would escape a low score by a mask
    assert columns["finish_reason"].tolist() == [left_out, "stop"], "abort leaves the row out of loss and baselines"
    assert BAD[bad] in columns["agent_error"][0] and columns["agent_error"][1] is None
    assert made.meta_info["metrics"]["rollout/agent/failed"].value == 1.0
    assert made.batch["rm_scores"].sum(-1).tolist() == [0.0, 1.0]
    assert any(BAD[bad] in text for text in notices().values())


@pytest.mark.parametrize("stuck", STUCK, ids=lambda f: f.__name__)
def test_an_agent_that_was_given_up_leaves_no_thread_behind(stuck):
    before = set(threading.enumerate())

    def worker():
        return [t for t in set(threading.enumerate()) - before if t.name == "verl-agent"]

    with pytest.raises(RolloutError, match=r"took longer than 0\.3 s"):
        rollout(Scripted("a"), stuck, timeout=0.3, on_error="raise")
    for thread in worker():
        thread.join(WAIT)
    assert not worker()


def test_an_agent_without_a_call_has_nothing_to_train_on():
    with pytest.raises(RolloutError, match=r"all 1 rollouts of a batch failed.*called no model"):
        rollout(Scripted(), calls_nothing)


def test_a_key_is_worth_nothing_once_its_rollout_is_over():
    kept = {}

    def agent(base_url, api_key, row, model):
        if row["uid"] == "u0":
            one_call(base_url, api_key)
            kept.update(key=api_key)
            return 0.0
        while "key" not in kept:
            time.sleep(0.01)
        one_call(base_url, api_key)
        until = time.monotonic() + WAIT
        while time.monotonic() < until:
            try:
                one_call(base_url, kept["key"])
            except openai.AuthenticationError:
                return 1.0
            except openai.APIStatusError:
                time.sleep(0.01)
        raise AssertionError("the key still works")

    assert rollout(Scripted("a", "b"), agent, rows(2)).batch["rm_scores"].sum() == 1.0


def test_agents_that_the_batch_does_not_wait_for_are_ended_and_their_rows_are_masked():
    told, over = [], threading.Event()

    def agent(base_url, api_key, row, model):
        one_call(base_url, api_key)
        if row["uid"] == "u0":
            return 1.0
        until = time.monotonic() + WAIT
        while time.monotonic() < until:
            try:
                one_call(base_url, api_key)
            except openai.APIStatusError as error:
                told.append(error.status_code)
                break
        over.wait(100)  # it goes on with something else, whatever it was told

    made = rollout(Scripted(*"ab" * 5000), agent, rows(2), rate=0.5, branches="last")
    over.set()
    assert made.non_tensor_batch["finish_reason"].tolist() == ["stop", "abort"]
    assert made.meta_info["metrics"]["rollout/agent/failed"].value == 0, "it was not its fault"
    assert told in ([410], [401], []), "rollout over"


def test_a_sampler_that_is_lost_ends_the_batch_and_is_not_blamed_on_the_agent():
    sampler = Scripted("a")
    sampler.lost = True

    def agent(base_url, api_key, row, model):
        with pytest.raises(openai.APIStatusError):
            one_call(base_url, api_key)

    with pytest.raises(RolloutError, match="it is gone"):
        rollout(sampler, agent)


def make(**options):
    client = SamplerClient(Scripted(), "u", 0, 1, 8)
    return OpenAIAgentLoop(settings(), client, TOKENIZER, **options)


@pytest.mark.parametrize(
    "options, said",
    [
        ({}, "which function to run"),
        ({"agent": "no_such_file.py"}, "no such Python file"),
        ({"agent": "json:dumps"}, "is not an agent"),
        ({"agent": f"{__name__}:raises", "branches": "lost"}, "branches"),
        ({"agent": f"{__name__}:raises", "sampling": "mine"}, "sampling"),
        ({"agent": f"{__name__}:raises", "on_error": "ignore"}, "on_error"),
        ({"agent": f"{__name__}:raises", "timeout": 0}, "timeout"),
    ],
)
def test_a_setting_that_cannot_work_is_refused_by_name(options, said):
    with pytest.raises(ConfigError, match=said):
        make(**options)


def test_an_agent_is_found_in_a_file_by_its_usual_name_or_by_its_own(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "def agent(base_url, api_key):\n    return 1\n\n\ndef other(base_url, api_key, row):\n    return 2\n"
    )
    assert load_agent(str(file))("", "") == 1
    assert load_agent(f"{file}:other")("", "", {}) == 2
    with pytest.raises(ConfigError, match="Did you mean 'other'"):
        load_agent(f"{file}:othr")


def test_a_reward_is_a_number_none_or_a_dict_with_a_score():
    assert read_outcome(True).reward == 1.0
    assert read_outcome(None).reward is None
    found = read_outcome({"score": 0.5, "steps": 3})
    assert (found.reward, found.extra) == (0.5, {"steps": 3})
    with pytest.raises(AgentFailure):
        read_outcome([1.0])
