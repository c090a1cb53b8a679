"""TorchTitan's models on several processes, beside the plain engine on rank 0 that they are compared with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.dist import resume_cells as resume
from tests.dist.engine_cells import OPTIM, ROWS, flat, loss_of, order_of, plain, sharded, share, shared_model
from tests.harness.engines import gradients, on_policy_batch, ragged_batch, relative_error
from tests.harness.several_tokens import distilled
from verl.config import HFModelConfig, OptimizerConfig
from verl.config.schema.torchtitan import TorchTitanEngineConfig
from verl.distributed import Ranks
from verl.models.hf_folder import read_weights
from verl.models.weights import named_tensors
from verl.registry import ENGINES

LLAMA3 = {
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    }
}
MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
STAGED = {"pipeline_parallel_size": 2, "expert_parallel_size": 2}


def titan(
    path: Path,
    trains: bool = True,
    model: Any = None,
    optim: dict[str, Any] | None = None,
    passes: Any = None,
    **sizes: Any,
) -> Any:
    return ENGINES.get("torchtitan")(
        HFModelConfig(path=str(path), **(model or {})),
        TorchTitanEngineConfig(**sizes),
        OptimizerConfig(**{**OPTIM, **(optim or {})}) if trains else None,
        total_training_steps=10,
        seed=5,
        passes=passes,
    )


@torch.no_grad()
def complete_gradient(engine: Any) -> Tensor:
    """Flat, in the order of the names, on every rank."""
    names = engine._parameter_names()
    grads = {names[p]: p.grad for p in engine.model.parameters()}
    everywhere = getattr(engine, "_everywhere", None)  # the plain engine has all of them
    if everywhere is not None:
        grads = {name: everywhere(grads.get(name), name) for name in named_tensors(engine.blueprint)}
    return torch.cat([grads[name].flatten().clone() for name in sorted(grads)])


def compare(
    ranks: Ranks,
    path: Path,
    model: dict[str, Any] | None = None,
    idle: tuple[int, ...] = (),
    constant: tuple[int, ...] = (),
    **sizes: Any,
):
    """Relative errors of outputs, loss, gradient and weights, and whether weights come out as they went in."""
    engine = titan(path, model=model, **sizes)
    exported = {name: tensor.clone() for name, tensor in engine.export_weights()}
    batch = on_policy_batch(ROWS, constant, seed=1) if constant else ragged_batch(rows=ROWS, seed=1)
    mine, limits, outputs = share(ranks, batch, idle), {"micro_batch_size": 2}, ("log_probs", "entropy")
    own = engine.infer(mine, outputs, temperature=0.9, **limits)
    answers = ranks.exchange({name: values.tolist() for name, values in own.items()})
    loss, gradient = gradients(engine, mine, loss_of("causal_lm"), complete_gradient, **limits)
    metrics = [engine.train_batch(mine, loss_of("causal_lm"), **limits).values() for _ in range(2)]
    weights = flat(engine.export_weights())
    if not ranks.is_first:
        return {}
    reference = plain(path)
    reference.skips_constant_rows = False
    expected = reference.infer(batch, outputs, temperature=0.9)
    joined = {name: torch.tensor([row for answer in answers for row in answer[name]]) for name in outputs}
    order = order_of(ranks, batch, idle)
    errors = {name: relative_error(joined[name], expected[name][order]) for name in outputs}
    expected_loss, expected_gradient = gradients(reference, batch, loss_of("causal_lm"), complete_gradient)
    errors["loss"] = abs(loss - expected_loss) / abs(expected_loss)
    errors["gradient"] = relative_error(gradient, expected_gradient)
    steps = [reference.train_batch(batch, loss_of("causal_lm")).values() for _ in range(2)]
    errors["grad_norm"] = max(abs(a["grad_norm"] / b["grad_norm"] - 1) for a, b in zip(metrics, steps))
    errors["weights"] = relative_error(weights, flat(reference.export_weights()))
    if ranks.size == 1 and "moe/load_balance" in steps[0]:  # several ranks also count tokens that fill up
        pairs = [(a[name], b[name]) for a, b in zip(metrics, steps) for name in ("moe/load_balance", "moe/max_load")]
        errors["routers"] = max(abs(a / b - 1) for a, b in pairs)
    stored = read_weights(path)
    same = exported.keys() == stored.keys() and all(torch.equal(exported[name], stored[name]) for name in stored)
    return {"errors": errors, "same_names_and_bits": same}


@dataclass(frozen=True)
class Cell:
    """A layout that is held to the plain engine.

    Args:
        family: `FAMILIES`. sizes: settings of the engine. model: of the model.
        idle: ranks without rows. constant: rows whose advantage is 0.
    """

    family: str
    sizes: Mapping[str, Any] = field(default_factory=dict)
    model: Mapping[str, Any] = field(default_factory=dict)
    idle: tuple[int, ...] = ()
    constant: tuple[int, ...] = ()

    @property
    def layout(self) -> str:
        """The sizes in the field's short names; ``fsdp`` where all ranks only shard."""
        words = [f"{short} {self.sizes[name]}" for name, short in SHORT.items() if name in self.sizes]
        words += ["recomputed"] if self.model.get("enable_gradient_checkpointing") else []
        return ", ".join(words) or "fsdp"

    @property
    def trained(self) -> str:
        words = ["all weights", *(["padded rows"] if self.model.get("use_remove_padding") is False else [])]
        words += ["a rank without rows"] if self.idle else []
        return ", ".join([*words, *(["rows without a gradient"] if self.constant else [])])


SHORT = {
    "data_parallel_replicate_size": "replicas",
    "tensor_parallel_size": "tp",
    "pipeline_parallel_size": "pp",
    "context_parallel_size": "cp",
    "expert_parallel_size": "ep",
}
FAMILIES = {
    "llama3": ("llama", LLAMA3),
    "qwen3, tied": ("qwen3", resume.TIED),
    "mixture": ("qwen3_moe", MIXTURE),
}
SHARED, STAGES = {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}
CONTEXT, EXPERTS = {"context_parallel_size": 2}, {"expert_parallel_size": 2}
HYBRID = {"data_parallel_replicate_size": 2}
RECOMPUTED, PADDED = {"enable_gradient_checkpointing": True}, {"use_remove_padding": False}
PARITY = {
    1: [Cell("qwen3, tied"), Cell("mixture")],
    2: [
        Cell("llama3", SHARED, idle=(1,)),
        Cell("qwen3, tied", SHARED, RECOMPUTED),
        Cell("llama3", STAGES),
        Cell("llama3", STAGES, constant=(0, 2, 3)),
        Cell("qwen3, tied", CONTEXT),
        Cell("mixture", EXPERTS, idle=(1,)),
    ],
    4: [
        Cell("llama3", SHARED, idle=(3,)),
        Cell("llama3", HYBRID, PADDED),
        Cell("llama3", STAGES, RECOMPUTED, idle=(1,)),
        Cell("llama3", {**STAGES, **SHARED}, PADDED),
        Cell("qwen3, tied", {**CONTEXT, **SHARED}),
        Cell("mixture", EXPERTS),
        Cell("mixture", {**EXPERTS, **HYBRID}),
        Cell("mixture", {**EXPERTS, **SHARED}),
    ],
}


def parity(ranks: Ranks, folder: Path) -> list[dict[str, Any]]:
    """`compare` of every cell, in their order."""
    results = []
    for cell in PARITY[ranks.size]:
        family, config = FAMILIES[cell.family]
        path = shared_model(ranks, folder, family, **config)
        results.append(compare(ranks, path, dict(cell.model), cell.idle, cell.constant, **cell.sizes))
    return results


def several_tokens(ranks: Ranks, folder: Path) -> list[dict[str, float]]:
    """Lists of tokens in layouts of as many ranks."""
    path = shared_model(ranks, folder, "llama", **LLAMA3)
    layouts = {1: [{}], 2: [SHARED, STAGES, CONTEXT], 4: [{**STAGES, **SHARED}, {**CONTEXT, **SHARED}]}
    findings = []
    for sizes in layouts[ranks.size]:
        batch = ragged_batch(rows=ROWS, seed=1)
        rows = list(range(ranks.rank, ROWS, ranks.size))
        findings.append(distilled(partial(titan, path, **sizes), partial(plain, path), batch, rows))
    return findings


def resumed(ranks: Ranks, folder: Path) -> dict[str, Any]:
    """Checkpoint in the folder -> the step that comes after it; of an own one also what is not the same bits."""
    path = shared_model(ranks, folder, "qwen3", **resume.TIED)
    sizes = {"tensor_parallel_size": min(2, ranks.size)}
    engine = titan(path, optim=resume.OPTIM, **sizes)
    for step in range(resume.STEPS):
        resume.train(engine, ranks, step)
    root = folder / f"from-torchtitan-{ranks.size}"
    resume.save(engine, ranks, root)
    ranks.on_first(lambda: None)
    after: dict[str, Any] = {root.name: resume.after(engine, ranks, root)}
    expected = {name: tensor.clone() for name, tensor in engine.state().tensors.items()}
    for other in sorted(folder.glob("from-*")):
        again = titan(path, optim=resume.OPTIM, **sizes)
        resume.load(again, ranks, other)
        after[f"{other.name} again"] = resume.after(again, ranks, other)
        if other == root:
            state = again.state().tensors
            after["different"] = [name for name, tensor in expected.items() if not torch.equal(tensor, state[name])]
    if ranks.size == 2:  # by another engine on as many ranks
        again = sharded(path, optim=resume.OPTIM)
        resume.load(again, ranks, root)
        after["in fsdp2"] = resume.after(again, ranks, root)
        again.copy_weights(engine)
        frozen = titan(path, trains=False, **sizes)
        frozen.copy_weights(again)
        frozen.save_hf(folder / "hf")
        ranks.barrier()
        saved, kept = read_weights(folder / "hf"), dict(engine.export_weights())
        after["copied"] = all(torch.equal(saved[name], tensor) for name, tensor in kept.items())
    return after


def moved(ranks: Ranks, folder: Path) -> dict[str, Any]:
    """The step that comes after a checkpoint of a mixture in stages that share experts, in other layouts and engines.

    As `resume_cells.after`; of the same layout also what is not the same bits.
    """
    path, root = shared_model(ranks, folder, "qwen3_moe", **MIXTURE), folder / "moved"
    engine = titan(path, optim=resume.OPTIM, **STAGED)
    for step in range(resume.STEPS):
        resume.train(engine, ranks, step)
    resume.save(engine, ranks, root)
    ranks.on_first(lambda: None)
    after: dict[str, Any] = {"stages x experts": resume.after(engine, ranks, root)}
    expected = {name: tensor.clone() for name, tensor in engine.state().tensors.items()}
    again = titan(path, optim=resume.OPTIM, **STAGED)
    resume.load(again, ranks, root)
    after["stages x experts, again"] = resume.after(again, ranks, root)
    state = again.state().tensors
    different = [name for name, tensor in expected.items() if not torch.equal(tensor, state[name])]
    others = {
        "experts x tensor-parallel": titan(path, optim=resume.OPTIM, expert_parallel_size=2, tensor_parallel_size=2),
        "fsdp2": sharded(path, optim=resume.OPTIM),
    }
    for name, other in others.items():
        resume.load(other, ranks, root)
        after[name] = resume.after(other, ranks, root)
    again.copy_weights(others["fsdp2"])  # into stages
    kept, copied = flat(others["fsdp2"].export_weights()), flat(again.export_weights())
    if ranks.is_first:
        alone = plain(path, optim=resume.OPTIM)
        resume.load(alone, Ranks(), root)
        after["plain"] = resume.after(alone, Ranks(), root)
    return {"after": after, "different": different, "copied": torch.equal(kept, copied)}
