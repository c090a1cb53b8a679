"""Families that lay their weights out otherwise than Llama, on Megatron-Core's layers beside the plain engine."""

from __future__ import annotations

from tests.harness.engines import make_engine, ragged_batch
from tests.megatron.cells import (
    OPTIM,
    PIPELINE,
    ROWS,
    TENSOR,
    loss_for,
    megatron,
    saved_in,
    share,
    shared_model,
)
from tests.megatron.families import GLM4
from verl.errors import CheckpointError

CONTEXT = "context_parallel_size"


def the_state_of_halves_goes_elsewhere(ranks, folder):
    """Saved by two tensor-parallel ranks and by two stages: who goes on from it, and with what."""
    path, batch = shared_model(ranks, folder, "glm4", **GLM4), ragged_batch(ROWS)
    mine, loss_fn, found = share(batch, ranks), loss_for("causal_lm"), {}

    def step(engine, rows=mine):
        told = engine.train_batch(batch[rows], loss_fn).values()
        return [told["loss"], told["grad_norm"]]

    for name, sizes in {"cut": {TENSOR: 2}, "stages": {PIPELINE: 2}}.items():
        engine = megatron(path, **sizes)
        step(engine)
        saved = saved_in(engine, folder / f"halves {name}")
        found[name] = step(engine)
        other = megatron(path, **({PIPELINE: 2} if name == "cut" else {TENSOR: 2}))
        other.load_state(saved)
        found[f"{name} elsewhere"] = step(other)
        if ranks.is_first:
            plain = make_engine(path, optim=OPTIM)
            try:
                plain.load_state(saved)
                found[f"{name} plain"] = step(plain, slice(None))
            except CheckpointError as error:
                found[f"{name} refused"] = str(error)
        ranks.barrier()
    return found
