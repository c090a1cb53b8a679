"""Checkpoints of sharded engines: bitwise at the same number of ranks, equal numbers at any other."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.fsdp import fully_shard

from tests.dist.engine_cells import flat, loss_of, plain, sharded, share, shared_model
from tests.harness.engines import ragged_batch, relative_error
from verl.checkpoint import CheckpointReader, CheckpointWriter, FileRecord, find_checkpoint, read_part
from verl.compat.forms.fsdp2 import FSDPCheckpointManager, shard_largest
from verl.distributed import Ranks, data_parallel_mesh
from verl.distributed.shards import gather
from verl.engines.base import Engine
from verl.errors import CheckpointError, VerlError
from verl.models.hf_folder import read_weights
from verl.workers.part import ModelPart, load_part, save_part, saved_records

STEPS = 2
CONTENTS = ("model", "optimizer", "extra")
TIED = {"tie_word_embeddings": True}
OPTIM = {"lr_warmup_steps": 2}


def train(engine: Engine, ranks: Ranks, step: int) -> dict[str, float]:
    metrics = engine.train_batch(share(ranks, ragged_batch(rows=6, seed=step)), loss_of("causal_lm")).values()
    engine.step_scheduler()
    return metrics


def save(engine: Engine, ranks: Ranks, root: Path) -> None:
    """Every rank writes its part, rank 0 puts the checkpoint in place."""
    writer = ranks.only_first(lambda: CheckpointWriter(root))
    beside = ranks.on_first(lambda: str(writer.begin(STEPS, ("actor",))))
    records = save_part(ModelPart(engine), f"{beside}/actor", CONTENTS)
    written = [{name: FileRecord(**r) for name, r in answer.items()} for answer in everyones(records, ranks)]
    ranks.only_first(lambda: writer.complete({"actor": {k: r for answer in written for k, r in answer.items()}}))
    ranks.only_first(lambda: writer.close())  # noqa: PLW0108 - the first rank alone has a writer


def everyones(records: dict[str, FileRecord], ranks: Ranks) -> list[dict[str, dict]]:
    return ranks.exchange({name: asdict(record) for name, record in records.items()})


def load(engine: Engine, ranks: Ranks, root: Path) -> None:
    """Every rank reads what it keeps."""
    engine.load_state(CheckpointReader(find_checkpoint(root)).load("actor"))


def same_ranks_same_bits(ranks: Ranks, folder: Path) -> dict:
    """Save, go on; load into a new engine, go on: dropout draws the same numbers on every rank."""
    path = shared_model(ranks, folder, "qwen2", attention_dropout=0.3, **TIED)
    torch.manual_seed(100 + ranks.rank)
    engine = sharded(path, optim=OPTIM)
    for step in range(STEPS):
        train(engine, ranks, step)
    root = folder / f"dropout-{ranks.size}"
    save(engine, ranks, root)
    metrics, rng = train(engine, ranks, STEPS), torch.get_rng_state()
    expected = {name: tensor.clone() for name, tensor in engine.state().tensors.items()}
    scalars = json.dumps(engine.state().scalars)

    torch.manual_seed(7)
    again = sharded(path, optim=OPTIM)
    load(again, ranks, root)
    metrics_again = train(again, ranks, STEPS)
    found = again.state()
    return {
        "metrics": [metrics, metrics_again],
        "rng": torch.equal(rng, torch.get_rng_state()),
        "bytes": sum(t.nbytes for n, t in expected.items() if n.startswith(("model/", "optimizer/"))),
        "different": [n for n, t in expected.items() if not torch.equal(t, found.tensors[n])],
        "same_names": sorted(expected) == sorted(found.tensors),
        "same_scalars": scalars == json.dumps(found.scalars),
        "rng_names": sorted(n for n in expected if n.startswith("extra/")),
    }


def saved_here(ranks: Ranks, folder: Path) -> dict:
    """A checkpoint for the other world sizes, and what comes after it."""
    path = shared_model(ranks, folder, "qwen3", **TIED)
    engine = sharded(path, optim=OPTIM)
    for step in range(STEPS):
        train(engine, ranks, step)
    root = folder / saved_by(ranks)
    save(engine, ranks, root)
    ranks.on_first(lambda: None)
    return after(engine, ranks, root)


def saved_by(ranks: Ranks) -> str:
    return f"from-{'fsdp2' if ranks.size > 1 else 'plain'}-{ranks.size}"


def after(engine: Engine, ranks: Ranks, root: Path) -> dict:
    """Loss of the next step, and its distance from the weights behind the step that followed the checkpoint."""
    metrics = train(engine, ranks, STEPS)
    weights = flat(engine.export_weights())
    reference = root / "next.safetensors"
    if ranks.is_first and not reference.exists():
        save_file({"weights": weights}, reference)
    ranks.barrier()
    return {
        "loss": metrics["loss"],
        "lr": metrics["lr"],
        "weights": relative_error(weights, load_file(reference)["weights"]),
    }


def loaded_here(ranks: Ranks, folder: Path) -> dict:
    """The checkpoints of other world sizes and engines that lie in the folder."""
    found: dict[str, Any] = {}
    for root in sorted(folder.glob("from-*")):
        if root.name != saved_by(ranks):
            engine = sharded(folder / "qwen3-True" / "qwen3", optim=OPTIM)
            load(engine, ranks, root)
            found[root.name] = after(engine, ranks, root)
    return found


def written_by_a_worker(ranks: Ranks, folder: Path) -> dict:
    """What the registered methods of a training worker do; a folder that is not there is an error on every rank."""
    part = ModelPart(sharded(folder / "qwen3-True" / "qwen3", optim=OPTIM), loss_fn=loss_of("causal_lm"))
    train(part.engine, ranks, 0)
    target = folder / f"worker-{ranks.size}"
    records = save_part(part, str(target), CONTENTS)
    expected = train(part.engine, ranks, 1)["loss"]
    load_part(part, str(target), CONTENTS)
    found = train(part.engine, ranks, 1)["loss"]
    behind = folder / f"behind-{ranks.size}"
    save_part(part, str(behind), CONTENTS, background=True)
    copies = part.being_saved._buffers.items()
    copied = {name: sum(t.nbytes for full, t in copies if full.startswith(name)) for name in ("model", "optimizer")}
    alike = sorted(saved_records(part, wait=True)) == sorted(records)
    ranks.barrier()
    complete = sum(tensor.nbytes for tensor in read_part(behind).section("optimizer").values())
    part.engine.save_hf(folder / f"hf-{ranks.size}")
    try:
        load_part(part, str(folder / "nowhere"), ("model",))
    except VerlError as error:
        told = str(error)
    ranks.barrier()
    saved = read_weights(folder / f"hf-{ranks.size}")
    current = dict(part.engine.export_weights())
    return {
        "records": sorted(records),
        "losses": [expected, found],
        "told": told,
        "behind": {"alike": alike, "copied": copied, "complete": complete},
        "hf": all(torch.equal(saved[name], tensor) for name, tensor in current.items()),
    }


def loaded_into_a_frozen_engine(ranks: Ranks, folder: Path) -> dict:
    """Only weights are taken; a state of another model is refused on every rank."""
    engine = sharded(folder / "qwen3-True" / "qwen3", trains=False)
    before = flat(engine.export_weights())
    load(engine, ranks, folder / saved_by(ranks))
    moved = relative_error(flat(engine.export_weights()), before)
    other = sharded(shared_model(ranks, folder, "llama"), trains=False)
    try:
        load(other, ranks, folder / saved_by(ranks))
    except CheckpointError as error:
        return {"moved": moved, "told": str(error)}
    return {"moved": moved, "told": ""}


def by_hand(ranks: Ranks, folder: Path) -> dict:
    """A module and an optimizer, cut along rows and columns: files, bits of a resume, and sharded by none."""
    root = folder / "by-hand"

    def made(cut: bool) -> tuple:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3))
        if cut:
            mesh = data_parallel_mesh(ranks, "cpu", -1)
            fully_shard(model, mesh=mesh, shard_placement_fn=shard_largest(ranks.size))
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
        model(torch.arange(8.0).view(2, 4)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        return [gather(p).clone() for p in model.parameters()]

    one = made(True)
    step(*one)
    FSDPCheckpointManager(*one).save_checkpoint(str(root))
    expected, others = step(*one), {}
    for name, cut in (("cut", True), ("complete", False)):
        other = made(cut)
        FSDPCheckpointManager(*other).load_checkpoint(str(root))
        others[name] = [float((a - b).abs().max()) for a, b in zip(step(*other), expected, strict=True)]
    files = {file.name: sorted(load_file(file)) for file in sorted(root.rglob("*.safetensors"))}
    sizes = [sum(t.nbytes for t in load_file(file).values()) for file in sorted(root.glob("optimizer*"))]
    return {"others": others, "files": files, "sizes": sizes}


def plain_saved(folder: Path) -> dict:
    """The same in one process with the plain engine."""
    ranks = Ranks()
    engine = plain(shared_model(ranks, folder, "qwen3", **TIED), optim=OPTIM)
    for step in range(STEPS):
        train(engine, ranks, step)
    save(engine, ranks, folder / saved_by(ranks))
    return after(engine, ranks, folder / saved_by(ranks))


def plain_loaded(folder: Path) -> dict:
    """The checkpoints of all engines and world sizes in the plain engine."""
    ranks, found = Ranks(), {}
    for root in sorted(folder.glob("from-*")):
        engine = plain(folder / "qwen3-True" / "qwen3", optim=OPTIM)
        load(engine, ranks, root)
        found[root.name] = after(engine, ranks, root)
    return found


def moments_in_few_bits(ranks: Ranks, folder: Path) -> dict:
    """8-bit moments of pieces of weights: after a checkpoint the same bits; beside them the plain engine's."""
    path = shared_model(ranks, folder, "qwen3", hidden=64, **TIED)
    optim = {"optimizer_impl": "torchao.optim", "optimizer": "AdamW8bit"}
    engine = sharded(path, optim=optim)
    for step in range(STEPS):
        train(engine, ranks, step)
    root = folder / f"few-bits-{ranks.size}"
    save(engine, ranks, root)
    kinds = {type(e.to_local()).__name__ for own in engine.optimizer.state.values() for e in own.values() if e.dim()}
    train(engine, ranks, STEPS)
    again = sharded(path, optim=optim)
    load(again, ranks, root)
    train(again, ranks, STEPS)
    expected, found = engine.state().tensors, again.state().tensors
    weights = flat(engine.export_weights())
    alone = []
    for settings in ({}, optim):
        reference = plain(path, optim=settings)
        for step in range(STEPS + 1):
            reference.train_batch(ragged_batch(rows=6, seed=step), loss_of("causal_lm"))
            reference.step_scheduler()
        alone.append(flat(reference.export_weights()))
    return {
        "kinds": sorted(kinds),
        "different": [n for n, t in expected.items() if n.startswith(("m", "o")) and not torch.equal(t, found[n])],
        "from float32": relative_error(weights, alone[0]),
        "plain from float32": relative_error(alone[1], alone[0]),
    }


MUON = {"optimizer": "Muon", "override_optimizer_config": {}, "lr_warmup_steps": 0}


def muon_saved(ranks: Ranks, folder: Path) -> dict:
    """Two updates beside the plain engine, and a checkpoint."""
    path = shared_model(ranks, folder, "qwen2", **TIED)
    engine = sharded(path, optim=MUON)
    for step in range(STEPS):
        train(engine, ranks, step)
    save(engine, ranks, folder / "muon")
    return _beside_plain(engine, path, STEPS)


def muon_loaded(ranks: Ranks, folder: Path) -> dict:
    """The third, from the checkpoint of two ranks."""
    path = shared_model(ranks, folder, "qwen2", **TIED)
    engine = sharded(path, optim=MUON)
    load(engine, ranks, folder / "muon")
    train(engine, ranks, STEPS)
    return _beside_plain(engine, path, STEPS + 1)


def _beside_plain(engine: Engine, path: Path, steps: int) -> dict:
    weights, reference = flat(engine.export_weights()), plain(path, optim=MUON)
    before = flat(reference.export_weights()).clone()
    for step in range(steps):
        reference.train_batch(ragged_batch(rows=6, seed=step), loss_of("causal_lm"))
        reference.step_scheduler()
    expected = flat(reference.export_weights())
    return {"weights": relative_error(weights, expected), "moved": relative_error(before, expected)}
