"""Estimators and policy losses on one big batch, group estimators beside a loop over rows.

    OMP_NUM_THREADS=1 python benchmarks/bench_algorithms.py [--rows 1024] [--width 1024] [--peer-python PATH]

Group estimators are timed beside the straightforward loop over rows that computes the same numbers, losses with their
backward pass. Everything is the least CPU time of ``--repeat`` runs, which other work on the machine disturbs less than
the clock. ``--peer-python`` is the interpreter of an environment with upstream's package: its functions of the same
names are timed on the same batch.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from verl.algorithms.aggregation import loss_norm
from verl.metrics import reset_notices
from verl.registry import ADVANTAGE_ESTIMATORS, POLICY_LOSSES

GROUP = 8
LOSS_CONFIG = SimpleNamespace(
    clip_ratio=0.2, clip_ratio_low=0.2, clip_ratio_high=0.28, clip_ratio_c=3.0, tau_pos=1.0, tau_neg=1.05,
    policy_loss=SimpleNamespace(
        clip_cov_ratio=2e-4, clip_cov_lb=1.0, clip_cov_ub=5.0, kl_cov_ratio=2e-4, ppo_kl_coef=0.1, dro_beta=0.1
    ),
)  # fmt: skip
PEER = """
import json, sys, time
import numpy as np, torch
from verl.trainer.ppo import core_algos
from verl.workers.config import ActorConfig
from verl.workers.config.actor import PolicyLossConfig

class Settings(dict):  # a stand-in for the configuration: attributes, items and .get
    __getattr__ = dict.get

def settings(values):
    return Settings({k: settings(v) if isinstance(v, dict) else v for k, v in values.items()})

def timed(function):
    seconds = []
    for _ in range(2):
        began = time.process_time()
        function()
        seconds.append(time.process_time() - began)
    return min(seconds)

batch, asked = torch.load(sys.argv[1], weights_only=True), json.loads(sys.argv[2])
uids = np.array([f"u{i}" for i in batch["group"].tolist()], dtype=object)
algorithm, found = settings({"norm_adv_by_std_in_grpo": True}), {}
policy_loss = PolicyLossConfig(**asked["actor"].pop("policy_loss"))
sizes = {"strategy": "fsdp", "rollout_n": 8, "ppo_micro_batch_size_per_gpu": 8}
actor = ActorConfig(policy_loss=policy_loss, **sizes, **asked["actor"])
rewards, mask = batch["rewards"], batch["mask"]

def loss(function):
    new = batch["new"].clone().requires_grad_()
    value, _ = function(batch["old"], new, batch["advantages"], mask, loss_agg_mode="token-mean", config=actor)
    value.backward()

runs = {}
for name in asked["estimators"]:
    function = getattr(core_algos, f"compute_{name}_outcome_advantage")
    more = {"config": algorithm} if name in ("gpg", "grpo_passk", "opo") else {}
    runs[name] = lambda f=function, m=more: f(token_level_rewards=rewards, response_mask=mask, index=uids, **m)
runs["gae"] = lambda: core_algos.compute_gae_advantage_return(rewards, batch["values"], mask, 0.99, 0.95)
for name in asked["losses"]:
    runs[f"loss {name}"] = lambda f=getattr(core_algos, f"compute_policy_loss_{name}"): loss(f)
for name, run in runs.items():
    try:
        found[name] = timed(run)
    except Exception as error:
        print(name, type(error).__name__, error, file=sys.stderr)
print("SECONDS " + json.dumps(found))
"""


def best(function: Callable[[], Any], repeat: int) -> float:
    """The shortest of several runs after one that does not count, in seconds of the CPU."""
    function()
    seconds = []
    for _ in range(repeat):
        began = time.process_time()
        function()
        seconds.append(time.process_time() - began)
    return min(seconds)


def make_batch(rows: int, width: int, seed: int = 0) -> dict[str, Any]:
    """Float32 tensors (rows, width), an int64 mask of a quarter to all of the width, groups of 8 in random order."""
    generator = torch.Generator().manual_seed(seed)

    def normal() -> Tensor:
        return torch.randn(rows, width, generator=generator)

    lengths = torch.randint(width // 4, width + 1, (rows, 1), generator=generator)
    mask = (torch.arange(width)[None] < lengths).long()
    rewards = torch.zeros(rows, width)
    rewards.scatter_(1, lengths - 1, torch.randint(0, 5, (rows, 1), generator=generator) / 4)
    old = -normal().abs_()
    group = (torch.arange(rows) // GROUP)[torch.randperm(rows, generator=generator)]
    return {
        "mask": mask, "rewards": rewards, "values": normal(), "old": old, "new": old + 0.1 * normal(),
        "advantages": normal(), "group": group, "index": [f"u{i}" for i in group.tolist()],
    }  # fmt: skip


def by_row(one: Callable[[Tensor, Tensor, int, Tensor], Tensor]) -> Callable[[dict[str, Any]], Tensor]:
    """The straightforward way: collect each group's rewards in a dictionary, then treat row after row."""

    def loop(batch: dict[str, Any]) -> Tensor:
        scores, mask = batch["rewards"].sum(dim=-1), batch["mask"]
        lengths, members = mask.sum(dim=-1).float(), dict[str, list[int]]()
        for row, uid in enumerate(batch["index"]):
            members.setdefault(uid, []).append(row)
        advantages = torch.zeros(len(scores))
        for row, uid in enumerate(batch["index"]):
            own = members[uid]
            advantages[row] = one(scores[own], lengths[own], own.index(row), scores[row])
        return advantages[:, None] * mask

    return loop


def whitened_loop(one: Callable[..., Tensor]) -> Callable[[dict[str, Any]], Tensor]:
    """The same, and then the whole (rows, width) tensor made mean 0 and variance 1 over its valid tokens."""

    def loop(batch: dict[str, Any]) -> Tensor:
        x, mask = by_row(one)(batch), batch["mask"]
        mean = (x * mask).sum() / mask.sum()
        variance = ((x - mean) ** 2 * mask).sum() / (mask.sum() - 1)
        return (x - mean) * torch.rsqrt(variance + 1e-8) * mask

    return loop


def passk(R: Tensor, n: Tensor, i: int, r: Tensor) -> Tensor:
    top = R.topk(2).values
    return (top[0] - top[1]) / (R.std() + 1e-6) if r == top[0] else torch.zeros(())


LOOPS: dict[str, Callable[[dict[str, Any]], Tensor]] = {
    "grpo": by_row(lambda R, n, i, r: (r - R.mean()) / (R.std() + 1e-6)),
    "rloo": by_row(lambda R, n, i, r: (r * len(R) - R.sum()) / (len(R) - 1)),
    "opo": by_row(lambda R, n, i, r: r - (n * R).sum() / n.sum()),
    "gpg": by_row(lambda R, n, i, r: r - R.mean()),
    "grpo_passk": by_row(passk),
    "reinforce_plus_plus_baseline": whitened_loop(lambda R, n, i, r: r - R.mean()),
}


def bench_groups(batch: dict[str, Any], repeat: int, peer: dict[str, float]) -> list[dict[str, Any]]:
    """Seconds of each group estimator and of its loop."""
    table = []
    for name, loop in LOOPS.items():
        estimator = ADVANTAGE_ESTIMATORS.get(name)
        ours = best(lambda: estimator(batch["rewards"], batch["mask"], batch["index"]), repeat)  # noqa: B023
        began = time.process_time()
        loop(batch)
        slow = time.process_time() - began
        row = {"name": name, "seconds": ours, "loop": slow, "ratio": slow / ours}
        table.append({**row, "upstream": peer.get(name)})
    return table


def built_in_losses() -> list[str]:
    """The names of the losses that have a formula of their own; the bypass mode calls two of them."""
    return [name for name in POLICY_LOSSES.builtin_targets() if name not in ("bypass_mode", "rollout_correction")]


def run_loss(name: str, batch: dict[str, Any]) -> None:
    """Value and gradient of a loss."""
    new, mask = batch["new"].clone().requires_grad_(), batch["mask"]
    loss, _ = POLICY_LOSSES.get(name)(
        batch["old"], new, batch["advantages"], mask, "token-mean", LOSS_CONFIG, norm=loss_norm(mask)
    )
    loss.backward()


def bench_others(batch: dict[str, Any], repeat: int, peer: dict[str, float]) -> list[dict[str, Any]]:
    """Seconds of the estimators that work token by token, and of every loss with its gradient."""
    runs: dict[str, Callable[[], Any]] = {
        name: partial(
            ADVANTAGE_ESTIMATORS.get(name),
            token_level_rewards=batch["rewards"],
            values=batch["values"],
            response_mask=batch["mask"],
            gamma=0.99,
            lam=0.95,
        )
        for name in ("gae", "vapo", "reinforce_plus_plus")
    }
    runs |= {f"loss {name}": partial(run_loss, name, batch) for name in built_in_losses()}
    return [{"name": name, "seconds": best(run, repeat), "upstream": peer.get(name)} for name, run in runs.items()]


def peer_seconds(python: str | None, batch: dict[str, Any]) -> dict[str, float]:
    """Upstream's functions on the same batch, in its own interpreter; empty without one. It says what failed."""
    if python is None:
        return {}
    actor = {**vars(LOSS_CONFIG), "policy_loss": vars(LOSS_CONFIG.policy_loss)}
    asked = {"estimators": list(LOOPS), "losses": built_in_losses(), "actor": actor}
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "batch.pt"
        torch.save({key: value for key, value in batch.items() if isinstance(value, Tensor)}, path)
        command = [python, "-c", PEER, str(path), json.dumps(asked)]
        done = subprocess.run(command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("SECONDS ")]
    return json.loads(lines[-1].removeprefix("SECONDS "))


def beside(row: dict[str, Any]) -> str:
    """Upstream's time, where it was measured."""
    return f"   upstream {1e3 * row['upstream']:.1f} ms" if row["upstream"] else ""


def main() -> int:
    parser = argparse.ArgumentParser(description="Time estimators and losses on one big batch.")
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--peer-python", help="interpreter of an environment with upstream's package")
    parser.add_argument("--json", type=Path, help="write the table there as well")
    arguments = parser.parse_args()
    batch = make_batch(arguments.rows, arguments.width)
    size = f"({arguments.rows}, {arguments.width}) float32, mask int64, {torch.get_num_threads()} thread(s)"
    peer = peer_seconds(arguments.peer_python, batch)
    groups = bench_groups(batch, arguments.repeat, peer)
    print(f"{size}\n{'group estimator':32} {'ms':>9} {'loop ms':>9} {'times':>7}")
    for row in groups:
        numbers = f"{1e3 * row['seconds']:9.1f} {1e3 * row['loop']:9.1f} {row['ratio']:7.1f}"
        print(f"{row['name']:32} {numbers}{beside(row)}")
    print(f"{'others':32} {'ms':>9}")
    others = bench_others(batch, arguments.repeat, peer)
    for row in others:
        print(f"{row['name']:32} {1e3 * row['seconds']:9.1f}{beside(row)}")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"size": size, "groups": groups, "others": others}, indent=1) + "\n")
    reset_notices()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
