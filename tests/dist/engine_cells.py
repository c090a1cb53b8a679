"""What every rank of a group does with a sharded engine, beside the plain engine on rank 0 that it is compared with."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.engines.hybrids import DELTA
from tests.harness.engines import gradients, make_engine, model_dir, on_policy_batch, ragged_batch, relative_error
from tests.harness.several_tokens import distilled
from tests.harness.vision import seen_batch, vision_dir
from verl.algorithms.losses import PPOPolicyLoss, PPOValueLoss
from verl.config import ActorConfig, CriticConfig, FSDPEngineConfig, HFModelConfig, OptimizerConfig
from verl.config.schema.node import from_mapping
from verl.distributed import Ranks
from verl.engines.plain import PlainEngine
from verl.engines.settings import PassSettings
from verl.engines.sharded_engine import ShardedEngine
from verl.errors import ModelError, VerlError, WorkerError
from verl.models import load_model_config
from verl.models.fused_head import listed
from verl.models.hf_folder import read_weights
from verl.protocol import DataProto
from verl.registry import ENGINES
from verl.trainer.ppo.sample_rows import as_sequences, mask_repeated

# Adam divides by the gradient's own size, which makes noise of gradients that are zero by symmetry: eps keeps it small.
OPTIM = {"lr": 1e-2, "lr_scheduler_type": "cosine", "override_optimizer_config": {"eps": 1e-4}}
ROWS = 7
TILED = {"tiled_mlp": {"enabled": True, "num_shards": 3}}
BUCKETS = {"pad_to_length": True, "pad_to_length_bucket": 5}
PADDED = {"use_remove_padding": False}


@dataclass(frozen=True)
class Case:
    """One comparison with the plain engine.

    Args:
        config: fields of the model's configuration.
        engine, model: settings of the two sections for the sharded engine.
        both: settings of the model section for either engine.
        limits: of its micro-batches; the plain engine takes the whole batch at once.
        idle: ranks without rows.
        correction: of the sampler, inside the policy's loss.
        sizes: of the images of each row, of a model that sees.
        samples: the sample of each row, of a loss over samples; the first row is there once more, as if it filled up.
        constant: rows of advantage 0 in a batch that is on policy; the plain engine computes them.
    """

    family: str = "qwen2"
    kind: str = "causal_lm"
    config: dict[str, Any] = field(default_factory=dict)
    engine: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    both: dict[str, Any] = field(default_factory=dict)
    limits: dict[str, Any] = field(default_factory=dict)
    idle: tuple[int, ...] = ()
    correction: dict[str, Any] = field(default_factory=dict)
    sizes: tuple[tuple[tuple[int, int], ...], ...] = ()
    samples: tuple[int, ...] = ()
    constant: tuple[int, ...] = ()

    def batch(self, path: Path) -> DataProto:
        if self.samples:
            rows = [*range(ROWS), 0]
            batch = ragged_batch(rows=ROWS, seed=1).select_idxs(rows)
            mask_repeated(batch, rows)
            as_sequences(batch, rows, np.array(self.samples))
            return batch
        if self.constant:
            return on_policy_batch(ROWS, self.constant, seed=1)
        if not self.sizes:
            return ragged_batch(rows=ROWS, seed=1)
        return seen_batch(load_model_config(str(path)), path, self.sizes, samples=1, seed=1)


def sharded(path: Path, kind: str = "causal_lm", trains: bool = True, **sections: Any) -> ShardedEngine:
    return ENGINES.get("fsdp2")(
        HFModelConfig(path=str(path), **sections.get("model", {})),
        FSDPEngineConfig(**sections.get("engine", {})),
        OptimizerConfig(**{**OPTIM, **sections.get("optim", {})}) if trains else None,
        kind=kind,
        total_training_steps=10,
        seed=5,
        passes=sections.get("passes"),
    )


def plain(path: Path, kind: str = "causal_lm", optim: dict[str, Any] | None = None, **sections: Any) -> PlainEngine:
    return make_engine(path, kind, optim={**OPTIM, **(optim or {})}, seed=5, **sections)


def shared_model(ranks: Ranks, folder: Path, family: str, **config: Any) -> Path:
    """A model folder that rank 0 writes."""
    name = "-".join([family, *map(str, config.values())])
    sees = "_vl" in family or family in ("gemma3", "internvl")
    make = model_dir if not sees else lambda at, kind: vision_dir(at / kind, kind)
    ranks.on_first(lambda: str(make(folder / name, family, **config)))
    return folder / name / family


def share(ranks: Ranks, batch: DataProto, idle: tuple[int, ...] = ()) -> DataProto:
    """This rank's rows: split in turn over the ranks that are not idle."""
    busy = [rank for rank in range(ranks.size) if rank not in idle]
    if ranks.rank in idle:
        return batch[[]]
    return batch[list(range(busy.index(ranks.rank), len(batch), len(busy)))]


def order_of(ranks: Ranks, batch: DataProto, idle: tuple[int, ...] = ()) -> list[int]:
    """The rows in the order in which the ranks hold them."""
    busy = ranks.size - len(idle)
    return [row for first in range(busy) for row in range(first, len(batch), busy)]


def loss_of(kind: str, correction: dict[str, Any] | None = None, mode: str = "token-mean") -> Any:
    if kind == "value":
        return PPOValueLoss(CriticConfig())
    return PPOPolicyLoss(
        from_mapping(ActorConfig, {"loss_agg_mode": mode, "policy_loss": {"rollout_correction": correction or {}}})
    )


def flat(weights: Any) -> Tensor:
    return torch.cat([tensor.detach().flatten().float() for _, tensor in sorted(dict(weights).items())])


@torch.no_grad()
def whole_gradient(engine: ShardedEngine) -> Tensor:
    """Flat, in the order of the model's parameters, on every rank."""
    names = engine._parameter_names()
    with_grad = [p for p in engine.model.parameters() if p.grad is not None]
    return torch.cat([engine._gathered(p.grad, names[p]).flatten() for p in with_grad])


def compare(ranks: Ranks, folder: Path, case: Case) -> dict[str, Any]:
    """Relative errors of outputs, loss, gradient and of the weights after two steps; metrics as each rank has them."""
    path = shared_model(ranks, folder, case.family, **case.config)
    outputs = ("values",) if case.kind == "value" else ("log_probs", "entropy")
    engine = sharded(path, case.kind, engine=case.engine, model={**case.both, **case.model})
    batch = case.batch(path)
    mode = "seq-mean-token-mean" if case.samples else "token-mean"
    mine, loss_fn = share(ranks, batch, case.idle), loss_of(case.kind, case.correction, mode)
    found = engine.infer(mine, outputs, temperature=0.9, **case.limits)
    answers = ranks.exchange({name: values.tolist() for name, values in found.items()})
    loss, gradient = gradients(engine, mine, loss_fn, whole_gradient, **case.limits)
    metrics = [engine.train_batch(mine, loss_fn, **case.limits).values() for _ in range(2)]
    engine.compare_copies()  # of what several ranks hold, all have the same bits
    weights = flat(engine.export_weights())
    factors = flat(engine.export_adapter()) if case.both.get("lora_rank") else None
    result = {"metrics": metrics, "rows": len(mine)}
    if not ranks.is_first:
        return result
    reference = plain(path, case.kind, model=case.both)
    reference.skips_constant_rows = False
    expected = reference.infer(batch, outputs, temperature=0.9)
    whole = {name: torch.tensor([row for answer in answers for row in answer[name]]) for name in outputs}
    order = order_of(ranks, batch, case.idle)
    errors = {name: relative_error(whole[name], expected[name][order]) for name in outputs}
    expected_loss, expected_gradient = gradients(reference, batch, loss_fn)
    errors["loss"] = abs(loss - expected_loss) / abs(expected_loss)
    errors["gradient"] = relative_error(gradient, expected_gradient)
    expected_metrics = [reference.train_batch(batch, loss_fn).values() for _ in range(2)]
    errors["weights"] = relative_error(weights, flat(reference.export_weights()))
    if factors is not None:
        errors["adapter"] = relative_error(factors, flat(reference.export_adapter()))
    return {**result, "errors": errors, "expected_metrics": expected_metrics}


# ---- comparisons with the plain engine ---------------------------------------------------------------------------


def tied_and_uneven(ranks: Ranks, folder: Path) -> dict:
    return compare(ranks, folder, Case(config={"tie_word_embeddings": True}, limits={"micro_batch_size": 2}))


def a_rank_without_rows(ranks: Ranks, folder: Path) -> dict:
    """MLPs are tiled, and units lie inside of them: every rank gathers them for each tile, with and without rows."""
    engine = {"wrap_policy": {"min_num_params": 1_500}}
    idle = (ranks.size - 1,)
    return compare(ranks, folder, Case("qwen3", engine=engine, model=TILED, limits={"max_tokens": 24}, idle=idle))


def rows_without_a_gradient(ranks: Ranks, folder: Path) -> dict:
    """All rows of rank 0, and one of another's."""
    constant = tuple({*range(0, ROWS, ranks.size), 1})
    return compare(ranks, folder, Case(limits={"micro_batch_size": 2}, constant=constant))


def several_tokens(ranks: Ranks, folder: Path) -> list[dict[str, float]]:
    """Distillation with rows on each rank and with shared sequences, with plain and with fused heads."""
    path = shared_model(ranks, folder, "llama")
    rows = list(range(ranks.rank, ROWS, ranks.size))
    findings = []
    for backend in (None, "torch"):
        for sequences in (1, ranks.size):
            sections = {
                "model": {"use_fused_kernels": backend is not None},
                "engine": {"ulysses_sequence_parallel_size": sequences},
            }

            def make(trains: bool, passes: PassSettings | None, backend=backend, sections=sections) -> ShardedEngine:
                passes = passes and replace(passes, packed=True, fused_head=backend)
                return sharded(path, trains=trains, passes=passes, **sections)

            with patch.object(listed, "NUMBERS", 600):  # logits of two tokens at a time
                findings.append(distilled(make, partial(plain, path), ragged_batch(rows=ROWS, seed=1), rows))
    return findings


def value_model(ranks: Ranks, folder: Path) -> dict:
    return compare(ranks, folder, Case("llama", kind="value", limits={"micro_batch_size": 3}))


def mixture(ranks: Ranks, folder: Path) -> dict:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    return compare(ranks, folder, Case("qwen3_moe", config=experts, limits={"micro_batch_size": 2}))


def layers_with_a_state(ranks: Ranks, folder: Path) -> dict:
    model = {"enable_gradient_checkpointing": True}
    return compare(ranks, folder, Case("qwen3_5_text", config=DELTA, model=model, limits={"micro_batch_size": 2}))


def kept_gathered_and_reduced_once(ranks: Ranks, folder: Path) -> dict:
    engine = {"reshard_after_forward": False, "use_no_sync_for_gradient_accumulation": True, **BUCKETS}
    model = {"enable_gradient_checkpointing": True}
    return compare(ranks, folder, Case("gemma2", engine=engine, model=model, limits={"micro_batch_size": 1}))


def a_rank_without_images(ranks: Ranks, folder: Path) -> dict:
    """Every second row shows something, so the second rank has text alone, and the tower is gathered all the same."""
    sizes = (((56, 56),), (), ((84, 56), (28, 112)), (), ((28, 28),))
    model = {"enable_gradient_checkpointing": True}
    return compare(ranks, folder, Case("qwen2_5_vl", model=model, limits={"micro_batch_size": 1}, sizes=sizes))


def a_rank_without_tiles(ranks: Ranks, folder: Path) -> dict:
    """As `a_rank_without_images`, of a family whose images see ahead in their blocks: the blank one is a tile."""
    sizes = (((56, 56),), (), ((84, 56), (28, 112)), (), ((28, 28),))
    return compare(ranks, folder, Case("gemma3", limits={"micro_batch_size": 1}, sizes=sizes))


def tiles_in_padded_rows(ranks: Ranks, folder: Path) -> dict:
    sizes = ((), (), ((56, 56),), (), (), ((28, 56),))
    return compare(ranks, folder, Case("internvl", model=PADDED, limits={"micro_batch_size": 2}, sizes=sizes))


def images_in_padded_rows(ranks: Ranks, folder: Path) -> dict:
    sizes = ((), (), ((56, 56),), (), (), ((28, 56),))
    return compare(ranks, folder, Case("qwen3_vl", model=PADDED, limits={"micro_batch_size": 2}, sizes=sizes))


def offloaded(ranks: Ranks, folder: Path) -> dict:
    return compare(ranks, folder, Case(engine={"offload_policy": True}, limits={"micro_batch_size": 2}))


def hybrid(ranks: Ranks, folder: Path) -> dict:
    return compare(ranks, folder, Case("llama", engine={"fsdp_size": 2}, model=PADDED, limits={"micro_batch_size": 2}))


def replicated(ranks: Ranks, folder: Path) -> dict:
    """Shard groups of one rank: every rank has all weights and only gradients travel."""
    return compare(ranks, folder, Case("qwen2", engine={"fsdp_size": 1}, model=PADDED, limits={"micro_batch_size": 2}))


def adapter(ranks: Ranks, folder: Path) -> dict:
    """LoRA: most weights are frozen."""
    both = {"lora_rank": 4, "lora_alpha": 8}
    return compare(ranks, folder, Case("qwen3", both=both, limits={"micro_batch_size": 2}, idle=(0,)))


def weights_normalised_in_the_loss(ranks: Ranks, folder: Path) -> dict:
    """The bypass mode: weights are divided by their mean over all ranks and micro-batches."""
    correction = {"bypass_mode": True, "loss_type": "reinforce", "rollout_is": "token", "rollout_is_threshold": 1.1}
    normalised = {**correction, "rollout_is_batch_normalize": True}
    return compare(ranks, folder, Case(limits={"micro_batch_size": 2}, correction=normalised))


def several_rows_of_a_sample(ranks: Ranks, folder: Path) -> dict:
    """Rows of one sample on both ranks, and one that only fills up the ranks."""
    samples = tuple(row // 3 for row in range(ROWS))
    return compare(ranks, folder, Case(limits={"micro_batch_size": 2}, samples=samples))


def half_precision(ranks: Ranks, folder: Path) -> dict:
    """bf16 products over float32 weights, beside the plain engine in float32."""
    return compare(ranks, folder, Case(engine={"dtype": "bfloat16"}))


def half_precision_with_a_scaled_loss(ranks: Ranks, folder: Path) -> dict:
    """float16 products over float32 weights, beside the plain engine in float32."""
    return compare(ranks, folder, Case(engine={"dtype": "float16"}, limits={"micro_batch_size": 2}))


# ---- what is special about several ranks -------------------------------------------------------------------------


class Collectives(TorchDispatchMode):
    """Counts torch's collectives on weights and gradients within the block, those inside of a backward pass included.

    FSDP gathers lists of tensors on a CPU, and FSDP2 one tensor: both are a ``gather``.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d" and any(t.dtype == torch.float32 for t in tree_leaves(args) if torch.is_tensor(t)):
            name = func.overloadpacket.__name__
            kind = next((k for k in ("gather", "reduce_scatter", "reduce") if k in name), name)
            self.counts[kind] = self.counts.get(kind, 0) + 1
        return func(*args, **(kwargs or {}))


def collectives(call: Any) -> dict[str, int]:
    """How often each collective runs within ``call()``."""
    with Collectives() as mode:
        call()
    return mode.counts


def local_bytes(tensors: Any) -> int:
    return sum((t.to_local() if isinstance(t, DTensor) else t).nbytes for t in tensors)


def shards_are_real(ranks: Ranks, folder: Path) -> dict:
    """Bytes of weights, gradients and moments on each rank, and the collectives of a pass."""
    path = shared_model(ranks, folder, "qwen2")
    engine = sharded(path)
    mine = share(ranks, ragged_batch(rows=4))
    engine.train_batch(mine, loss_of("causal_lm"))
    parameters = list(engine.model.parameters())
    moments = [t for entries in engine.optimizer.state.values() for key, t in entries.items() if key != "step"]
    infer = collectives(lambda: engine.infer(mine))
    left_gathered = local_bytes(engine.model.parameters()) != local_bytes(parameters)
    train = collectives(lambda: engine.train_batch(mine, loss_of("causal_lm")))
    kept = sharded(path, engine={"reshard_after_forward": False})
    train_kept = collectives(lambda: kept.train_batch(mine, loss_of("causal_lm")))
    batches = collectives(lambda: engine.train_batch(mine, loss_of("causal_lm"), micro_batch_size=1))
    once = sharded(path, engine={"use_no_sync_for_gradient_accumulation": True})
    batches_once = collectives(lambda: once.train_batch(mine, loss_of("causal_lm"), micro_batch_size=1))
    return {
        "weights": local_bytes(parameters),
        "whole": 4 * engine.num_parameters,
        "report": engine._held(),
        "moments": local_bytes(moments),
        "layers": len(engine.unit_names),
        "infer": infer,
        "train": train,
        "train_kept": train_kept,
        "batches": batches,
        "batches_once": batches_once,
        "micro_batches": len(mine),
        "left_gathered": left_gathered,
    }


class PoisonedLoss:
    """NaN on one rank."""

    outputs = ("log_probs",)

    def __init__(self, here: bool):
        self.here = here

    def __call__(self, outputs: Any, batch: Any, norm: Any) -> Any:
        loss = outputs["log_probs"].sum()
        return (loss * float("nan") if self.here else loss), {}


def nan_on_one_rank(ranks: Ranks, folder: Path) -> dict:
    engine = sharded(shared_model(ranks, folder, "qwen2"))
    mine = share(ranks, ragged_batch(rows=4))
    engine.train_batch(mine, loss_of("causal_lm"))
    before = {name: tensor.clone() for name, tensor in engine.state().tensors.items()}
    metrics = engine.train_batch(mine, PoisonedLoss(ranks.rank == ranks.size - 1)).values()
    after = engine.state()
    changed = [name for name, t in before.items() if not torch.equal(t, after.tensors[name])]
    good = engine.train_batch(mine, loss_of("causal_lm")).values()
    return {
        "skipped": metrics["skipped_nonfinite_step"],
        "finite": math.isfinite(metrics["grad_norm"]),
        "changed": changed,
        "skipped_next": good["skipped_nonfinite_step"],
    }


def empty_everywhere(ranks: Ranks, folder: Path) -> dict:
    engine = sharded(shared_model(ranks, folder, "qwen2"))
    return engine.train_batch(ragged_batch(rows=4)[[]], loss_of("causal_lm")).values()


def ranks_called_differently(ranks: Ranks, folder: Path) -> dict:
    """One rank with other outputs, one with a broken row, a path that is no model; the engine works afterwards."""
    path = shared_model(ranks, folder, "qwen2")
    engine, mine = sharded(path), share(ranks, ragged_batch(rows=4))
    broken = share(ranks, ragged_batch(rows=4))
    if ranks.rank == 1:
        broken.batch["attention_mask"][:] = 0
    told = {}
    for name, call in {
        "outputs": lambda: engine.infer(mine, ("log_probs",) if ranks.rank else ("entropy",)),
        "rows": lambda: engine.infer(broken),
        "folder": lambda: sharded(folder / "nowhere"),
    }.items():
        try:
            call()
        except VerlError as error:
            told[name] = f"{type(error).__name__}: {error}"
    return {"told": told, "after": list(engine.infer(mine)["log_probs"].shape)}


def weights_in_and_out(ranks: Ranks, folder: Path) -> dict:
    """Exported weights into another engine: from all ranks, from rank 0 alone; and those that do not fit."""
    path = shared_model(ranks, folder, "qwen3_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
    source, target = sharded(path), sharded(path, trains=False)
    source.train_batch(share(ranks, ragged_batch(rows=4)), loss_of("causal_lm"))
    exported = dict(source.export_weights())
    different = not torch.equal(flat(exported), flat(target.export_weights()))
    target.load_weights(source.export_weights())
    equal = torch.equal(flat(exported), flat(target.export_weights()))
    doubled = {name: 2 * tensor for name, tensor in exported.items()}
    target.load_weights(doubled if ranks.is_first else {})
    equal_doubled = torch.equal(flat(doubled), flat(target.export_weights()))
    doubled.pop("model.norm.weight")
    try:
        target.load_weights(doubled)
    except ModelError as error:
        told = str(error)
    except WorkerError as error:
        told = f"other rank: {error}"
    on_disk = sorted(exported) == sorted(read_weights(path))
    return {"different": different, "equal": equal, "doubled": equal_doubled, "told": told, "names": on_disk}


def weights_copied(ranks: Ranks, folder: Path) -> dict:
    """A trained engine's weights in frozen ones of the same model: cut as it is, in bf16, and cut in another way."""
    path = shared_model(ranks, folder, "qwen2")
    source = sharded(path)
    source.train_batch(share(ranks, ragged_batch(rows=4)), loss_of("causal_lm"))
    expected = flat(source.export_weights())
    alike, half = sharded(path, trains=False), sharded(path, trains=False, engine={"model_dtype": "bfloat16"})
    elsewhere = sharded(path, trains=False, engine={"fsdp_size": 1})
    different = not torch.equal(expected, flat(alike.export_weights()))
    calls = collectives(lambda: alike.copy_weights(source))
    for engine in (half, elsewhere):
        engine.copy_weights(source)
    equal = {
        "alike": torch.equal(flat(alike.export_weights()), expected),
        "half": torch.equal(flat(half.export_weights()), expected.bfloat16().to(expected)),
        "elsewhere": torch.equal(flat(elsewhere.export_weights()), expected),
    }
    return {"different": different, "equal": equal, "calls": calls}
