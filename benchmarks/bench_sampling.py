"""Sampling speed of the `hf` engine against ``transformers.generate``, interleaved in one run.

Jobs on a Qwen2 model of about 10M parameters with random weights, or on ``--model FOLDER``, with ``OMP_NUM_THREADS``
threads, or one: distinct prompts of equal length, the same as
groups of 8 samples per prompt, and response lengths with a long tail (log-normal, sigma 1, 8 to 256 tokens). Both sides
draw with temperature 1, ignore end-of-sequence tokens and run in the same dtype; `generate` runs a batch to its longest
response, as it must, and only the wanted tokens are counted. Prints tokens per wall and per CPU second, the ratio, and
the tokens that the matrix products alone, and reading weights and keys alone, would allow. ``--prefill`` compares 16
samples of a prompt with 16 prompts, in tokens that the model computed and in time; ``--peak`` runs the first job once
more and tells how much memory each side adds to the model's. Every side has a process of its own. With
``--vllm-python`` (``make test-vllm`` makes that environment) vLLM does the same jobs in turn; its log-probs are asked
for as they are in training.

    python benchmarks/bench_sampling.py [--dtype float32] [--rounds 3] [--jobs distinct shared tail] \\
        [--model FOLDER] [--vllm-python .venv-vllm/bin/python]
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from figures import Figures, add_json, linear_seconds, machine_limits, peak_mib
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen2Config

from verl.rollout.base import Request, SamplingParams
from verl.rollout.hf.sampler import HFSampler

PROMPT_TOKENS, NEW_TOKENS, ROWS = 32, 64, 128

VLLM = """
import json, sys, time
from vllm import LLM, SamplingParams
llm = LLM(model=sys.argv[1], dtype=sys.argv[2], enforce_eager=True, max_num_seqs=256, max_model_len=512,
          max_num_batched_tokens=8192, skip_tokenizer_init=True, disable_log_stats=True)

def run(prompts, lengths):
    llm.reset_prefix_cache()
    how = dict(temperature=1.0, ignore_eos=True, logprobs=0, detokenize=False)
    params = [SamplingParams(max_tokens=n, **how) for n in lengths]
    wall, cpu = time.perf_counter(), time.process_time()
    done = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    return sum(len(d.outputs[0].token_ids) for d in done), time.perf_counter() - wall, time.process_time() - cpu
"""

GENERATE = """
import json, os, sys, time, torch
from transformers import AutoModelForCausalLM
torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=sys.argv[2]).eval()

@torch.inference_mode()
def run(prompts, lengths):
    wall, cpu = time.perf_counter(), time.process_time()
    ids = torch.tensor(prompts)
    model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=True, top_k=0, max_new_tokens=max(lengths),
                   pad_token_id=0)
    return sum(lengths), time.perf_counter() - wall, time.process_time() - cpu
"""

SERVE = """
print("READY", flush=True)
for line in sys.stdin:
    print("DONE " + json.dumps(run(*json.loads(line))), flush=True)
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


class Peer:
    """A peer in a process of its own, as it comes, one job at a time."""

    def __init__(self, python: str, script: str, folder: str, dtype: str):
        quiet = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR",
                 "VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1"}  # fmt: skip
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | quiet
        self._child = subprocess.Popen(
            [python, "-c", script + SERVE, folder, dtype],
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
        raise SystemExit("a peer's process ended")


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


def model_of(dtype: torch.dtype, folder: str | None, hidden: int, layers: int, vocab: int) -> PreTrainedModel:
    """The folder's model, or one with random weights."""
    if folder:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
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


def limits(model: PreTrainedModel, job: Job) -> tuple[float, float]:
    """Tokens per second if matrix products were all, and if reading weights, keys and values from memory were all."""
    forward = sum(len(p) for p in set(job.prompts)) + job.num_tokens - len(job.prompts)
    gemm = linear_seconds(model, ROWS) * forward
    config, item = model.config, next(model.parameters()).element_size()
    per_token = 2 * config.num_hidden_layers * config.num_key_value_heads * config.hidden_size
    per_token = per_token // config.num_attention_heads * item
    seen = sum((n - 1) * len(p) + n * (n - 1) // 2 for p, n in zip(job.prompts, job.lengths))
    weights = sum(p.nbytes for p in model.parameters()) * max(job.lengths)
    bandwidth = machine_limits()["copy GB/s"] * 1e9
    return job.num_tokens / gemm, job.num_tokens / ((weights + seen * per_token) / bandwidth)


def prefill(model: PreTrainedModel, vocab: int, rounds: int) -> dict[str, float | str]:
    """Sixteen samples of each of 8 prompts of 256 tokens, prompts computed once, beside each for itself."""
    rng = np.random.default_rng(1)
    prompts = [tuple(rng.integers(3, vocab, 256).tolist()) for _ in range(8)]
    job = Job("prefill", [p for p in prompts for _ in range(16)], [1] * ROWS)
    samplers = {share: HFSampler(copy.deepcopy(model), owns_model=True, share_prompts=share) for share in (True, False)}
    seconds: dict[bool, list[float]] = {True: [], False: []}
    tokens = {}
    for number in range(rounds + 1):
        for share, sampler in samplers.items():
            before = sampler.stats()["prefill_tokens"]
            taken = timed(lambda: ours(sampler, job))[2]  # noqa: B023
            tokens[share] = sampler.stats()["prefill_tokens"] - before
            if number:
                seconds[share].append(taken)
    shared, each = (statistics.median(seconds[share]) for share in (True, False))
    return {
        "tokens computed": tokens[True],
        "without sharing": tokens[False],
        "16 x tokens / unshared": 16 * tokens[True] / tokens[False],
        "CPU s": shared,
        "without sharing, CPU s": each,
        "16 x time / unshared": 16 * shared / each,
    }


def peaks(words: list[str], job: str) -> dict[str, float | str]:
    """MiB that a run of a job adds to a process that holds the model, ours and `generate`'s."""
    found: dict[str, float | str] = {}
    for side in ("hf", "generate"):
        command = [sys.executable, __file__, *words, "--jobs", job, "--peak-of", side]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        found[f"{side}, peak MiB"] = float(done.stdout.splitlines()[-1])
    return found


def print_peak(model: PreTrainedModel, job: Job, side: str) -> None:
    held = peak_mib()
    if side == "hf":
        ours(HFSampler(model, owns_model=True), job)
    else:
        generate(model, job)
    print(peak_mib() - held)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--jobs", nargs="*")
    parser.add_argument("--model", help="folder of a model to take")
    parser.add_argument("--hidden", type=int, default=320)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--vocab", type=int, default=4096)
    parser.add_argument("--vllm-python", help="python of an environment with vLLM")
    parser.add_argument("--prefill", action="store_true")
    parser.add_argument("--peak", action="store_true")
    parser.add_argument("--peak-of", choices=("hf", "generate"), help="used by the script itself")
    add_json(parser)
    args = parser.parse_args()
    threads = int(os.environ["OMP_NUM_THREADS"])
    torch.set_num_threads(threads)
    model = model_of(getattr(torch, args.dtype), args.model, args.hidden, args.layers, args.vocab)
    args.vocab = model.config.vocab_size
    chosen = [job for job in jobs(args.vocab) if not args.jobs or job.name in args.jobs]
    if args.peak_of:
        print_peak(model, chosen[0], args.peak_of)
        return
    figures = Figures()
    millions = sum(p.numel() for p in model.parameters()) / 1e6
    print(f"{millions:.2f}M parameters, {args.dtype}, {threads} threads, {ROWS} rows")
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        peers = {"generate": Peer(sys.executable, GENERATE, folder, args.dtype)}
        if args.vllm_python:
            peers["vllm"] = Peer(args.vllm_python, VLLM, folder, args.dtype)
        compare(model, chosen, {name: peer.run for name, peer in peers.items()}, args.rounds, figures)
        for peer in peers.values():
            peer.close()
    if args.prefill:
        figures.add("prefill", prefill(model, args.vocab, args.rounds))
        print(figures.rows[-1])
    if args.peak:
        named = {name: vars(args)[name] for name in ("dtype", "hidden", "layers", "vocab", "model")}
        words = [f"--{name}={value}" for name, value in named.items() if value is not None]
        figures.add("peak memory", peaks(words, chosen[0].name))
        print(figures.rows[-1])
    figures.write(args.json)


def compare(
    model: PreTrainedModel,
    chosen: list[Job],
    peers: dict[str, Callable[[Job], tuple[int, float, float]]],
    rounds: int,
    figures: Figures,
) -> None:
    """A line per job: ours, then each peer with ours over it, in CPU time."""
    heads = "".join(f"{name:>10}{'per CPU-s':>11}{'ratio':>7}" for name in peers)
    print(f"{'job':14}{'hf tok/s':>10}{'per CPU-s':>11}{heads}{'GEMM limit':>12}{'memory limit':>14}")
    sampler = HFSampler(copy.deepcopy(model), owns_model=True)
    for job in chosen:
        runs = {"hf": lambda job: timed(lambda: ours(sampler, job)), **peers}
        for run in runs.values():
            run(job)
        results = [{name: run(job) for name, run in runs.items()} for _ in range(rounds)]
        line = f"{job.name:14}"
        found: dict[str, float | str] = {}
        for name in runs:
            wall, cpu = (job.num_tokens / statistics.median(r[name][which] for r in results) for which in (1, 2))
            line += f"{wall:10.0f}{cpu:11.0f}"
            found |= {f"{name}, tokens/s": wall, f"{name}, tokens per CPU-s": cpu}
            if name in peers:
                found[f"hf / {name}"] = ratio = statistics.median(r[name][2] / r["hf"][2] for r in results)
                line += f"{ratio:7.2f}"
        found["limit of products"], found["limit of memory"] = products, memory = limits(model, job)
        figures.add(job.name, found)
        print(f"{line}{products:12.0f}{memory:14.0f}", flush=True)


if __name__ == "__main__":
    main()
