"""A sampler that says what a script says, and what tests of agents share."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from tests.harness.models import tiny_tokenizer
from tests.harness.rows import columns
from verl.agent_loop import AgentLoopManager
from verl.protocol import DataProto
from verl.rollout.base import Completion, Request
from verl.rollout.lost import EngineLostError

TOKENIZER = tiny_tokenizer()
END = TOKENIZER.eos_token_id


def ids(text: str) -> list[int]:
    return TOKENIZER(text, add_special_tokens=False)["input_ids"]


class Scripted:
    """Gives the next text of its script, then the end token; log-prob -0.25 times the place of the token, from 1."""

    def __init__(self, *script: str, ends: bool = True, gate: asyncio.Event | None = None, tokenizer: Any = None):
        self.script, self.ends, self.gate = list(script), ends, gate
        self.tokenizer = tokenizer or TOKENIZER
        self.requests: list[Request] = []
        self.cancelled = 0
        self.lost = False

    async def generate(self, request: Request) -> Completion:
        self.requests.append(request)
        try:
            if self.gate is not None:
                await self.gate.wait()
            await asyncio.sleep(0)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if self.lost:
            raise EngineLostError("it is gone")
        text = self.script.pop(0)
        written = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        tokens = [*written, *([self.tokenizer.eos_token_id] if self.ends else [])]
        kept = tokens[: request.sampling.max_tokens]
        stop = next((i for i, token in enumerate(kept) if token in request.sampling.stop_token_ids), None)
        kept = kept if stop is None else kept[: stop + 1]
        reason = "stop" if stop is not None else "length"
        logs = tuple(-0.25 * (i + 1) for i in range(len(kept)))
        return Completion(request.id, tuple(kept), logs, reason, (7,) * len(kept))

    async def abort(self, request_ids: Any = None) -> int:
        return 0


def settings(**changes: Any) -> SimpleNamespace:
    """The part of a rollout section that the manager and the loops read."""
    sampling = {"temperature": 0.7, "top_p": 1.0, "top_k": -1, "do_sample": True}
    base = {
        "seed": 42,
        "response_length": 400,
        "prompt_length": 400,
        "max_model_len": None,
        "ignore_eos": False,
        "over_sample_rate": 0.0,
        "calculate_log_probs": True,
        "val_kwargs": SimpleNamespace(temperature=0.0, top_p=1.0, top_k=-1, do_sample=False),
        "agent": SimpleNamespace(default_agent_loop="single_turn_agent", agent_loop_config_path=None),
        "multi_turn": SimpleNamespace(enable=False, format="hermes"),
    }
    return SimpleNamespace(**{**base, **sampling, **changes})


def rows(count: int = 1, **more: Sequence[Any]) -> DataProto:
    usual: dict[str, Sequence[Any]] = {
        "raw_prompt": [[{"role": "user", "content": "hi"}]] * count,
        "raw_prompt_ids": [ids("hi")] * count,
        "uid": [f"u{i}" for i in range(count)],
    }
    return DataProto.from_dict(non_tensors=columns(**{**usual, **more}))


AGENTS: dict[str, Callable[..., Any]] = {}
"""The agent of the running test, under the name that `current` looks up."""


def current(base_url: str, api_key: str, row: dict[str, Any], model: str) -> Any:
    """What the loop runs: the agent that the test has put there."""
    return AGENTS["now"](base_url=base_url, api_key=api_key, row=row, model=model)


def rollout(
    sampler: Any,
    agent: Callable[..., Any],
    batch: DataProto | None = None,
    rate: float = 0.0,
    context: int | None = None,
    processor: Any = None,
    **options: Any,
) -> DataProto:
    """A batch of rollouts of ``agent`` over ``sampler``; ``options`` as in the YAML entry of the loop.

    Args:
        processor: of a model that sees, whose tokenizer the sampler has.
    """
    AGENTS["now"] = agent
    batch = batch if batch is not None else rows()
    batch.non_tensor_batch["agent_name"] = np.array(["mine"] * len(batch), dtype=object)
    entry = {"name": "mine", "_target_": "verl.agent_loop.server.loop.OpenAIAgentLoop"}
    entry |= {"agent": f"{__name__}:current", "timeout": 60.0, **options}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "loops.yaml")
        file.write_text(json.dumps([entry]))
        section = SimpleNamespace(default_agent_loop="single_turn_agent", agent_loop_config_path=str(file))
        manager = AgentLoopManager(
            settings(agent=section, over_sample_rate=rate, max_model_len=context),
            sampler,
            TOKENIZER if processor is None else sampler.tokenizer,
            processor=processor,
        )
        return manager.generate_sequences(batch)
