"""Sampling speed of the `hf` engine against ``transformers.generate``, interleaved in one run, one thread.

Three jobs on a Qwen2 model of about 10M parameters with random weights: distinct prompts of equal length, the same as
groups of 8 samples per prompt, and response lengths with a long tail (log-normal, sigma 1, 8 to 256 tokens). Both sides
draw with temperature 1, ignore end-of-sequence tokens and run in the same dtype; `generate` runs a batch to its longest
response, as it must, and only the wanted tokens are counted. Prints tokens per wall and per CPU second, the ratio, and
the time that the matrix products alone would take. With ``--vllm-python`` (``make test-vllm`` makes that environment)
vLLM does the same jobs in turn, in a process of its own; its log-probs are asked for as they are in training.

    python benchmarks/bench_sampling.py [--dtype float32] [--rounds 3] [--jobs distinct shared tail] \\
        [--vllm-python .venv-vllm/bin/python]
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import json
import os
import statistics
import subprocess
import tempfile
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

VLLM = """
import json, sys, time
from vllm import LLM, SamplingParams
llm = LLM(model=sys.argv[1], dtype=sys.argv[2], enforce_eager=True, max_num_seqs=256, max_model_len=512,
          max_num_batched_tokens=8192, skip_tokenizer_init=True, disable_log_stats=True)
print("READY", flush=True)
for line in sys.stdin:
    prompts, lengths = json.loads(line)
    llm.reset_prefix_cache()
    how = dict(temperature=1.0, ignore_eos=True, logprobs=0, detokenize=False)
    params = [SamplingParams(max_tokens=n, **how) for n in lengths]
    wall, cpu = time.perf_counter(), time.process_time()
    done = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    print("DONE " + json.dumps([sum(len(d.outputs[0].token_ids) for d in done), wall, cpu]), flush=True)
"""


@dataclass(frozen=True)
class Job:
    """Rows of (prompt, wanted response tokens)."""

    name: str
    prompts: list[tuple[int, ...]]
    lengths: list[int]

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)


class VLLMProcess:
    """vLLM in its own environment, one job at a time."""

    def __init__(self, python: str, model: PreTrainedModel, folder: str, dtype: str):
        model.save_pretrained(folder)
        quiet = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR",
                 "VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1"}  # fmt: skip
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | quiet
        self._child = subprocess.Popen(
            [python, "-c", VLLM, folder, dtype],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self._answer("READY")

    def run(self, job: Job) -> tuple[int, float, float]:
        """Tokens, wall and CPU seconds."""
        assert self._child.stdin is not None
        self._child.stdin.write(json.dumps([job.prompts, job.lengths]) + "\n")
        self._child.stdin.flush()
        tokens, wall, cpu = json.loads(self._answer("DONE "))
        return tokens, wall, cpu

    def close(self) -> None:
        assert self._child.stdin is not None
        self._child.stdin.close()
        self._child.wait(60)

    def _answer(self, mark: str) -> str:
        assert self._child.stdout is not None
        for line in self._child.stdout:
            if line.startswith(mark):
                return line.removeprefix(mark)
        raise SystemExit("vLLM's process ended")


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
    parser.add_argument("--vllm-python", help="python of an environment with vLLM")
    args = parser.parse_args()
    torch.set_num_threads(1)
    model = model_of(getattr(torch, args.dtype), args.hidden, args.layers, args.vocab)
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f}M parameters, {args.dtype}, 1 thread, {ROWS} rows")
    with tempfile.TemporaryDirectory() as folder:
        peers: dict[str, Callable[[Job], tuple[int, float, float]]] = {
            "generate": lambda job: timed(lambda: generate(model, job))
        }
        if args.vllm_python:
            vllm = VLLMProcess(args.vllm_python, model, folder, args.dtype)
            peers["vllm"] = vllm.run
        compare(model, [job for job in jobs(args.vocab) if not args.jobs or job.name in args.jobs], peers, args.rounds)
        if args.vllm_python:
            vllm.close()


def compare(
    model: PreTrainedModel, chosen: list[Job], peers: dict[str, Callable[[Job], tuple[int, float, float]]], rounds: int
) -> None:
    """A line per job: ours, then each peer with ours over it, in CPU time."""
    heads = "".join(f"{name:>10}{'per CPU-s':>11}{'ratio':>7}" for name in peers)
    print(f"{'job':14}{'hf tok/s':>10}{'per CPU-s':>11}{heads}{'GEMM limit':>12}")
    sampler = HFSampler(copy.deepcopy(model), owns_model=True)
    for job in chosen:
        runs = {"hf": lambda job: timed(lambda: ours(sampler, job)), **peers}
        for run in runs.values():
            run(job)
        results = [{name: run(job) for name, run in runs.items()} for _ in range(rounds)]
        line = f"{job.name:14}"
        for name in runs:
            wall, cpu = (job.num_tokens / statistics.median(r[name][which] for r in results) for which in (1, 2))
            line += f"{wall:10.0f}{cpu:11.0f}"
            if name in peers:
                line += f"{statistics.median(r[name][2] / r['hf'][2] for r in results):7.2f}"
        print(f"{line}{job.num_tokens / gemm_seconds(model, job):12.0f}", flush=True)


if __name__ == "__main__":
    main()
