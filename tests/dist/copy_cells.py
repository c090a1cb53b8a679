"""Copies of weights and optimizer states: equal after training, and named where one bit of one of them is flipped."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from tests.dist.engine_cells import loss_of, sharded, share, shared_model
from tests.harness.engines import ragged_batch
from verl.distributed import Ranks
from verl.errors import EngineError
from verl.workers.part import ModelPart, save_part

NORM = "model.norm.weight"


def flip(tensor: Tensor, bit: int = 3) -> None:
    """One bit of its first element."""
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    local.detach().view(-1).view(torch.int32)[0] ^= 1 << bit


def said_by(call) -> str:
    try:
        return f"nothing: {call()}"
    except EngineError as error:
        return f"{type(error).__name__}: {error}"


def copies_that_differ(ranks: Ranks, folder: Path) -> dict:
    """Every second rank starts a copy of its own: two ranks have one part each, four have two."""
    path = shared_model(ranks, folder, "qwen2")
    engine, none = sharded(path, engine={"fsdp_size": ranks.size // 2}), sharded(path)
    batch = share(ranks, ragged_batch(rows=4))
    for _ in range(2):
        engine.train_batch(batch, loss_of("causal_lm"))
    told = {"clean": engine.compare_copies(), "sharded alone": none.compare_copies()}
    weight = dict(engine.model.named_parameters())[NORM]
    if ranks.rank == ranks.size - 1:
        flip(weight)
    told["weight"] = said_by(engine.compare_copies)
    told["save"] = said_by(lambda: save_part(ModelPart(engine), str(folder / f"damaged{ranks.size}"), ("model",)))
    told["written"] = (folder / f"damaged{ranks.size}").exists()
    if ranks.rank == ranks.size - 1:
        flip(weight)
        flip(engine.optimizer.state[weight]["exp_avg"], bit=0)
    told["moment"] = said_by(engine.compare_copies)
    return told
