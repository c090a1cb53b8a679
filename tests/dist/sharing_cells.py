"""What settings of a forward pass, and of what peers share, change to be seen: off, on, and by arithmetic."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.dist.engine_cells import loss_of, sharded, share, shared_model, whole_gradient
from tests.dist.expert_cells import MIXTURE
from tests.dist.ulysses_cells import Exchanged
from tests.harness.engines import VOCAB, gradients, grouped_batch, ragged_batch, relative_error
from verl.algorithms.losses import PPOPolicyLoss
from verl.config import ActorConfig
from verl.distributed import Ranks
from verl.distributed.experts import ExpertExchange
from verl.engines.rows import AlignedRows
from verl.engines.settings import PassSettings
from verl.engines.sharded_engine import ShardedEngine
from verl.models import compiled
from verl.protocol import DataProto

CHUNK, BUDGET, TILES = 8, 24, 4
HEADS, KV_HEADS, WIDTH, LAYERS = 4, 2, 32, 2
EXPERT_NUMBERS = MIXTURE["num_experts"] * 3 * WIDTH * MIXTURE["moe_intermediate_size"]


def at(module: Callable[[Any], nn.Module], see: Callable[[nn.Module, Any], Any]) -> Callable[..., list[Any]]:
    """Runs an engine over a batch and returns what is seen at each call of one of its modules."""

    def run(engine: ShardedEngine, batch: DataProto, **limits: Any) -> list[Any]:
        seen: list[Any] = []
        own = module(engine.model)
        handle = own.register_forward_hook(lambda m, _, output: seen.append(see(m, output)))
        engine.infer(batch, **limits)
        handle.remove()
        return seen

    return run


tokens_at_map = at(lambda model: model.model.layers[0].mlp.up_proj, lambda _, output: output.shape[:-1].numel())
tokens_at_mlp = at(lambda model: model.model.layers[0].mlp, lambda _, output: output.shape[:2].numel())
numbers_at_head = at(lambda model: model.lm_head, lambda _, output: output.numel())


def expert_bytes(engine: ShardedEngine, batch: DataProto) -> int:
    """Of the first layer's experts while they compute: whatever is gathered then."""
    seen: list[int] = []
    experts = next(m for m in engine.model.modules() if type(m).__name__ == "Qwen3MoeExperts" or _exchanges(m))
    experts.register_forward_hook(lambda m, *_: seen.append(m.gate_up_proj.nbytes + m.down_proj.nbytes))
    engine.infer(batch)
    return seen[0]


def _exchanges(module: nn.Module) -> bool:
    return isinstance(vars(module).get("forward"), ExpertExchange)


class LogSumExps(TorchDispatchMode):
    """Rows of every log-sum-exp over the vocabulary within the block: one per entropy, and none of a log-prob."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket is torch.ops.aten.logsumexp and args[0].shape[-1] == VOCAB:
            self.rows.append(args[0].shape[0])
        return func(*args, **(kwargs or {}))


def entropy_rows(engine: ShardedEngine, batch: DataProto) -> list[int]:
    """Of a training step with an entropy bonus, in one micro-batch."""
    with LogSumExps() as mode:
        engine.train_batch(batch, PPOPolicyLoss(ActorConfig(entropy_coeff=0.01)), micro_batch_size=100)
    return mode.rows


def sent(engine: ShardedEngine, batch: DataProto, ranks: Ranks) -> int:
    """Bytes that go to other ranks by all-to-all in a forward pass, per layer."""
    with Exchanged() as mode:
        engine.infer(batch)
    return mode.numbers * 4 * (ranks.size - 1) // ranks.size // LAYERS


def compiled_layers(ranks: Ranks, folder: Path) -> dict[str, Any]:
    """Graphs that the compiler makes of a layer in a training step, and how far the gradient is from the usual one.

    Attention is not compiled: it ends a graph in its own module and one in the layer, and two begin behind it. The
    compiler's backend runs them as they are, so what is cut and traced shows without a C compiler's minute.
    """
    path, graphs = shared_model(ranks, folder, "qwen2", num_hidden_layers=1), []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    def step(**settings: Any) -> tuple[torch.Tensor, int]:
        graphs.clear()
        torch._dynamo.reset()
        mine = share(ranks, ragged_batch(rows=4))
        return gradients(sharded(path, engine=settings), mine, loss_of("causal_lm"), whole_gradient)[1], len(graphs)

    with mock.patch.object(compiled, "BACKEND", backend):
        (usual, off), (found, on) = step(), step(use_torch_compile=True)
    return {"seen": [off, on], "expected": [0, 4], "error": relative_error(found, usual)}


def sharing(ranks: Ranks, folder: Path) -> dict[str, dict[str, Any]]:
    """Switch -> what is seen with it off and on, and what it has to be. All rows are rank 0's."""
    path, mixture = shared_model(ranks, folder, "qwen2"), shared_model(ranks, folder, "qwen3_moe", **MIXTURE)
    whole, groups = ragged_batch(rows=5), grouped_batch()
    batch, grouped = (b if ranks.is_first else b[[]] for b in (whole, groups))
    rows, alike = AlignedRows.of(whole), AlignedRows.of(groups)
    lengths, predicted = rows.lengths, int(rows.mask.sum())

    def engine(where: Path = path, trains: bool = False, passes: Any = None, **settings: Any) -> ShardedEngine:
        sections = {"model": settings.pop("model", {}), "engine": settings, "passes": passes}
        return sharded(where, trains=trains, **sections)

    def pair(off: Any, on: Any, expected: list[Any]) -> dict[str, Any]:
        return {"seen": [off, on], "expected": expected}

    computed = sum(alike.prompts[g] + sum(max(0, n - alike.prompts[g]) for n in alike.lengths[g::3]) for g in range(3))
    part = -(-sum(lengths) // ranks.size)
    heads = 4 * part * (2 * HEADS + 2 * KV_HEADS) * (WIDTH // HEADS) * (ranks.size - 1) // ranks.size
    sp, ep = ({f"{name}_parallel_size": ranks.size} for name in ("ulysses_sequence", "expert"))
    found = {
        "model.use_remove_padding: tokens at an MLP": pair(
            tokens_at_mlp(engine(passes=PassSettings(packed=False)), batch, micro_batch_size=100)[0],
            tokens_at_mlp(engine(), batch, micro_batch_size=100)[0],
            [len(lengths) * max(lengths), sum(lengths)],
        ),
        "actor.use_prefix_grouper: tokens at an MLP": pair(
            tokens_at_mlp(engine(), grouped, micro_batch_size=100)[0],
            tokens_at_mlp(engine(passes=PassSettings(share_prompts=True)), grouped, micro_batch_size=100)[0],
            [sum(alike.lengths), computed],
        ),
        f"ppo_max_token_len_per_gpu={BUDGET}: micro-batches": pair(
            len(tokens_at_mlp(engine(), batch)),
            len(tokens_at_mlp(engine(), batch, max_tokens=BUDGET)),
            [1, -(-sum(lengths) // BUDGET)],
        ),
        f"pad_to_length, pad_to_length_bucket={BUDGET}: tokens at an MLP": pair(
            tokens_at_mlp(engine(), batch)[0],
            tokens_at_mlp(engine(pad_to_length=True, pad_to_length_bucket=BUDGET), batch)[0],
            [sum(lengths), -(-sum(lengths) // BUDGET) * BUDGET],
        ),
        f"model.tiled_mlp.enabled, num_shards={TILES}: most tokens at a map of an MLP": pair(
            max(tokens_at_map(engine(), batch)),
            max(tokens_at_map(engine(model={"tiled_mlp": {"enabled": True, "num_shards": TILES}}), batch)),
            [sum(lengths), -(-sum(lengths) // TILES)],
        ),
        "model.use_fused_kernels: logits that the head returns": pair(
            numbers_at_head(engine(), batch, micro_batch_size=100)[0],
            numbers_at_head(engine(model={"use_fused_kernels": True}), batch, micro_batch_size=100)[0],
            [predicted * VOCAB, predicted],
        ),
        "ulysses_sequence_parallel_size=2: tokens at an MLP": pair(
            tokens_at_mlp(engine(), batch, micro_batch_size=100)[0],
            tokens_at_mlp(engine(**sp), batch, micro_batch_size=100)[0],
            [sum(lengths), part],
        ),
        "ulysses_sequence_parallel_size=2: bytes sent per layer and forward pass": pair(
            sent(engine(), batch, ranks), sent(engine(**sp), batch, ranks), [0, heads]
        ),
        "expert_parallel_size=2: bytes of a layer's experts while it computes": pair(
            expert_bytes(engine(mixture), batch),
            expert_bytes(engine(mixture, **ep), batch),
            [4 * EXPERT_NUMBERS, 4 * EXPERT_NUMBERS // ranks.size],
        ),
        f"entropy_from_logits_with_chunking, {CHUNK} rows: most rows of an entropy": pair(
            max(entropy_rows(engine(trains=True), batch), default=0),
            max(entropy_rows(engine(trains=True, **_chunked()), batch), default=0),
            [predicted, CHUNK],
        ),
        "entropy_checkpointing: entropies per step": pair(
            len(entropy_rows(engine(trains=True), batch)),
            len(entropy_rows(engine(trains=True, entropy_checkpointing=True), batch)),
            [1, 2],
        ),
    }
    found["use_torch_compile: graphs compiled of a layer"] = compiled_layers(ranks, folder)
    return found


def _chunked() -> dict[str, Any]:
    return {"entropy_from_logits_with_chunking": True, "entropy_from_logits_chunk_size": CHUNK}
