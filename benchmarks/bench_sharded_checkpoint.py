"""What each rank holds, writes and waits for while several save and load one checkpoint.

Run ``python benchmarks/bench_sharded_checkpoint.py [--ranks 1 2 4] [--layers 24] [--width 256] [--alone]``. For every
number of processes (gloo, FSDP2, Qwen2 in float32 with Adam) and every rank the table has:

* the bytes of its shard: weights and both moments, as the engine holds them;
* memory of its own beyond that while it saves, while it copies for a save in the background, and while it loads, at
  most (pages of files do not count), against one shard of what it writes and one layer;
* the bytes that it wrote, as a share of all;
* seconds of the save and of the load.

It ends with status 1 where a bound is broken. ``--ranks 4 --layers 15 --width 2048 --alone`` is a state of 1.0 billion
parameters (12 GB): 17 GB of memory, 16 GB on the disk.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from figures import peak_and_seconds

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
CONTENTS = ("model", "optimizer", "extra")
MEGABYTE = 1 << 20
SLACK = 8 * MEGABYTE
"""What allocator, threads and JSON take."""
TOLERANCE = 0.02


def make_model(folder: Path, layers: int, width: int) -> None:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=64, hidden_size=width, intermediate_size=4 * width, num_hidden_layers=layers,
        num_attention_heads=8, num_key_value_heads=8, tie_word_embeddings=True,
    )  # fmt: skip
    Qwen2ForCausalLM(config).save_pretrained(folder)


def with_moments(engine: Any) -> None:
    """Adam's state without a step: a pass would leave memory of its own behind."""
    import torch

    for parameter in engine.model.parameters():
        moments = {name: torch.ones_like(parameter).detach() for name in ("exp_avg", "exp_avg_sq")}
        engine.optimizer.state[parameter] = {"step": torch.tensor(1.0), **moments}


def rank_main(rank: int, size: int, port: int, folder: Path, alone: bool) -> None:
    import torch

    from verl import distributed
    from verl.config import FSDPEngineConfig, HFModelConfig, OptimizerConfig
    from verl.registry import ENGINES
    from verl.workers.part import ModelPart, load_part, save_part, saved_records

    torch.set_num_threads(1)
    ranks = distributed.join_group(distributed.RankPlace(rank, size, rank, "127.0.0.1", port), timeout=600)
    engine = ENGINES.get("fsdp2")(HFModelConfig(path=str(folder / "model")), FSDPEngineConfig(), OptimizerConfig())
    part, target, measures = ModelPart(engine), str(folder / f"saved-{size}"), {}
    peak_and_seconds(lambda: save_part(part, str(folder / f"first-{size}"), ()))  # imports; what it takes is given back
    peak_and_seconds(lambda: with_moments(engine))
    ranks.barrier()
    records: dict[str, Any] = {}
    measures["save"] = peak_and_seconds(lambda: records.update(save_part(part, target, CONTENTS)))
    ranks.barrier()
    measures["load"] = peak_and_seconds(lambda: load_part(part, target, CONTENTS))
    ranks.barrier()

    def behind() -> None:
        save_part(part, f"{target}-behind", CONTENTS, background=True)
        saved_records(part, wait=True)

    if not alone:
        measures["behind"] = peak_and_seconds(behind)
    tensors = list(engine.model.parameters())
    tensors += [t for state in engine.optimizer.state.values() for t in state.values()]
    measures["held"] = sum(getattr(t, "to_local", lambda t=t: t)().nbytes for t in tensors)
    measures["wrote"] = sum(record.size for name, record in records.items() if name.endswith(".safetensors"))
    named = engine.blueprint.named_parameters()
    measures["layer"] = sum(p.nbytes for name, p in named if ".layers.0." in name)
    (folder / f"{size}-{rank}.json").write_text(json.dumps(measures))
    ranks.barrier()
    distributed.leave_group()


def table(folder: Path, size: int) -> bool:
    """Print the rows of one number of ranks; whether all bounds hold."""
    answers = [json.loads((folder / f"{size}-{rank}.json").read_text()) for rank in range(size)]
    total, good = sum(answer["wrote"] for answer in answers), True
    for rank, answer in enumerate(answers):
        weights = answer["held"] / 3
        bounds = {"save": weights + answer["layer"], "load": answer["layer"], "behind": 3 * weights + answer["layer"]}
        bounds = {name: bound for name, bound in bounds.items() if name in answer}
        held = {name: answer[name][0] <= bound + SLACK for name, bound in bounds.items()}
        even = abs(answer["wrote"] / total * size - 1) <= TOLERANCE
        good &= even and all(held.values())
        cells = [f"{answer[name][0] / MEGABYTE:8.1f} {'ok ' if held[name] else 'OVER'}" for name in bounds]
        cells += ["not measured "] * (3 - len(cells))
        print(
            f"{size:>2} {rank:>4} {answer['held'] / MEGABYTE:>9.1f} {answer['layer'] / MEGABYTE:>7.1f}"
            f" {' '.join(cells)}"
            f" {answer['wrote'] / total:>8.2%} {'ok' if even else 'UNEVEN'}"
            f" {answer['save'][1]:>7.2f} {answer['load'][1]:>7.2f}",
            flush=True,
        )
    return good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--alone", action="store_true", help="no save in the background, which holds the state twice")
    parser.add_argument("--folder", help="on the disk that is measured; default: a temporary one")
    options = parser.parse_args()
    from verl.ports import free_port

    # Freed memory goes back at once, so that what is taken next counts; the ranks are new processes and read this.
    os.environ |= {"MALLOC_MMAP_THRESHOLD_": "4096", "MALLOC_MMAP_MAX_": str(1 << 20), "MALLOC_TRIM_THRESHOLD_": "0"}
    good = True
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        make_model(folder / "model", options.layers, options.width)
        print(f"megabytes; extra memory of a save, a load and a save in the background; load {os.getloadavg()[0]:.1f}")
        print(" N rank     shard   layer     save         load       behind        wrote      save s  load s")
        for size in options.ranks:
            port = free_port()
            context = multiprocessing.get_context("spawn")
            own = [
                context.Process(target=rank_main, args=(rank, size, port, folder, options.alone))
                for rank in range(size)
            ]
            for process in own:
                process.start()
            for process in own:
                process.join()
            if any(process.exitcode for process in own):
                raise SystemExit(f"a rank of {size} failed")
            good &= table(folder, size)
    return int(not good)


if __name__ == "__main__":
    sys.exit(main())
