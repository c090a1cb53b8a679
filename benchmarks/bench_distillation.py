"""Fine-tuning with a teacher, compared with TRL's `GKDTrainer`: one optimizer step's loss and gradients on one batch.

    PYTHONPATH=. path/to/venv-with-trl/bin/python benchmarks/bench_distillation.py [--size 10M] [--rounds 5]

One process, one thread, float32, the same two models and the same rows. The peer's side is what its `compute_loss`
does with answers of a file: padded rows through student and teacher, `generalized_jsd_loss` over the trained tokens,
backward. Ours is `Engine.train_batch` with packed rows, its optimizer step included. Rounds alternate; the table has
the medians of CPU-seconds, their ratio, the largest difference of losses, and how much memory grew at most: the first
row tells most, since later steps reuse what the allocator holds.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

from bench_grpo_step import SIZES, make_model
from bench_sft import LONGEST, ROWS, TEMPLATE, lengths
from figures import Figures, add_json, peak_and_seconds

BETAS = (0.5, 0.1, 0.9)


def keep(losses: dict[str, float], name: str, step: Callable[[float], float], beta: float) -> None:
    losses[name] = step(beta)


def drawn_batch(vocabulary: int) -> Any:
    """Rows of prompts and answers of log-normal lengths, padded on the right; what is trained begins at token 16."""
    import torch

    from verl.protocol import DataProto

    draw = random.Random(0)
    sizes = [sum(pair) for pair in zip(lengths(ROWS, draw, 40), lengths(ROWS, draw, 70))]
    width = max(sizes)
    there = torch.tensor([[int(place < size) for place in range(width)] for size in sizes])
    ids = torch.randint(vocabulary, there.shape) * there
    trained = there * (torch.arange(width) >= 16)
    return DataProto.from_dict(
        tensors={
            "input_ids": ids,
            "attention_mask": there,
            "position_ids": (there.cumsum(-1) - 1).clamp(min=0),
            "responses": ids[:, 1:],
            "response_mask": trained[:, 1:],
        }
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="10M", choices=SIZES)
    parser.add_argument("--rounds", type=int, default=5)
    add_json(parser)
    arguments = parser.parse_args()
    import torch
    from transformers import AutoModelForCausalLM
    from trl.experimental.gkd import GKDTrainer

    from verl.algorithms.distillation import DistilledSFTLoss, logits_divergence
    from verl.config import FSDPEngineConfig, HFModelConfig, OptimizerConfig
    from verl.engines.plain import PlainEngine

    torch.set_num_threads(1)
    figures = Figures()
    with tempfile.TemporaryDirectory() as temporary:
        model = make_model(Path(temporary), arguments.size, TEMPLATE, 2 * LONGEST)

        def engine(**more: object) -> PlainEngine:
            section = FSDPEngineConfig(dtype="fp32", model_dtype="fp32")
            return PlainEngine(HFModelConfig(path=str(model)), section, device="cpu", seed=1, **more)

        student = engine(optim=OptimizerConfig(lr=0.0, weight_decay=0.0), total_training_steps=1000)
        teacher = engine()
        theirs, their_teacher = (AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32) for _ in range(2))
        torch.manual_seed(1)
        with torch.no_grad():  # a teacher of other weights, the same on both sides
            for ours, peer in zip(teacher.model.parameters(), their_teacher.parameters()):
                ours += 0.5 * ours.std() * torch.randn_like(ours) if ours.numel() > 1 else 0
                peer.copy_(ours)
        batch = drawn_batch(theirs.config.vocab_size)
        ids, there, trained = (batch.tensors[name] for name in ("input_ids", "attention_mask", "response_mask"))
        labels = torch.where(trained.bool(), ids[:, 1:], -100)

        def peer_step(beta: float) -> float:
            theirs.zero_grad()
            logits = theirs(input_ids=ids, attention_mask=there).logits[:, :-1]
            with torch.no_grad():
                expected = their_teacher(input_ids=ids, attention_mask=there).logits[:, :-1]
            loss = GKDTrainer.generalized_jsd_loss(logits, expected, labels, beta=beta)
            loss.backward()
            return float(loss.detach())

        def our_step(beta: float) -> float:
            student.compare_with(teacher, partial(logits_divergence, kind="jsd", beta=beta))
            return student.train_batch(batch, DistilledSFTLoss(1.0)).values()["loss"]

        print(
            "| beta | loss | ours, CPU-s | TRL, CPU-s | ours / TRL | losses differ by | MiB ours | MiB TRL |\n"
            + "|---" * 8
            + "|"
        )
        for beta in BETAS:
            seconds: dict[str, list[float]] = {"ours": [], "trl": []}
            deviation, memory = 0.0, dict[str, int]()
            for _ in range(arguments.rounds):
                losses: dict[str, float] = {}
                for name, step in (("ours", our_step), ("trl", peer_step)):
                    began = time.process_time()
                    grown, _ = peak_and_seconds(partial(keep, losses, name, step, beta))
                    memory[name] = max(memory.get(name, 0), grown)
                    seconds[name].append(time.process_time() - began)
                deviation = max(deviation, abs(losses["ours"] - losses["trl"]))
            ours, trl = (statistics.median(values) for values in seconds.values())
            mebibytes = [f"{memory[name] / 2**20:.0f}" for name in ("ours", "trl")]
            speeds = f"{ours:.2f} | {trl:.2f} | {ours / trl:.2f}"
            print(
                f"| {beta} | {losses['trl']:.6f} | {speeds} | {deviation:.1e} | {' | '.join(mebibytes)} |", flush=True
            )
            figures.add(f"beta {beta}", {"ours / TRL": ours / trl, "losses differ by": deviation})
    figures.write(arguments.json)


if __name__ == "__main__":
    main()
