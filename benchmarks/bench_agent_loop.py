"""Many conversations at once: how close the wall time is to what their tools' waits and the sampling have to cost.

    PYTHONPATH=. python benchmarks/bench_agent_loop.py [--rows 256] [--turns 4] [--sampler tiny | small | timed]

A small random model samples on the CPU; ``timed`` is a sampler that takes 2 ms per token of an answer and no
CPU, as one on a machine of its own would. Every answer is a call of a tool that waits 50 to 500 ms (drawn once per row
and turn); after ``--turns`` answers a conversation is over. Printed: the wall time of all rows; that of the row
with the longest waits alone; that of all rows with a tool that waits for nothing, which is the cost of sampling
and of everything around it; and the ratio of the first to the sum of the other two.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from tests.harness.models import tiny_model_dir
from verl.agent_loop import AgentLoopManager
from verl.agent_loop.parsers import FunctionCall, Parsed, ToolParser
from verl.config import DataConfig, HFModelConfig, RolloutConfig, replace
from verl.data import hf_tokenizer
from verl.protocol import DataProto
from verl.rollout.base import Completion, Request
from verl.rollout.hf.sampler import HFSampler
from verl.tools import BaseTool, ToolResponse

SHORTEST, LONGEST = 0.05, 0.5
SIZES = {"tiny": {"hidden": 32, "layers": 2}, "small": {"hidden": 128, "layers": 4}}


class EveryAnswer(ToolParser):
    """Every answer is a call; one token in sixteen ends it."""

    @property
    def stop_token_ids(self) -> list[int]:
        return list(range(3, 259, 16))

    def parse_text(self, text: str, tools: Any = None) -> Parsed:
        return Parsed(text, [FunctionCall("{}", "wait")])


class Wait(BaseTool):
    """Waits as long as the row and the turn say."""

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        data = kwargs["agent_data"]
        if self.config["waits"]:
            await asyncio.sleep(waits(data.row["uid"], data.assistant_turns)[-1])
        return ToolResponse(text="ok"), None, {}


def waits(uid: str, turns: int) -> list[float]:
    """The seconds that the tool waits after each of the first turns of a row."""
    rng = random.Random(uid)
    return [rng.uniform(SHORTEST, LONGEST) for _ in range(turns)]


def prompts(uids: list[str]) -> DataProto:
    table = {"uid": uids, "raw_prompt": [[{"role": "user", "content": f"question {uid}"}] for uid in uids]}
    made = {name: np.empty(len(uids), dtype=object) for name in table}
    for name, values in table.items():
        made[name][:] = values
    return DataProto.from_dict(non_tensors=made)


class Timed:
    """Answers of about sixteen tokens, two milliseconds per token."""

    async def generate(self, request: Request) -> Completion:
        rng = random.Random(request.id)
        ids = [*(rng.randrange(3, 259, 4) + 1 for _ in range(rng.randrange(8, 24))), 3]
        await asyncio.sleep(0.002 * len(ids))
        return Completion(request.id, tuple(ids), (-1.0,) * len(ids), "stop", (0,) * len(ids))


def manager(folder: Path, model: Path, turns: int, rows: int, wait: bool, timed: bool = False) -> AgentLoopManager:
    schema = {"type": "function", "function": {"name": "wait", "description": "Waits."}}
    entry = {"class_name": f"{__name__}.Wait", "config": {"waits": wait}, "tool_schema": schema}
    path = folder / f"tools_{wait}.yaml"
    path.write_text(json.dumps({"tools": [entry]}), encoding="utf-8")
    settings = {
        "multi_turn.enable": True,
        "multi_turn.tool_config_path": str(path),
        "multi_turn.max_assistant_turns": turns,
        "multi_turn.format": f"{__name__}.EveryAnswer",
        "response_length": 384,
        "max_num_seqs": rows,
    }
    config = replace(RolloutConfig(), **settings)
    sampler: Any = Timed()
    if not timed:
        sampler = HFSampler.from_config(config, replace(HFModelConfig(), path=str(model)), device="cpu")
    return AgentLoopManager(config, sampler, hf_tokenizer(str(model)), data_config=DataConfig())


def seconds(loops: AgentLoopManager, uids: list[str], turns: int) -> float:
    start = time.perf_counter()
    made = loops.generate_sequences(prompts(uids))
    spent = time.perf_counter() - start
    assert set(made.non_tensor_batch["__num_turns__"]) == {2 * turns}, "every row had all its turns"
    return spent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sampler", choices=[*SIZES, "timed"], default="tiny")
    asked = parser.parse_args()
    uids = [f"row{i}" for i in range(asked.rows)]
    # The last answer is followed by no call that runs: the limit of turns ends the conversation.
    longest = max(uids, key=lambda uid: sum(waits(uid, asked.turns - 1)))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = tiny_model_dir(folder / "model", max_positions=1024, **SIZES.get(asked.sampler, SIZES["tiny"]))
        timed = asked.sampler == "timed"
        waiting = manager(folder, model, asked.turns, asked.rows, wait=True, timed=timed)
        quick = manager(folder, model, asked.turns, asked.rows, wait=False, timed=timed)
        seconds(quick, uids[:8], asked.turns)
        ratios = []
        for _ in range(asked.rounds):
            whole, alone = seconds(waiting, uids, asked.turns), seconds(waiting, [longest], asked.turns)
            sampling = seconds(quick, uids, asked.turns)
            ratios.append(whole / (alone + sampling))
            print(
                f"{asked.rows} rows of {asked.turns} turns: {whole:.2f} s; the longest row alone {alone:.2f} s, "
                f"sampling alone {sampling:.2f} s; ratio {ratios[-1]:.2f}"
            )
        print(f"median ratio {statistics.median(ratios):.2f} (1 would be no overlap of the two, and no overhead)")


if __name__ == "__main__":
    main()
