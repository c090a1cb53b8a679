"""What each rank of a sharded model holds, and what a pass and a step send: FSDP2, sequence parallelism.

    torchrun --standalone --nproc_per_node=2 benchmarks/bench_sharding.py [--layers 24] [--hidden 256]

One line per engine, as rank 0 sees it: bytes of weights at rest, the most that were whole at once (in front of and
behind every layer, forwards and backwards) beside the bound "a share, the root and two layers", collectives of an
inference pass and of an optimizer step, tokens at an MLP, seconds of a step beside the plain engine's.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from figures import Figures, add_json
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from verl import distributed
from verl.algorithms.losses import SFTLoss
from verl.config import FSDPEngineConfig, HFModelConfig, OptimizerConfig
from verl.device import set_threads
from verl.protocol import DataProto
from verl.registry import ENGINES

VOCABULARY, ROWS, LENGTH = 1000, 8, 64


class Counted(TorchDispatchMode):
    """Collectives on weights and gradients by kind, and the bytes that they carry."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        floats = any(t.dtype == torch.float32 for t in torch.utils._pytree.tree_leaves(args) if torch.is_tensor(t))
        if func.namespace == "c10d" and floats:
            name = func.overloadpacket.__name__
            kind = next((k for k in ("gather", "reduce_scatter", "alltoall") if k in name), name)
            self.counts[kind] = self.counts.get(kind, 0) + 1
        return func(*args, **(kwargs or {}))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--hidden", type=int, default=256)
    add_json(parser)
    asked = parser.parse_args()
    figures = Figures()
    set_threads()
    ranks = distributed.join_group(device="cpu")
    folder = Path(ranks.on_first(lambda: _model(asked.layers, asked.hidden)))
    if ranks.is_first:
        print(f"{ranks.size} ranks, {asked.layers} layers of width {asked.hidden}, {ROWS} x {LENGTH} tokens")
    for strategy, settings in (
        ("plain", {}),
        ("fsdp2", {}),
        ("fsdp2", {"reshard_after_forward": False}),
        ("fsdp2", {"ulysses_sequence_parallel_size": ranks.size}),
    ):
        if strategy != "plain" or ranks.is_first:
            told = measure(strategy, settings, folder, ranks, figures)
            if ranks.is_first:
                print(told, flush=True)
        ranks.barrier()
    if ranks.is_first:
        figures.write(asked.json)
    distributed.leave_group()


def measure(strategy: str, settings: dict[str, Any], folder: Path, ranks: distributed.Ranks, figures: Figures) -> str:
    engine = ENGINES.get(strategy)(
        HFModelConfig(path=str(folder)), FSDPEngineConfig(**settings), OptimizerConfig(lr=1e-4), seed=1
    )
    size = 1 if strategy == "plain" else ranks.size
    batch = _batch()[list(range(ranks.rank if size > 1 else 0, ROWS, size))]
    engine.train_batch(batch, SFTLoss())
    seconds = min(_timed(lambda: engine.train_batch(batch, SFTLoss())) for _ in range(3))
    name = f"{strategy} {settings or ''}"
    if strategy == "plain":
        figures.add(name.strip(), {"s per step": seconds})
        return f"{name:<44} {seconds:.3f} s per step"
    layers, whole = engine.model.model.layers, 4 * engine.num_parameters
    rest, peak, tokens = _local(engine.model), [0], [0]

    def look(*_: Any) -> None:
        peak[0] = max(peak[0], rest + _whole(engine))

    def see(_: nn.Module, __: Any, out: torch.Tensor) -> None:
        tokens[0] = out.shape[:-1].numel()

    handles = [h for layer in layers for h in (layer.mlp.register_forward_hook(look),
                                               layer.mlp.register_full_backward_hook(look),
                                               layer.mlp.register_forward_hook(see))]  # fmt: skip
    with Counted() as infer:
        engine.infer(batch)
    with Counted() as train:
        engine.train_batch(batch, SFTLoss())
    for handle in handles:
        handle.remove()
    sizes = sorted(4 * sum(p.numel() for p in layer.parameters()) for layer in engine.blueprint.model.layers)
    bound = 1 / size + (whole - sum(sizes) + sum(sizes[-2:])) / whole
    held = {"weights at rest": rest / whole, "weights at most": peak[0] / whole, "bound": bound}
    figures.add(name.strip(), {"s per step": seconds, **held, "at most / bound": peak[0] / whole / bound})
    return (
        f"{name:<44} {seconds:.3f} s per step; weights: {rest / whole:.3f} of {whole} bytes at rest, at most "
        f"{peak[0] / whole:.3f} (bound {bound:.3f}); infer {infer.counts}; "
        f"step {train.counts}; {tokens[0]} tokens at an MLP"
    )


def _local(model: nn.Module) -> int:
    return sum((p.to_local() if isinstance(p, DTensor) else p).nbytes for p in model.parameters())


def _whole(engine: Any) -> int:
    """Bytes of weights that are gathered right now."""
    return sum(p.nbytes for p in engine.model.parameters() if not isinstance(p, DTensor))


def _timed(work: Any) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _batch() -> DataProto:
    ids = torch.randint(0, VOCABULARY, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))
    ones = torch.ones_like(ids)
    return DataProto.from_dict(
        tensors={
            "input_ids": ids,
            "attention_mask": ones,
            "position_ids": torch.arange(LENGTH).expand(ROWS, LENGTH).clone(),
            "responses": ids[:, 1:],
            "response_mask": ones[:, 1:],
        }
    )


def _model(layers: int, hidden: int) -> str:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    folder = tempfile.mkdtemp()
    config = Qwen2Config(
        vocab_size=VOCABULARY, hidden_size=hidden, intermediate_size=4 * hidden, num_hidden_layers=layers,
        num_attention_heads=8, num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    Qwen2ForCausalLM(config).save_pretrained(folder)
    return folder


if __name__ == "__main__":
    main()
