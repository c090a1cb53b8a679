"""Trained on TP 2 x DP 2 with Megatron-Core, sampled on the same ranks in other layouts."""

from __future__ import annotations

import asyncio

from tests.dist.sampling_cells import BUCKET, STEPS, WANTED, gap, trained_and_sampled
from tests.engines.builders import ragged_batch
from tests.megatron.cells import ROWS, TENSOR, loss_for, megatron, share, shared_model
from tests.rollout.builders import sample
from verl.models import load_causal_lm
from verl.rollout.hf.sampler import HFSampler
from verl.weight_sync import chunk_weights
from verl.weight_sync.resharding import Layout


def sampled_with_four_parts(ranks, folder):
    """TP 4 x DP 1; the two key/value heads are held twice each."""
    path, batch = shared_model(ranks, folder, "qwen2"), ragged_batch(ROWS)
    engine = megatron(path, **{TENSOR: 2})
    return trained_and_sampled(ranks, engine, path, 4, batch, loss_for("causal_lm"), share(batch, ranks))


def sampled_with_four_copies(ranks, folder):
    """TP 1 x DP 4: each rank gathers the half that it lacks."""
    path, batch = shared_model(ranks, folder, "qwen2"), ragged_batch(ROWS)
    engine, sampler = megatron(path, **{TENSOR: 2}), HFSampler(load_causal_lm(str(path)), owns_model=True)
    plan, loss_fn, gaps = engine.plan_for(Layout(data=4)), loss_for("causal_lm"), []
    for step in range(1, STEPS + 1):
        engine.train_batch(batch[share(batch, ranks)], loss_fn)
        if step == 1:
            stale = gap(ranks, engine, WANTED, sample(sampler, WANTED))
        asyncio.run(sampler.update_weights(chunk_weights(engine.shards_for(plan), BUCKET, step), step))
        gaps.append(gap(ranks, engine, WANTED, sample(sampler, WANTED)))
    return {"stale": stale, "gaps": gaps, "planned": True}
