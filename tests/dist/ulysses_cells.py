"""Peer ranks that share their sequences, beside the plain engine; and what each of them really computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.dist.engine_cells import BUCKETS, TILED, Case, compare, loss_of, sharded, share, shared_model
from tests.engines.hybrids import DELTA
from tests.harness.engines import ragged_batch
from verl.distributed import Ranks
from verl.engines.rows import AlignedRows
from verl.errors import ConfigError
from verl.protocol import SHARED_ROWS

KEY = "ulysses_sequence_parallel_size"


def ulysses(ranks: Ranks, folder: Path) -> dict:
    """All ranks share their rows. There are two KV heads, so that four ranks need each of them twice."""
    limits = {"max_tokens": 16}
    return compare(ranks, folder, Case(config={"tie_word_embeddings": True}, engine={KEY: ranks.size}, limits=limits))


def ulysses_in_pairs(ranks: Ranks, folder: Path) -> dict:
    """Two pairs, of which one has no rows, and in the other one rank alone has them; MLPs are tiled."""
    limits = {"micro_batch_size": 2}
    return compare(ranks, folder, Case("qwen3", engine={KEY: 2}, model=TILED, limits=limits, idle=(1, 2, 3)))


def ulysses_with_windows(ranks: Ranks, folder: Path) -> dict:
    """Sliding windows, soft-capping, checkpointing, padding to buckets, and reductions once per step."""
    engine = {KEY: 2, "use_no_sync_for_gradient_accumulation": True, **BUCKETS}
    model = {"enable_gradient_checkpointing": True}
    case = Case("gemma2", config={"sliding_window": 3}, engine=engine, model=model, limits={"micro_batch_size": 3})
    return compare(ranks, folder, case)


def ulysses_value_model(ranks: Ranks, folder: Path) -> dict:
    return compare(ranks, folder, Case("llama", kind="value", engine={KEY: 2}, limits={"micro_batch_size": 3}))


def ulysses_over_images(ranks: Ranks, folder: Path) -> dict:
    """Pictures of several sizes, through which the cuts between ranks run; some micro-batches are text alone."""
    sizes = (((56, 56),), (), ((84, 56), (28, 112)), (), ((28, 28),), (), ((112, 84),))
    case = Case("qwen2_5_vl", engine={KEY: 2}, limits={"micro_batch_size": 2}, sizes=sizes)
    return compare(ranks, folder, case)


def ulysses_over_inner_features(ranks: Ranks, folder: Path) -> dict:
    """Features of the tower's inner layers are added in decoder layers, too; some micro-batches have no picture."""
    sizes = (((84, 84),), ((28, 56), (56, 28)), (), ())
    model = {"enable_gradient_checkpointing": True}
    case = Case("qwen3_vl", engine={KEY: 2}, model=model, limits={"micro_batch_size": 2}, sizes=sizes)
    return compare(ranks, folder, case)


def ulysses_over_blocks(ranks: Ranks, folder: Path) -> dict:
    """Cuts through tiles whose tokens see each other in both directions, within windows."""
    sizes = (((56, 56),), (), ((84, 28), (28, 112)), (), ((28, 28),))
    model = {"enable_gradient_checkpointing": True}
    case = Case("gemma3", engine={KEY: 2}, model=model, limits={"micro_batch_size": 2}, sizes=sizes)
    return compare(ranks, folder, case)


def ulysses_over_tiles(ranks: Ranks, folder: Path) -> dict:
    sizes = (((56, 56),), (), ((84, 28), (28, 112)), (), ((28, 28),))
    return compare(ranks, folder, Case("internvl", engine={KEY: 2}, limits={"micro_batch_size": 2}, sizes=sizes))


class Exchanged(TorchDispatchMode):
    """Numbers that go through all-to-all within the block."""

    numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d" and "alltoall" in func.overloadpacket.__name__:
            self.numbers += args[1].numel()
        return func(*args, **(kwargs or {}))


def ulysses_shares_tokens(ranks: Ranks, folder: Path) -> dict:
    """Tokens at every MLP, and numbers exchanged, in one pass over all rows."""
    engine = sharded(shared_model(ranks, folder, "qwen2"), engine={KEY: ranks.size})
    batch, seen = ragged_batch(rows=5), []
    layers = engine.model.model.layers
    for layer in layers:
        layer.mlp.register_forward_hook(lambda _, __, out: seen.append(out.shape[:2].numel()))
    with Exchanged() as mode:
        engine.infer(share(ranks, batch))
    config = engine.model.config
    return {
        "seen": seen,
        "tokens": sum(AlignedRows.of(batch).lengths),
        "layers": len(layers),
        "exchanged": mode.numbers,
        "heads": config.num_attention_heads,
        "kv_heads": config.num_key_value_heads,
        "dim": config.head_dim if hasattr(config, "head_dim") else config.hidden_size // config.num_attention_heads,
    }


def ulysses_same_rows(ranks: Ranks, folder: Path) -> dict:
    """Rows of their own, and then the same rows for all, as the dispatch hands them to one data-parallel rank."""
    engine = sharded(shared_model(ranks, folder, "qwen2"), engine={KEY: 2})
    batch, data_rank = ragged_batch(rows=4), engine.data_rank
    own = engine.infer(share(ranks, batch))["log_probs"]
    alike = batch.split(4 // data_rank.size)[data_rank.rank]
    alike.meta_info[SHARED_ROWS] = True
    return {"data_rank": list(data_rank), "own": own.tolist(), "alike": engine.infer(alike)["log_probs"].tolist()}


def ulysses_nan_on_one_rank(ranks: Ranks, folder: Path) -> dict:
    """A skipped step is every rank's, and counts once in the metrics."""
    engine = sharded(shared_model(ranks, folder, "qwen2"), engine={KEY: ranks.size})
    batch = ragged_batch(rows=4)
    batch.batch["advantages"][:1] = torch.nan
    found = engine.train_batch(share(ranks, batch), loss_of("causal_lm")).values()
    return {"skipped": found["skipped_nonfinite_step"]}


def ulysses_refused(ranks: Ranks, folder: Path) -> dict:
    """Heads that do not divide, ranks that do not divide, layers that carry a state, rows that are not packed."""
    hybrid = shared_model(ranks, folder, "qwen3_5_text", **DELTA)
    odd, even = (shared_model(ranks, folder, "qwen2", heads=n, kv_heads=n) for n in (1, 4))
    told = {}
    for name, make in {
        "heads": lambda: sharded(odd, engine={KEY: ranks.size}),
        "ranks": lambda: sharded(even, engine={KEY: 3}),
        "state": lambda: sharded(hybrid, engine={KEY: ranks.size}),
        "padded": lambda: sharded(even, engine={KEY: ranks.size}, model={"use_remove_padding": False}),
    }.items():
        try:
            make()
        except ConfigError as error:
            told[name] = str(error)
    return told
