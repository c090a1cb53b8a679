"""Linear layers sharded over ranks, beside the plain engine; and what each rank really holds and sends."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.distributed.tensor import DTensor

from tests.dist.engine_cells import TILED, Case, compare, local_bytes, loss_of, sharded, share, shared_model
from tests.dist.expert_cells import MIXTURE, resumes
from tests.engines.builders import ragged_batch
from verl.distributed import Ranks
from verl.engines.rows import AlignedRows
from verl.errors import VerlError

KEY = "tensor_parallel_size"


def tensor(ranks: Ranks, folder: Path) -> dict:
    """Pairs of ranks (on four: beside sharding), odd vocabulary, norms per head, tiled MLPs, one pair without rows."""
    idle, limits = (2, 3) if ranks.size == 4 else (), {"micro_batch_size": 2}
    return compare(ranks, folder, Case("qwen3", engine={KEY: 2}, model=TILED, limits=limits, idle=idle))


def tensor_tied(ranks: Ranks, folder: Path) -> dict:
    """Biases, embeddings tied to the head, heads for all ranks, activations computed again."""
    config = {"tie_word_embeddings": True, "heads": 4, "kv_heads": 4}
    model = {"enable_gradient_checkpointing": True}
    return compare(ranks, folder, Case("qwen2", config=config, engine={KEY: ranks.size}, model=model))


def tensor_padded(ranks: Ranks, folder: Path) -> dict:
    """Soft-capped logits, scaled embeddings, rows with padding."""
    model = {"use_remove_padding": False}
    limits = {"micro_batch_size": 3}
    return compare(ranks, folder, Case("gemma2", engine={KEY: 2}, model=model, limits=limits))


def tensor_fused(ranks: Ranks, folder: Path) -> dict:
    """The fused head over each rank's part of the vocabulary."""
    return compare(ranks, folder, Case("gemma2", engine={KEY: 2}, model={"use_fused_kernels": True}))


def tensor_value_model(ranks: Ranks, folder: Path) -> dict:
    return compare(ranks, folder, Case("llama", kind="value", engine={KEY: 2}, limits={"micro_batch_size": 3}))


def tensor_adapter(ranks: Ranks, folder: Path) -> dict:
    both = {"lora_rank": 4, "lora_alpha": 8}
    return compare(ranks, folder, Case("qwen3", both=both, engine={KEY: 2}, limits={"micro_batch_size": 2}))


def tensor_mixture(ranks: Ranks, folder: Path) -> dict:
    """Every rank has its part of each expert."""
    return compare(ranks, folder, Case("qwen3_moe", config=MIXTURE, engine={KEY: 2}, limits={"micro_batch_size": 2}))


def tensor_is_shared(ranks: Ranks, folder: Path) -> dict:
    """Bytes of weights, the width of what passes the head, what is summed over ranks in a pass and in a step."""
    path = shared_model(ranks, folder, "qwen2", vocab=260)
    engine, whole = sharded(path, engine={KEY: ranks.size}), sharded(path)
    batch, widths, sums = ragged_batch(rows=5), [], []
    engine.model.lm_head.register_forward_hook(lambda _, __, logits: widths.append(logits.shape[-1]))
    peers = engine.tensor.peers
    summed, peers.sum = peers.sum, lambda x: (sums.append(x.numel()), summed(x))[1]
    engine.infer(share(ranks, batch))
    forward = list(sums)
    engine.train_batch(share(ranks, batch), loss_of("causal_lm"), micro_batch_size=100)
    del peers.sum
    parts = {name: p.to_local() for name, p in engine.model.named_parameters() if isinstance(p, DTensor)}
    return {
        "bytes": [local_bytes(made.model.parameters()) for made in (engine, whole)],
        "whole": 4 * engine.num_parameters,
        "q_proj": list(parts["model.layers.0.self_attn.q_proj.weight"].shape),
        "o_proj": list(parts["model.layers.0.self_attn.o_proj.weight"].shape),
        "widths": widths,
        "sums": forward,
        "sums_per_step": len(sums) - len(forward),
        "tokens": sum(AlignedRows.of(batch).lengths),
    }


def tensor_resumes(ranks: Ranks, folder: Path) -> dict:
    """A checkpoint of shared maps goes on alike, without sharing, and in the plain engine, with the same next loss."""
    return resumes(ranks, folder, f"tensor-{ranks.size}", KEY)


def tensor_nan_on_one_rank(ranks: Ranks, folder: Path) -> dict:
    engine, batch = sharded(shared_model(ranks, folder, "qwen2"), engine={KEY: 2}), ragged_batch(rows=4)
    batch.batch["advantages"][:1] = torch.nan
    bad = engine.train_batch(share(ranks, batch), loss_of("causal_lm")).values()
    good = engine.train_batch(share(ranks, ragged_batch(rows=4)), loss_of("causal_lm")).values()
    return {"skipped": [bad["skipped_nonfinite_step"], good["skipped_nonfinite_step"]]}


def tensor_refused(ranks: Ranks, folder: Path) -> dict:
    """Sizes that do not divide, what cannot be combined, a family without a plan."""
    path, few = (shared_model(ranks, folder, "qwen2", heads=4, kv_heads=n) for n in (2, 1))
    plans = shared_model(ranks, folder, "opt")
    told = {}
    for name, (model, engine) in {
        "heads": (few, {KEY: 2}),
        "ranks": (path, {KEY: 3}),
        "hybrid": (path, {KEY: 2, "fsdp_size": 1}),
        "sequences": (path, {KEY: 2, "ulysses_sequence_parallel_size": 2}),
        "plan": (plans, {KEY: 2}),
    }.items():
        try:
            sharded(model, engine=engine)
        except VerlError as error:
            told[name] = str(error)
    return told
