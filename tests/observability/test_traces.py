"""Marks in user code: what stands in a trace, and what is left out."""

from __future__ import annotations

import asyncio
import sys

import numpy as np
import pytest
import torch

from tests.agent_loop.test_row_traces import Kept, backend  # noqa: F401
from verl.errors import ConfigError, MissingDependencyError
from verl.observability import traces
from verl.observability.traced_call import plain_copy, plain_dict
from verl.tools.runner import in_thread
from verl.utils.rollout_trace import RolloutTraceConfig, rollout_trace_attr, rollout_trace_op


class Tokens:
    """A result with tokens, as a loop's."""

    def __init__(self):
        self.prompt_ids, self.response_ids = [1, 2], [3]


class Agent:
    class tokenizer:
        @staticmethod
        def decode(tokens):
            return "-".join(map(str, tokens))

    @rollout_trace_op
    async def run(self, question, times=2):
        for number in range(times):
            await in_thread(self.look, number)
        return Tokens()

    @rollout_trace_op
    def look(self, number):
        if number == 1:
            raise KeyError("no such page")


def test_marked_methods_are_calls_of_the_trace_that_they_run_in(backend):  # noqa: F811
    RolloutTraceConfig.init("sums", "first", "mlflow", token2text=True)
    with pytest.raises(KeyError), rollout_trace_attr(sample_index=4, step=1, rollout_n=0, name="mine"):
        asyncio.run(Agent().run("why"))
    RolloutTraceConfig.reset()
    (trace,) = backend.kept
    assert trace.name == "mine" and trace.error == "KeyError: 'no such page'"
    assert trace.attributes == {
        "experiment_name": "first", "sample_index": 4, "step": 1, "rollout_n": 0, "validate": False
    }  # fmt: skip
    (run,) = trace.calls
    assert (run.name, run.inputs) == ("Agent.run", {"question": "why", "times": 2})
    assert [(one.name, one.inputs["number"], bool(one.error)) for one in run.calls] == [
        ("Agent.look", 0, False), ("Agent.look", 1, True)
    ]  # fmt: skip


def test_a_marked_call_alone_is_a_trace_and_one_that_is_left_out_is_none(backend):  # noqa: F811
    assert RolloutTraceConfig.get_backend() is None
    asyncio.run(Agent().run("before", times=0))
    RolloutTraceConfig.init("sums", "first", "mlflow", token2text=True)
    with rollout_trace_attr(trace=False):
        asyncio.run(Agent().run("left out", times=0))
    result = asyncio.run(Agent().run("alone", times=0))
    known = RolloutTraceConfig.get_instance()
    assert (known.backend, known.project_name, known.token2text) == ("mlflow", "sums", True)
    RolloutTraceConfig.reset()
    (trace,) = backend.kept
    assert trace.inputs["question"] == "alone" and isinstance(result, Tokens)
    assert trace.outputs == {"prompt_ids": [1, 2], "response_ids": [3], "prompt_text": "1-2", "response_text": "3"}


def test_what_a_call_is_given_becomes_plain_data_without_secrets_whatever_it_is():
    class Odd:
        def __repr__(self):
            raise RuntimeError("no text")

    loop: list = []
    loop.append(loop)
    given = {"array": np.arange(3), "scalar": np.float32(0.5), "tensor": torch.ones(2), "odd": Odd(), 3: (None, {1})}
    shown = plain_copy(given)
    assert shown == {
        "array": [0, 1, 2], "scalar": 0.5, "tensor": [1.0, 1.0], "odd": "<Odd: RuntimeError>", "3": [None, [1]]
    }  # fmt: skip
    call = {"api_key": "abc", "url": "http://me:word@host", "token_ids": [1]}
    assert plain_dict(call) == {"api_key": "<hidden>", "url": "http://<hidden>@host", "token_ids": [1]}
    assert "tensor" in plain_copy(torch.zeros(1000, 1000)) and "..." in str(plain_copy(loop))


def test_an_unknown_backend_is_named_with_the_nearest():
    with pytest.raises(ConfigError, match="weave"):
        traces.start_traces("weve", None, None)


@pytest.mark.parametrize("name", traces.BACKENDS)
def test_without_its_package_a_backend_says_what_to_do(name, monkeypatch):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(
        MissingDependencyError, match=f"the package {name} is not installed.*pip install .*, or leave the setting out"
    ):
        traces.start_traces(name, None, None)


def test_a_later_run_of_the_process_records_again_after_a_tracker_has_failed(backend):  # noqa: F811
    backend.fails = "no server"
    RolloutTraceConfig.init("sums", "first", "mlflow")
    asyncio.run(Agent().run("lost", times=0))
    traces._active.flush()
    assert traces.active() is None
    backend.fails = ""
    traces.start_traces("mlflow", "sums", "first")
    asyncio.run(Agent().run("kept", times=0))
    traces.stop_traces()
    assert [trace.inputs["question"] for trace in backend.kept] == ["kept"]
