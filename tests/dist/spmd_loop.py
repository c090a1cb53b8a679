"""A small supervised loop as torchrun starts it: ``torchrun spmd_loop.py MODEL FOLDER``.

Saves after step 2, continues from a checkpoint that it finds, and writes losses and final weights of rank 0. It runs
twice: from the start, and from a copy of its own checkpoint.
"""

from __future__ import annotations

import json
import shutil
import sys
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import save_file

from tests.dist.engine_cells import flat, loss_of, sharded
from tests.engines.builders import ragged_batch
from verl import distributed
from verl.checkpoint import CheckpointReader, CheckpointWriter, EngineState, find_checkpoint
from verl.single_controller.spmd import Spmd

SAVE_AT, STEPS = 2, 3


def loop(ctx: Spmd, path: Path, root: Path) -> None:
    writer = ctx.only_main(lambda: CheckpointWriter(root))
    engine = sharded(path)
    found = ctx.only_main(lambda: find_checkpoint(root))
    controller = ctx.on_main(lambda: CheckpointReader(found).trainer_state() if found else {"step": 0})
    if controller["step"]:
        engine.load_state(ctx.only_main(lambda: CheckpointReader(found).load("model")) or EngineState())
    losses = []
    for step in range(controller["step"], STEPS):
        share = ctx.share(ragged_batch(rows=5, seed=step))
        losses.append(engine.train_batch(share, loss_of("causal_lm")).values()["loss"])
        engine.step_scheduler()
        if step + 1 == SAVE_AT:
            parts, writers = {"model": engine.state()}, {"model": engine.hf_writer()}
            save = partial(writer.save, SAVE_AT, parts, writers, {"step": SAVE_AT}) if ctx.is_main else None
            ctx.only_main(save)
    weights = flat(engine.export_weights())
    if ctx.is_main:
        writer.close()
        save_file({"weights": weights}, root / "final.safetensors")
        (root / "losses.json").write_text(json.dumps(losses))


def main(path: Path, folder: Path) -> None:
    torch.manual_seed(1)
    ctx = Spmd(distributed.start(timeout=60), seed=1)
    loop(ctx, path, folder / "straight")
    name = f"global_step_{SAVE_AT}"
    ctx.only_main(lambda: shutil.copytree(folder / "straight" / name, folder / "resumed" / name))
    loop(ctx, path, folder / "resumed")
    distributed.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
