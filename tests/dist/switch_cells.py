"""What each setting of the sharded engines changes that can be seen: bytes, calls, tokens, with it off and on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.dist.engine_cells import Collectives, collectives, local_bytes, loss_of, sharded, share, shared_model
from tests.harness.engines import ragged_batch
from verl.distributed import Ranks
from verl.engines.sharded_engine import ShardedEngine
from verl.protocol import DataProto


def train(engine: ShardedEngine, mine: DataProto, **limits: Any) -> Callable[[], Any]:
    return lambda: engine.train_batch(mine, loss_of("causal_lm"), **limits)


def weights(engine: ShardedEngine) -> int:
    return local_bytes(engine.model.parameters())


def gathers_per_pass(engine: ShardedEngine, mine: DataProto) -> int:
    return collectives(lambda: engine.infer(mine)).get("gather", 0)


def gathers_before_the_first_layer(engine: ShardedEngine, mine: DataProto) -> int:
    """Collectives that were issued when the first layer starts to compute, in the second pass (FSDP learns the order
    in the first)."""
    engine.infer(mine)
    found: list[int] = []
    with Collectives() as mode:
        first = engine.model.model.layers[0].self_attn
        handle = first.register_forward_pre_hook(lambda *_: found.append(mode.counts.get("gather", 0)))
        train(engine, mine)()
        handle.remove()
    return found[0]


def layer_passes(engine: ShardedEngine, mine: DataProto) -> int:
    """How often the first layer begins in one training step."""
    calls: list[int] = []
    handle = engine.model.model.layers[0].self_attn.q_proj.register_forward_hook(lambda *_: calls.append(1))
    train(engine, mine)()
    handle.remove()
    return len(calls)


def mlp_dtype(engine: ShardedEngine, mine: DataProto) -> str:
    seen: list[str] = []
    mlp = engine.model.model.layers[0].mlp
    handle = mlp.down_proj.register_forward_hook(lambda _, __, out: seen.append(str(out.dtype)))
    engine.infer(mine)
    handle.remove()
    return seen[0]


def switches(ranks: Ranks, folder: Path) -> dict[str, list[Any]]:
    """Setting -> what is seen with it off and on."""
    path = shared_model(ranks, folder, "qwen2")
    mine = share(ranks, ragged_batch(rows=4))

    def engine(model: dict[str, Any] | None = None, trains: bool = True, **settings: Any) -> ShardedEngine:
        return sharded(path, trains=trains, engine=settings, model=model or {})

    def per_step(settings: dict[str, Any], kind: str, **limits: Any) -> int:
        made = engine(**settings)
        return collectives(train(made, mine, **limits)).get(kind, 0)

    return {
        "reshard_after_forward: gathers per step": [
            per_step({"reshard_after_forward": on}, "gather") for on in (False, True)
        ],
        "use_no_sync_for_gradient_accumulation: reductions per step": [
            per_step({"use_no_sync_for_gradient_accumulation": on}, "reduce_scatter", micro_batch_size=1)
            for on in (False, True)
        ],
        "fsdp_size=1: bytes of weights per rank": [weights(engine(fsdp_size=size)) for size in (-1, 1)],
        "wrap_policy.min_num_params: gathers per forward pass": [
            gathers_per_pass(engine(wrap_policy={"min_num_params": size}), mine) for size in (0, 100_000, 4_000)
        ],
        "forward_prefetch: gathers issued before the first layer": [
            gathers_before_the_first_layer(engine(forward_prefetch=on), mine) for on in (False, True)
        ],
        "model_dtype: bytes of weights per rank": [
            weights(engine(trains=False, model_dtype=dtype)) for dtype in ("fp32", "bf16")
        ],
        "dtype: of what a layer computes": [mlp_dtype(engine(trains=False, dtype=d), mine) for d in ("fp32", "bf16")],
        "enable_gradient_checkpointing: passes of a layer per step": [
            layer_passes(engine(model={"enable_gradient_checkpointing": on}), mine) for on in (False, True)
        ],
    }
