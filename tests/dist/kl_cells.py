"""The exact KL on sharded engines, beside plain ones that take the same steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.dist.engine_cells import ROWS, plain, sharded, share, shared_model
from tests.harness.engines import make_engine, ragged_batch
from verl.algorithms.losses import PPOPolicyLoss
from verl.config import ActorConfig
from verl.distributed import Ranks
from verl.engines.adapters import AdapterBaseEngine

LOSS = {"use_kl_loss": True, "kl_loss_type": "full", "kl_loss_coef": 0.5}
READ = ("loss", "kl_loss", "grad_norm")


def exact_kl_to_the_base(ranks: Ranks, folder: Path) -> dict[str, Any]:
    """The reference is the same module without its adapter; rank 0 has no rows."""
    path, model = shared_model(ranks, folder, "qwen3"), {"lora_rank": 4, "lora_alpha": 8}
    engine, alone = sharded(path, model=model), plain(path, model=model)
    return _steps(ranks, engine, AdapterBaseEngine(engine), alone, AdapterBaseEngine(alone), idle=(0,))


def exact_kl_to_a_model(ranks: Ranks, folder: Path) -> dict[str, Any]:
    """The reference is a sharded model of its own."""
    path = shared_model(ranks, folder, "qwen3")
    references = sharded(path, trains=False), make_engine(path, trains=False)
    return _steps(ranks, sharded(path), references[0], plain(path), references[1])


def _steps(
    ranks: Ranks, engine: Any, reference: Any, alone: Any, its_reference: Any, idle: tuple[int, ...] = ()
) -> dict[str, Any]:
    engine.compare_with(reference)
    alone.compare_with(its_reference)
    loss_fn, found, expected = PPOPolicyLoss(ActorConfig(**LOSS)), [], []
    for seed in range(3):
        batch = ragged_batch(rows=ROWS, seed=seed)
        ours = engine.train_batch(share(ranks, batch, idle), loss_fn, micro_batch_size=2).values()
        theirs = alone.train_batch(batch, loss_fn).values()
        found.append([ours[name] for name in READ])
        expected.append([theirs[name] for name in READ])
    return {"found": found, "expected": expected}
