"""Experts of a mixture sharded over ranks, beside the plain engine; and what each rank really holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.dist.engine_cells import (
    OPTIM,
    ROWS,
    Case,
    compare,
    flat,
    local_bytes,
    loss_of,
    order_of,
    plain,
    sharded,
    share,
    shared_model,
    whole_gradient,
)
from tests.dist.resume_cells import load, save
from tests.harness.engines import gradients, make_engine, ragged_batch, relative_error
from verl.distributed import Ranks
from verl.distributed.experts import ExpertExchange
from verl.engines.expert_parallel import expert_modules
from verl.engines.settings import PassSettings
from verl.errors import ConfigError, NotBuiltError

KEY = "expert_parallel_size"
STANDARD = ("input_ids", "attention_mask", "position_ids", "response_mask")
MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


def experts(ranks: Ranks, folder: Path) -> dict:
    """All ranks share the experts."""
    limits = {"micro_batch_size": 2}
    return compare(ranks, folder, Case("qwen3_moe", config=MIXTURE, engine={KEY: ranks.size}, limits=limits))


def experts_in_pairs(ranks: Ranks, folder: Path) -> dict:
    """Two pairs that each hold all experts and shard them between them; sequences are shared too; a rank is idle."""
    engine = {KEY: 2, "ulysses_sequence_parallel_size": 2}
    model = {"enable_gradient_checkpointing": True}
    return compare(ranks, folder, Case("qwen3_moe", config=MIXTURE, engine=engine, model=model, idle=(1,)))


def experts_replayed(ranks: Ranks, folder: Path) -> dict:
    """Recorded experts on ranks that share experts, and with four ranks sequences as well, of which one has no rows."""
    idle, sharing = ((1,), 2) if ranks.size == 4 else ((), 1)
    path, passes = shared_model(ranks, folder, "qwen3_moe", **MIXTURE), PassSettings(router_replay=True)
    engine = sharded(path, engine={KEY: 2, "ulysses_sequence_parallel_size": sharing}, passes=passes)
    batch, loss_fn = ragged_batch(rows=ROWS, seed=1), loss_of("causal_lm")
    generator = torch.Generator().manual_seed(0)
    drawn = torch.rand(*batch.batch["input_ids"].shape, 2, 4, generator=generator).argsort(-1)[..., :2]
    there = batch.batch["attention_mask"].bool()[..., None, None]
    batch.batch["routed_experts"] = torch.where(there, drawn, -1).short()
    mine, free = (share(ranks, rows, idle) for rows in (batch, batch.select(["responses", *STANDARD])))
    outputs = ("log_probs", "routed_experts")
    found = [engine.infer(rows, outputs, max_tokens=24) for rows in (mine, free)]
    answers = ranks.exchange([{name: values.tolist() for name, values in one.items()} for one in found])
    loss, gradient = gradients(engine, mine, loss_fn, whole_gradient, max_tokens=24)
    differs = engine.train_batch(mine, loss_fn, max_tokens=24).values()["moe/replay_differs"]
    if not ranks.is_first:
        return {"differs": differs}
    reference = make_engine(path, optim=OPTIM, seed=5, passes=passes)
    errors, order = {}, order_of(ranks, batch, idle)
    for number, rows in enumerate((batch, batch.select(["responses", *STANDARD]))):
        for name, expected in reference.infer(rows, outputs).items():
            whole = torch.tensor([row for answer in answers for row in answer[number][name]])
            errors[f"{name} {number}"] = relative_error(whole, expected[order])
    expected_loss, expected_gradient = gradients(reference, batch, loss_fn)
    errors["loss"], errors["gradient"] = abs(loss - expected_loss), relative_error(gradient, expected_gradient)
    own = reference.train_batch(batch, loss_fn).values()["moe/replay_differs"]
    return {"errors": errors, "differs": differs, "expected": own}


def experts_that_nobody_asks(ranks: Ranks, folder: Path) -> dict:
    """One token per row: most experts have nothing to do."""
    config = {**MIXTURE, "num_experts": 8, "num_experts_per_tok": 1}
    limits = {"micro_batch_size": 1}
    return compare(ranks, folder, Case("qwen3_moe", config=config, engine={KEY: ranks.size}, limits=limits))


def experts_are_shared(ranks: Ranks, folder: Path) -> dict:
    """Bytes of experts per rank, with two ranks sharing them; and tokens that each rank's experts see."""
    path = shared_model(ranks, folder, "qwen3_moe", **MIXTURE)
    engine = sharded(path, engine={KEY: ranks.size})
    modules = [m for m in engine.model.modules() if isinstance(vars(m).get("forward"), ExpertExchange)]
    seen: list[list[int]] = []
    for module in modules:
        inner = module.forward.compute

        def watched(states: Any, numbers: Any, weights: Any, inner: Any = inner) -> Any:
            seen.append([len(states), int(numbers.max()) if len(numbers) else 0])
            return inner(states, numbers, weights)

        module.forward.compute = watched
    batch = ragged_batch(rows=5)
    engine.infer(share(ranks, batch))
    computed = ranks.exchange(sum(count for count, _ in seen))
    return {
        "bytes": local_bytes(p for module in modules for p in module.parameters()),
        "whole": sum(p.nbytes for module in expert_modules(engine.blueprint).values() for p in module.parameters()),
        "computed": sum(computed),
        "highest": max(number for _, number in seen),
        "layers": len(modules),
    }


def experts_resume(ranks: Ranks, folder: Path) -> dict:
    """Two steps with shared experts, saved; the next loss with them, without, and in the plain engine."""
    path, loss_fn = shared_model(ranks, folder, "qwen3_moe", **MIXTURE), loss_of("causal_lm")
    engine = sharded(path, engine={KEY: 2})
    for seed in range(2):
        engine.train_batch(share(ranks, ragged_batch(rows=6, seed=seed)), loss_fn)
    root = folder / f"experts-{ranks.size}"
    save(engine, ranks, root)
    again, whole = sharded(path, engine={KEY: 2}), sharded(path)
    load(again, ranks, root)
    load(whole, ranks, root)
    batch = ragged_batch(rows=6, seed=2)
    losses = [made.train_batch(share(ranks, batch), loss_fn).values()["loss"] for made in (engine, again, whole)]
    weights = [flat(made.export_weights()) for made in (engine, again, whole)]
    found = {"losses": losses, "same": torch.equal(*weights[:2]), "near": relative_error(weights[2], weights[0])}
    if ranks.is_first:
        alone = plain(path)
        load(alone, Ranks(), root)
        found["plain"] = alone.train_batch(batch, loss_fn).values()["loss"]
    return found


def experts_with_an_adapter(ranks: Ranks, folder: Path) -> dict:
    """peft adapts experts and router as bare tensors, which all-linear names; nobody shares the experts."""
    both = {"lora_rank": 4, "lora_alpha": 8}
    return compare(ranks, folder, Case("qwen3_moe", config=MIXTURE, both=both, limits={"micro_batch_size": 2}))


def experts_refused(ranks: Ranks, folder: Path) -> dict:
    mixture, dense = shared_model(ranks, folder, "qwen3_moe", **MIXTURE), shared_model(ranks, folder, "qwen2")
    odd = shared_model(ranks, folder, "qwen3_moe", **{**MIXTURE, "num_experts": 3})
    told = {}
    for name, make in {
        "dense": lambda: sharded(dense, engine={KEY: 2}),
        "odd": lambda: sharded(odd, engine={KEY: 2}),
        "ranks": lambda: sharded(mixture, engine={KEY: 3}),
        "hybrid": lambda: sharded(mixture, engine={KEY: 2, "fsdp_size": 1}),
        "adapter": lambda: sharded(mixture, engine={KEY: 2}, model={"lora_rank": 4}),
    }.items():
        try:
            make()
        except (ConfigError, NotBuiltError) as error:
            told[name] = str(error)
    return told
