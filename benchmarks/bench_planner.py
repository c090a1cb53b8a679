"""Bytes that the planner predicts and bytes that real runs of the engines take, the worst row on top.

    python benchmarks/bench_planner.py [--quick]

Small models on a CPU. A dispatch mode sees every tensor that an operation makes, and adds up the storages that are
alive; the figure is the most of an entire optimizer step, weights and optimizer state included. The first step is not
counted: it makes the optimizer's state. Rows of two processes are those of rank 0.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from figures import Figures, add_json
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from verl import distributed
from verl.algorithms.losses import PPOPolicyLoss
from verl.config import ActorConfig, FSDPEngineConfig, HFModelConfig, OptimizerConfig
from verl.planner.layout import Lengths, Parallel, RolePlan, Workload
from verl.planner.memory import memory_of
from verl.planner.shapes import ModelShape
from verl.protocol import DataProto
from verl.registry import ENGINES

SIZES = {
    "vocab_size": 1024,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
    "max_position_embeddings": 4096,
}
PASSES = 3
"""Micro-batches of a step."""


@dataclass(frozen=True)
class Case:
    """One run.

    Args:
        strategy: the engine.
        length: tokens of a row, three quarters of them a response; a micro-batch is one row.
        ranks: processes.
        model: fields of the model's config.json that differ from `SIZES`.
        bf16: computes in bfloat16.
        entropy: the loss reads the entropy.
    """

    strategy: str = "plain"
    length: int = 256
    ranks: int = 1
    family: str = "qwen2"
    model: tuple[tuple[str, int | bool], ...] = ()
    recompute: bool = False
    lora_rank: int = 0
    bf16: bool = False
    entropy: bool = False
    fused: bool = False

    @property
    def name(self) -> str:
        switches = {"recompute": self.recompute, "bf16": self.bf16, "entropy": self.entropy, "fused head": self.fused}
        words = [self.strategy, self.family, f"{self.length} tokens", *(word for word in switches if switches[word])]
        words += [f"LoRA {self.lora_rank}"] * bool(self.lora_rank) + [f"{self.ranks} ranks"] * (self.ranks > 1)
        return ", ".join(words + [f"{key}={value}" for key, value in self.model])

    @property
    def sizes(self) -> dict[str, int | bool]:
        return {**SIZES, **dict(self.model)}


LARGE_VOCABULARY = (("vocab_size", 8192),)
TIED = (("tie_word_embeddings", True),)
QUICK = [
    Case(length=128),
    Case(length=512, recompute=True),
    Case(length=512, lora_rank=8),
    Case(length=256, bf16=True, entropy=True),
]
CASES = [
    *(Case(length=length, recompute=recompute) for length in (128, 512, 1024) for recompute in (False, True)),
    *(Case(length=length, lora_rank=8) for length in (128, 512, 1024)),
    *(Case(length=length, bf16=True) for length in (128, 512)),
    *(Case("fsdp2", length=length, ranks=2) for length in (128, 512, 1024)),
    Case("fsdp2", length=512, ranks=2, recompute=True),
    Case("fsdp2", length=512, ranks=2, bf16=True),
    Case("fsdp2", length=512, ranks=2, lora_rank=8),
    Case(length=512, lora_rank=8, recompute=True),
    Case(length=512, entropy=True),
    Case(length=512, fused=True),
    Case(length=512, bf16=True, recompute=True),
    Case(length=256, model=LARGE_VOCABULARY),
    Case(length=256, model=LARGE_VOCABULARY, entropy=True, recompute=True),
    Case(length=512, model=TIED),
    Case(length=512, family="qwen3", model=(("head_dim", 32),)),
    Case(length=512, family="llama"),
]


class TensorBytes(TorchDispatchMode):
    """Bytes of all storages that are alive within the block.

    Args:
        existing: tensors that were there before.
    """

    def __init__(self, existing: Iterable[Tensor]) -> None:
        super().__init__()
        self._alive: dict[int, tuple[StorageWeakRef, str]] = {}
        self.peak = 0
        self.at_peak: dict[str, int] = {}
        for tensor in existing:
            self._see(tensor, "existing")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind.__name__ == "DTensor" for kind in types):
            return NotImplemented  # the operations on its shards come here one by one
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, Tensor):
                self._see(tensor, str(func))
        self._count()
        return made

    def _see(self, tensor: Tensor, maker: str) -> None:
        tensor = getattr(tensor, "_local_tensor", tensor)
        if tensor.device.type == "meta" or tensor.layout != torch.strided:
            return
        reference = StorageWeakRef(tensor.untyped_storage())
        if reference.cdata not in self._alive:
            self._alive[reference.cdata] = reference, f"{maker} {tuple(tensor.shape)} {tensor.dtype}"

    def _count(self) -> None:
        sizes, total = {}, 0
        for key, (reference, maker) in list(self._alive.items()):
            storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
            if storage is None:
                del self._alive[key]
                continue
            total += storage.nbytes()
            sizes[maker] = sizes.get(maker, 0) + storage.nbytes()
        if total > self.peak:
            self.peak, self.at_peak = total, sizes


def measure(case: Case, folder: Path) -> TensorBytes:
    """The peak of an optimizer step of this process; collective where the case has several."""
    model = {"path": str(folder), "enable_gradient_checkpointing": case.recompute, "use_fused_kernels": case.fused}
    model |= {"lora_rank": case.lora_rank, "lora_alpha": case.lora_rank} if case.lora_rank else {}
    settings = {"dtype": "bfloat16" if case.bf16 else "float32"}
    engine = ENGINES.get(case.strategy)(
        HFModelConfig(**model), FSDPEngineConfig(**settings), OptimizerConfig(lr=1e-4), seed=1
    )
    loss = PPOPolicyLoss(ActorConfig(entropy_coeff=0.01 if case.entropy else 0.0))
    batch = rows_of(case)
    engine.train_batch(batch, loss, micro_batch_size=1)
    state = [entry for entries in engine.optimizer.state.values() for entry in entries.values()]
    existing = [*engine.model.parameters(), *engine.model.buffers(), *(e for e in state if isinstance(e, Tensor))]
    with TensorBytes(existing) as mode:
        engine.train_batch(batch, loss, micro_batch_size=1)
    return mode


def rows_of(case: Case) -> DataProto:
    """As many rows as a process has passes."""
    generator = torch.Generator().manual_seed(0)
    prompt, response = case.length // 4, case.length - case.length // 4
    ids = torch.randint(3, case.sizes["vocab_size"], (PASSES, case.length), generator=generator)
    drawn = torch.randn(PASSES, response, generator=generator)
    ones = torch.ones_like(ids)
    return DataProto.from_dict(
        tensors={
            "prompts": ids[:, :prompt],
            "responses": ids[:, prompt:],
            "input_ids": ids,
            "attention_mask": ones,
            "position_ids": ones.cumsum(-1) - 1,
            "response_mask": ones[:, prompt:],
            "advantages": drawn,
            "old_log_probs": drawn - 7.0,
        }
    )


def predict(case: Case) -> float:
    """What the planner says of the same run."""
    response = case.length - case.length // 4
    plan = RolePlan(
        role="actor",
        engine=case.strategy,
        devices=case.ranks,
        parallel=Parallel(data=case.ranks),
        trains=True,
        compute_bytes=2 if case.bf16 else 4,
        shards=case.ranks,
        recompute=case.recompute,
        micro_tokens=case.length,
        fused_head="torch" if case.fused else "",
        entropy=case.entropy,
        lora_rank=case.lora_rank,
        on_cpu=True,
    )
    work = Workload(PASSES * case.ranks, 1, Lengths(case.length - response, case.length - response),
                    Lengths(response, response))  # fmt: skip
    shape = ModelShape.from_config({"model_type": case.family, **case.sizes})
    return memory_of(plan, shape, work).phase("update").total


def make_model(case: Case, folder: Path) -> Path:
    """A folder with random weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    target = folder / case.name.replace("/", "_")
    if not target.exists():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(AutoConfig.for_model(case.family, **case.sizes)).save_pretrained(target)
    return target


def measured(case: Case, folder: Path) -> int:
    """Bytes; a case of several ranks starts processes for them."""
    model = make_model(case, folder)
    if case.ranks == 1:
        with_group = case.strategy != "plain"
        if with_group:
            distributed.join_group(device="cpu")
        peak = measure(case, model).peak
        if with_group:
            distributed.leave_group()
        return peak
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={case.ranks}"]
    command += [__file__, "--rank-of", json.dumps(asdict(case)), "--model", str(model)]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])


def rank_of(case: Case, model: Path) -> None:
    """One process of a case of several; rank 0 prints its peak."""
    ranks = distributed.join_group(device="cpu")
    peak = measure(case, model).peak
    if ranks.is_first:
        print(peak)
    distributed.leave_group()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="a few rows")
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    add_json(parser)
    options = parser.parse_args()
    if options.rank_of:
        case = Case(**json.loads(options.rank_of))
        rank_of(replace(case, model=tuple((key, value) for key, value in case.model)), Path(options.model))
        return
    figures, rows = Figures(), []
    with tempfile.TemporaryDirectory() as temporary:
        for case in QUICK if options.quick else CASES:
            real, predicted = measured(case, Path(temporary)), predict(case)
            rows.append((predicted / real - 1, real, predicted, case.name))
            figures.add(case.name, {"measured MB": real / 1e6, "predicted MB": predicted / 1e6,
                                    "error %": 100 * rows[-1][0]})  # fmt: skip
    print(f"{'error':>7} {'measured':>11} {'predicted':>11}")
    for error, real, predicted, name in sorted(rows, key=lambda row: -abs(row[0])):
        print(f"{error:>+7.1%} {real / 1e6:>8.2f} MB {predicted / 1e6:>8.2f} MB  {name}")
    figures.write(options.json)


if __name__ == "__main__":
    main()
