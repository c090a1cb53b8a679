"""Environments of ``verifiers`` itself, unmodified, over the rollout's endpoint."""

from __future__ import annotations

import importlib.util
import json
import signal
import sys
from types import SimpleNamespace

import pytest

from tests.agent_loop.server.scripted import END, TOKENIZER, Scripted, ids, rows, settings
from verl.agent_loop import AgentLoopManager
from verl.errors import ConfigError, RolloutError

HAS_VERIFIERS = importlib.util.find_spec("verifiers") is not None and importlib.util.find_spec("verifiers.legacy")
needs_verifiers = pytest.mark.skipif(not HAS_VERIFIERS, reason="verifiers is not installed: make test-adapters")
ENVIRONMENT = '''
"""Words as one might have them: a sum in two turns, and ways to go wrong."""
import asyncio

import verifiers as vf
from datasets import Dataset


class Twice(vf.MultiTurnEnv):
    def __init__(self, broken="", **kwargs):
        self.broken = broken
        super().__init__(max_turns=2, **kwargs)

    async def env_response(self, messages, state, **kwargs):
        if self.broken == "raise":
            raise ValueError("the board is gone")
        if self.broken == "repeat":
            raise vf.Error(f"ToolCallError: {messages[-1].content}")
        if self.broken == "hang":
            await asyncio.Event().wait()
        return [{"role": "user", "content": "again"}]


def right(completion, answer, info):
    said = [message.content for message in completion if message.role == "assistant"]
    return info["worth"] * sum(text == answer for text in said)


def load_environment(broken=""):
    rows = [{"prompt": [{"role": "user", "content": "hi"}], "answer": "7", "info": {"worth": 0.5}}]

    def raises(completion):
        raise ValueError("no such answer")

    funcs = [raises] if broken == "reward" else [right]
    return Twice(broken, dataset=Dataset.from_list(rows), rubric=vf.Rubric(funcs=funcs))


def double(number: int) -> int:
    """Twice a number."""
    return 2 * number
'''
TOOLS = ENVIRONMENT.replace("return Twice(broken, ", "return vf.ToolEnv(tools=[double], max_turns=3, ")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "words_env.py").write_text(ENVIRONMENT)
    (tmp_path / "tools_env.py").write_text(TOOLS)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in ("words_env", "tools_env"):
        sys.modules.pop(name, None)


def play(folder, *script, environment="words-env", batch=None, ends=True, length=400, **options):
    entry = {"name": "mine", "_target_": "verl.agent_loop.adapters.verifiers_env.VerifiersAgentLoop"}
    (folder / "loops.yaml").write_text(json.dumps([{**entry, "environment": environment, **options}]))
    agent = SimpleNamespace(default_agent_loop="mine", agent_loop_config_path=str(folder / "loops.yaml"))
    config = settings(agent=agent, response_length=length)
    manager = AgentLoopManager(config, Scripted(*script, ends=ends), TOKENIZER)
    return manager.generate_sequences(batch if batch is not None else of_dataset())


def of_dataset(count=1, **more):
    """Rows as ``get_dataset().to_parquet`` has them."""
    return rows(count, example_id=[0] * count, answer=["7"] * count, info=[{"worth": 0.5}] * count, **more)


@needs_verifiers
def test_its_turns_are_one_row_of_sampled_tokens_and_its_rubric_scores(folder):
    made = play(folder, "7", "3")
    again = ids("\n<|im_start|>user\nagain<|im_end|>\n<|im_start|>assistant\n")
    assert made.batch["prompts"][0].tolist() == ids("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    assert made.batch["responses"][0].tolist() == [*ids("7"), END, *again, *ids("3"), END]
    assert made.batch["response_mask"][0].tolist() == [1, 1, *[0] * len(again), 1, 1]
    assert made.batch["rollout_log_probs"][0].tolist() == [-0.25, -0.5, *[0] * len(again), -0.25, -0.5]
    columns = made.non_tensor_batch
    assert columns["reward_score"].tolist() == [0.5] and columns["verifiers/right"].tolist() == [0.5]
    assert columns["verifiers/num_turns"].tolist() == [2] and columns["agent_error"].tolist() == [None]


@needs_verifiers
def test_tools_of_a_tool_environment_are_called(folder):
    call = '<tool_call>\n{"name": "double", "arguments": {"number": 21}}\n</tool_call>'
    made = play(folder, call, "7", environment="tools-env")
    assert "42" in TOKENIZER.decode(made.batch["responses"][0])
    assert made.non_tensor_batch["reward_score"].tolist() == [0.5]
    assert made.non_tensor_batch["verifiers/double_calls"].tolist() == [1]


@needs_verifiers
@pytest.mark.parametrize(
    "broken, reason, timeout",
    [("raise", "the board is gone", 60.0), ("repeat", "ToolCallError: 7", 60.0), ("hang", "longer than 2 s", 2.0)],
)
def test_an_environment_that_fails_is_counted_and_a_time_out_scores_0(folder, broken, reason, timeout):
    batch = of_dataset(2, agent_name=["bad", "mine"])
    entry = {"_target_": "verl.agent_loop.adapters.verifiers_env.VerifiersAgentLoop", "environment": "words-env"}
    bad = {**entry, "name": "bad", "environment_kwargs": {"broken": broken}, "timeout": timeout}
    (folder / "loops.yaml").write_text(json.dumps([bad, {**entry, "name": "mine"}]))
    agent = SimpleNamespace(default_agent_loop="mine", agent_loop_config_path=str(folder / "loops.yaml"))
    manager = AgentLoopManager(settings(agent=agent), Scripted(*["7"] * 4), TOKENIZER)
    made = manager.generate_sequences(batch)
    assert reason in made.non_tensor_batch["agent_error"][0] and made.non_tensor_batch["agent_error"][1] is None
    left_out = "stop" if broken == "hang" else "abort"
    assert made.non_tensor_batch["finish_reason"].tolist() == [left_out, "stop"]
    assert made.non_tensor_batch["reward_score"][0] == 0.0
    assert made.meta_info["metrics"]["rollout/agent/failed"].value == 1


@needs_verifiers
def test_a_reward_function_that_raises_scores_0_and_is_counted(folder):
    columns = play(folder, "7", "7", environment_kwargs={"broken": "reward"}).non_tensor_batch
    assert columns["agent_error"].tolist() == [None] and columns["reward_score"].tolist() == [0.0]
    assert columns["verifiers/reward_errors"].tolist() == [1]
    assert play(folder, "7", "7").non_tensor_batch["verifiers/reward_errors"].tolist() == [0]


@needs_verifiers
def test_an_empty_answer_and_a_full_response_are_scored_and_not_masked(folder):
    made = play(folder, "")
    assert made.non_tensor_batch["agent_error"].tolist() == [None]
    assert made.non_tensor_batch["reward_score"].tolist() == [0.0]
    made = play(folder, "7", length=4)
    assert made.non_tensor_batch["agent_error"].tolist() == [None]
    assert made.non_tensor_batch["reward_score"].tolist() == [0.5]


@needs_verifiers
def test_signals_stay_the_run_s_and_a_foreign_row_says_what_to_write(folder):
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with pytest.raises(RolloutError, match=r"no example_id.*get_dataset\(\)\.to_parquet"):
        play(folder, "7", batch=rows())
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


@pytest.mark.parametrize("options", [{"environment": ""}, {"agent": "agent.py"}])
def test_an_entry_without_an_environment_or_with_an_agent_is_refused(folder, options):
    with pytest.raises((ConfigError, RolloutError), match="needs to know its environment"):
        play(folder, "7", **options)


@pytest.mark.skipif(bool(HAS_VERIFIERS), reason="verifiers is installed")
def test_without_the_package_the_refusal_says_what_to_install(folder):
    with pytest.raises((ConfigError, RolloutError), match=r"verifiers.*\n?.*pip install 'verifiers>=0.3,<0.4'"):
        play(folder, "7")
