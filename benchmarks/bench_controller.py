"""What a step's batch costs the controller: columns by reference beside columns by value, and tensors that Ray moves.

    OMP_NUM_THREADS=1 python benchmarks/bench_controller.py [--rows 1024] [--prompt 512] [--response 1536] [--steps 3]

Two workers make a sampled batch, compute log-probs of it, and read its mini-batches, as in a step of GRPO; the
controller scores each row by a number, selects mini-batches and computes advantages. ``by reference`` is
``transfer_queue.enable=true``, ``by value`` false; ``a peer`` moves the same batch as a dictionary of tensors by bare
actors, cut by the controller. Bytes are those that go through the controller's process; seconds are its wall clock, in
which workers do nothing but make and look at columns, and its own processor time. Text that a scorer on the controller
reads, 8 bytes per response token, is not in it: here rows are scored while they are sampled.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import ray
import torch

from verl.algorithms.advantages.grpo import grpo
from verl.protocol import DataProto, traffic
from verl.single_controller.base import Dispatch, Worker, register
from verl.single_controller.ray import runtime
from verl.single_controller.ray.base import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup

SAMPLES, MINI_BATCHES = 8, 4


def made(rows: int, prompt: int, response: int) -> dict[str, torch.Tensor]:
    """Columns as a sampler returns them; float32 log-probs, int64 all else, as in a run."""
    generator = torch.Generator().manual_seed(0)
    mask = (torch.arange(response) < torch.randint(1, response + 1, (rows, 1), generator=generator)).long()
    tokens = torch.ones(rows, prompt + response, dtype=torch.long)
    attention = torch.cat([torch.ones(rows, prompt, dtype=torch.long), mask], 1)
    return {
        "prompts": tokens[:, :prompt].clone(),
        "responses": tokens[:, prompt:].clone(),
        "response_mask": mask,
        "input_ids": tokens,
        "attention_mask": attention,
        "position_ids": attention.cumsum(-1) - 1,
        "rollout_log_probs": torch.zeros(rows, response),
    }


def ends(columns: Any) -> float:
    """Reads a little of every column, so that it must have arrived."""
    return sum(float(column[0, 0] + column[-1, -1]) for column in columns)


class Stages(Worker):
    """A worker whose stages cost nothing but their columns."""

    @register(Dispatch.DP_COMPUTE_PROTO)
    def sample(self, prompts: DataProto) -> DataProto:
        return DataProto.from_dict(made(len(prompts), *prompts.meta_info["lengths"]))

    @register(Dispatch.DP_COMPUTE_PROTO)
    def infer(self, data: DataProto) -> DataProto:
        ends(data.batch.values())
        return DataProto.from_dict({"old_log_probs": torch.zeros(data.batch["responses"].shape)})

    @register(Dispatch.DP_COMPUTE_METRIC)
    def train(self, data: DataProto) -> float:
        return ends(data.batch.values())


class Bare:
    """The same as a plain actor."""

    def sample(self, rows: int, prompt: int, response: int) -> dict[str, torch.Tensor]:
        return made(rows, prompt, response)

    def infer(self, columns: dict[str, torch.Tensor]) -> torch.Tensor:
        ends(columns.values())
        return torch.zeros(columns["responses"].shape)

    def train(self, columns: dict[str, torch.Tensor]) -> float:
        return ends(columns.values())


def advantages_of(scores: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    groups = np.repeat(np.arange(len(scores) // SAMPLES), SAMPLES).astype(object)
    rewards = torch.zeros(mask.shape)
    rewards[:, 0] = scores
    return grpo(token_level_rewards=rewards, response_mask=mask, index=groups)[0]


def mini_batches(rows: int) -> list[np.ndarray]:
    return np.array_split(np.random.default_rng(0).permutation(rows), MINI_BATCHES)


def step(group: Any, rows: int, prompt: int, response: int) -> None:
    prompts = DataProto.from_dict({"row": torch.arange(rows)[:, None]}, meta_info={"lengths": (prompt, response)})
    batch = group.sample(prompts)
    batch.batch["advantages"] = advantages_of(torch.randn(rows), batch.batch["response_mask"])
    batch.batch["attention_mask"].sum(-1).tolist()  # lengths, by which ranks are balanced
    batch = batch.union(group.infer(batch.select([name for name in batch.batch.keys() if name != "advantages"])))
    for members in mini_batches(rows):
        group.train(batch.select_idxs(members))


def bare_step(actors: list[Any], rows: int, prompt: int, response: int) -> int:
    """Returns the bytes of tensors that came and went."""
    half, moved = rows // len(actors), 0

    def halves(columns: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
        count = len(columns["responses"]) // len(actors)
        return [{k: v[i * count : (i + 1) * count].clone() for k, v in columns.items()} for i in range(len(actors))]

    def size(columns: dict[str, torch.Tensor]) -> int:
        return sum(column.nbytes for column in columns.values())

    parts = ray.get([actor.sample.remote(half, prompt, response) for actor in actors])
    batch = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    moved += 2 * size(batch)  # came, and goes to be inferred
    log_probs = torch.cat(ray.get([actor.infer.remote(part) for actor, part in zip(actors, halves(batch))]))
    batch |= {"old_log_probs": log_probs, "advantages": advantages_of(torch.randn(rows), batch["response_mask"])}
    moved += log_probs.nbytes
    for members in mini_batches(rows):
        chosen = {name: column[torch.from_numpy(members)] for name, column in batch.items()}
        moved += size(chosen)
        ray.get([actor.train.remote(part) for actor, part in zip(actors, halves(chosen))])
    return moved


def measured(run: Any, steps: int) -> tuple[float, float, int]:
    """Median wall and processor seconds of a step, and the bytes of the last one."""
    walls, cpus, moved = [], [], 0
    for number in range(steps + 1):
        traffic.take()
        wall, cpu = time.perf_counter(), time.process_time()
        moved = run() or traffic.take().get("total", 0)
        if number:  # the first one warms up
            walls.append(time.perf_counter() - wall)
            cpus.append(time.process_time() - cpu)
    return statistics.median(walls), statistics.median(cpus), moved


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in {"rows": 1024, "prompt": 512, "response": 1536, "steps": 3}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    options = parser.parse_args()
    sizes = (options.rows, options.prompt, options.response)
    batch = sum(column.nbytes for column in made(*sizes).values()) + 2 * 4 * options.rows * options.response
    runtime.start_cluster(
        [2], ray_init={"address": "local", "num_cpus": 2, "object_store_memory": 8 * batch + (200 << 20)}
    )
    try:
        pool = RayResourcePool([2])
        lines = {}
        for name, by_reference in (("by reference", True), ("by value", False)):
            group = RayWorkerGroup(pool, RayClassWithInitArgs(Stages), name_prefix=name[3:6], by_reference=by_reference)
            lines[name] = measured(lambda group=group: step(group, *sizes), options.steps)
            group.close()
        actors = [ray.remote(num_cpus=0)(Bare).remote() for _ in range(2)]
        lines["a peer"] = measured(lambda: bare_step(actors, *sizes), options.steps)
    finally:
        runtime.stop_cluster()
    print(
        f"batch of {options.rows} rows x {options.prompt} + {options.response} tokens: {batch / 1e6:.1f} MB of columns"
    )
    print("| | MB through the controller | share of the batch | wall, s | processor, s |")
    print("| --- | --- | --- | --- | --- |")
    for name, (wall, cpu, moved) in lines.items():
        print(f"| {name} | {moved / 1e6:.2f} | {moved / batch:.2%} | {wall:.3f} | {cpu:.3f} |")


if __name__ == "__main__":
    main()
