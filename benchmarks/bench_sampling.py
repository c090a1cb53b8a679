"""Sampling speed of the `hf` engine against ``transformers.generate``, interleaved in one run, one thread.

Three jobs on a Qwen2 model of about 10M parameters with random weights: distinct prompts of equal length, the same as
groups of 8 samples per prompt, and response lengths with a long tail (log-normal, sigma 1, 8 to 256 tokens). Both sides
draw with temperature 1, ignore end-of-sequence tokens and run in the same dtype; `generate` runs a batch to its longest
response, as it must, and only the wanted tokens are counted. Prints tokens per wall and per CPU second, the ratio, and
the time that the matrix products alone would take.

    python benchmarks/bench_sampling.py [--dtype float32] [--rounds 3] [--jobs distinct shared tail]
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen2Config

from verl.rollout.base import Request, SamplingParams
from verl.rollout.hf.sampler import HFSampler

PROMPT_TOKENS, NEW_TOKENS, ROWS = 32, 64, 128


@dataclass(frozen=True)
class Job:
    """Rows of (prompt, wanted response tokens)."""

    name: str
    prompts: list[tuple[int, ...]]
    lengths: list[int]

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)


def jobs(vocab: int) -> list[Job]:
    rng = np.random.default_rng(0)
    distinct = [tuple(rng.integers(3, vocab, PROMPT_TOKENS).tolist()) for _ in range(ROWS)]
    shared = [prompt for prompt in distinct[: ROWS // 8] for _ in range(8)]
    tail = np.clip(np.exp(rng.normal(np.log(32), 1, ROWS)), 8, 256).astype(int).tolist()
    equal = [NEW_TOKENS] * ROWS
    return [
        Job("distinct", distinct, equal),
        Job("shared", shared, equal),
        Job("tail", distinct, tail),
        Job("tail, shared", shared, tail),
    ]


def model_of(dtype: torch.dtype, hidden: int, layers: int, vocab: int) -> PreTrainedModel:
    torch.manual_seed(0)
    config = Qwen2Config(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        num_key_value_heads=hidden // 64,
        intermediate_size=4 * hidden,
        vocab_size=vocab,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        eos_token_id=None,
        bos_token_id=None,
    )
    return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def ours(sampler: HFSampler, job: Job) -> int:
    requests = [
        Request(str(i), prompt, SamplingParams(max_tokens=length, ignore_eos=True), uid=str(i))
        for i, (prompt, length) in enumerate(zip(job.prompts, job.lengths))
    ]

    async def run() -> int:
        return sum(len(c.token_ids) for c in await asyncio.gather(*map(sampler.generate, requests)))

    return asyncio.run(run())


def generate(model: PreTrainedModel, job: Job) -> int:
    ids = torch.tensor(job.prompts)
    with torch.inference_mode():
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            top_k=0,
            max_new_tokens=max(job.lengths),
            pad_token_id=0,
        )
    return job.num_tokens


def timed(run: Callable[[], int]) -> tuple[int, float, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    tokens = run()
    return tokens, time.perf_counter() - wall, time.process_time() - cpu


def gemm_seconds(model: PreTrainedModel, job: Job) -> float:
    """What the weight matrices alone cost: tokens of the job times the measured time of one token in a batch."""
    total = 0.0
    with torch.inference_mode():
        for module in model.modules():
            if isinstance(module, torch.nn.Linear):
                x = torch.randn(ROWS, module.in_features, dtype=module.weight.dtype)
                module(x)
                start = time.process_time()
                for _ in range(5):
                    module(x)
                total += (time.process_time() - start) / 5 / ROWS
    forward = sum(len(p) for p in set(job.prompts)) + job.num_tokens - len(job.prompts)
    return total * forward


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--jobs", nargs="*")
    parser.add_argument("--hidden", type=int, default=320)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--vocab", type=int, default=4096)
    args = parser.parse_args()
    torch.set_num_threads(1)
    model = model_of(getattr(torch, args.dtype), args.hidden, args.layers, args.vocab)
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f}M parameters, {args.dtype}, 1 thread, {ROWS} rows")
    print(f"{'job':14}{'hf tok/s':>10}{'per CPU-s':>11}{'generate':>10}{'per CPU-s':>11}{'ratio':>7}{'GEMM limit':>12}")
    sampler = HFSampler(copy.deepcopy(model), owns_model=True)
    for job in jobs(args.vocab):
        if args.jobs and job.name not in args.jobs:
            continue
        ours(sampler, job)
        results = [(timed(lambda: ours(sampler, job)), timed(lambda: generate(model, job))) for _ in range(args.rounds)]  # noqa: B023
        wall = [job.num_tokens / statistics.median(r[side][1] for r in results) for side in (0, 1)]
        cpu = [job.num_tokens / statistics.median(r[side][2] for r in results) for side in (0, 1)]
        ratio = statistics.median(r[1][2] / r[0][2] for r in results)
        limit = job.num_tokens / gemm_seconds(model, job)
        print(
            f"{job.name:14}{wall[0]:10.0f}{cpu[0]:11.0f}{wall[1]:10.0f}{cpu[1]:11.0f}{ratio:7.2f}{limit:12.0f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
