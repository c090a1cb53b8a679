"""What one long row takes of each process that shares its tokens: memory beyond weights and optimizer, and seconds.

Run ``python benchmarks/bench_long_context.py [--ranks 1 2 4] [--lengths 16384 32768]``. One optimizer step (supervised
loss, float32, Adam) on one row, in which every token but the first is trained on. The processes share its tokens:
Ulysses on FSDP2 over gloo. Every process is new, takes a step on a short row first, and gives freed memory back at
once, so that a peak is what is held.

Columns: most memory of any process during the step beyond what it held before, the same in parts of one process's,
bytes per token of the row, seconds. It ends with status 1 where a process of P needs more than 1/P of the memory of one
and ``SLACK``.

The model is small, since attention on a CPU takes minutes at 131,072 tokens: ``--layers``, ``--hidden``,
``--head-dim``, ``--vocabulary`` make it another. ``--checkpointing``, ``--tiled-mlp N``, ``--fused-head`` are the
settings of the same names.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from figures import peak_and_seconds

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
MEGABYTE = 1 << 20
SLACK = 0.06
"""In parts of one process's memory: what does not depend on the tokens, and gathered weights."""
SHORT = 256
HEADS = 4


def make_model(folder: Path, options: argparse.Namespace) -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=options.vocabulary, hidden_size=options.hidden, intermediate_size=4 * options.hidden,
        num_hidden_layers=options.layers, num_attention_heads=HEADS, num_key_value_heads=HEADS // 2,
        head_dim=options.head_dim, max_position_embeddings=max(options.lengths), tie_word_embeddings=False,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(folder)


def one_row(length: int, vocabulary: int) -> Any:
    """A row of so many tokens, the first of which is its prompt."""
    import torch

    from verl.protocol import SHARED_ROWS, DataProto

    ids = torch.randint(0, vocabulary, (1, length), generator=torch.Generator().manual_seed(0))
    ones = torch.ones(1, length, dtype=torch.long)
    batch = DataProto.from_dict(
        tensors={
            "prompts": ids[:, :1], "responses": ids[:, 1:], "input_ids": ids, "attention_mask": ones,
            "position_ids": torch.arange(length)[None], "response_mask": ones[:, 1:],
        }
    )  # fmt: skip
    batch.meta_info[SHARED_ROWS] = True  # all processes are handed it
    return batch


def make_engine(folder: Path, size: int, options: argparse.Namespace) -> Any:
    from verl.config import FSDPEngineConfig, HFModelConfig, OptimizerConfig
    from verl.registry import ENGINES

    model = HFModelConfig(
        path=str(folder / "model"),
        enable_gradient_checkpointing=options.checkpointing,
        tiled_mlp={"enabled": options.tiled_mlp > 0, "num_shards": max(1, options.tiled_mlp)},
        use_fused_kernels=options.fused_head,
    )
    engine = FSDPEngineConfig(ulysses_sequence_parallel_size=size)
    return ENGINES.get("fsdp2")(model, engine, OptimizerConfig(), seed=0)


def rank_main(rank: int, size: int, port: int, folder: Path, options: argparse.Namespace) -> None:
    import torch

    from verl import distributed
    from verl.algorithms.losses import SFTLoss

    torch.set_num_threads(1)
    ranks = distributed.join_group(distributed.RankPlace(rank, size, rank, "127.0.0.1", port), timeout=7200)
    engine, results = make_engine(folder, size, options), {}
    engine.train_batch(one_row(SHORT, options.vocabulary), SFTLoss())
    for length in options.lengths:
        batch = one_row(length, options.vocabulary)
        ranks.barrier()
        results[length] = peak_and_seconds(partial(engine.train_batch, batch, SFTLoss(), max_tokens=length // size))
    (folder / f"{size}-{rank}.json").write_text(json.dumps(results))
    ranks.barrier()
    distributed.leave_group()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--lengths", type=int, nargs="+", default=[16384, 32768])
    for name, default in (("layers", 1), ("hidden", 64), ("head-dim", 8), ("vocabulary", 256), ("tiled-mlp", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--fused-head", action="store_true")
    options = parser.parse_args()
    # glibc gives back at once, so that what is taken next counts; the ranks are new processes and read this.
    os.environ |= {"MALLOC_MMAP_THRESHOLD_": "4096", "MALLOC_MMAP_MAX_": str(1 << 20), "MALLOC_TRIM_THRESHOLD_": "0"}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model(folder / "model", options)
        print(f"load {os.getloadavg()[0]:.1f}\n P   tokens      MiB  of one  bytes/token        s", flush=True)
        return int(not run(folder, options))


def run(folder: Path, options: argparse.Namespace) -> bool:
    """Print a row for each size and length; whether memory falls as it should."""
    from verl.ports import free_port

    alone: dict[str, int] = {}
    good = True
    for size in options.ranks:
        port, context = free_port(), multiprocessing.get_context("spawn")
        own = [context.Process(target=rank_main, args=(r, size, port, folder, options)) for r in range(size)]
        for process in own:
            process.start()
        for process in own:
            process.join()
        if any(process.exitcode for process in own):
            raise SystemExit(f"a process of {size} failed")
        answers = [json.loads((folder / f"{size}-{rank}.json").read_text()) for rank in range(size)]
        for length in map(str, options.lengths):
            peak, seconds = (max(answer[length][i] for answer in answers) for i in range(2))
            if size == 1:
                alone[length] = peak
            share = peak / alone[length] if length in alone else float("nan")
            good &= not share > 1 / size + SLACK
            print(
                f"{size:>2} {int(length):>8,} {peak / MEGABYTE:>8.1f} {share:>7.2f}"
                f" {peak / int(length):>12,.0f} {seconds:>8.1f}",
                flush=True,
            )
    return good


if __name__ == "__main__":
    sys.exit(main())
