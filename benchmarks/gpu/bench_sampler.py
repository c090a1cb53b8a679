"""Decoding speed of the `hf` sampler on one GPU, against its physical limit, itself without graphs, and transformers.

    python benchmarks/gpu/bench_sampler.py                 # a Qwen3-0.6B shape with random weights, about two minutes
    python benchmarks/gpu/bench_sampler.py --dry-run       # the same code on CPU with a tiny model, in seconds

The limit of a decoding step is the time to read the weights once and the cache of every row once:
``(weights + rows * context * bytes per token) / bandwidth``. Two fractions are printed, of the device's nominal
bandwidth (``--bandwidth``, TB/s) and of what a copy reaches in this run. Decoding time is the time of a whole job less
that of the same job with one token per response. Needs torch, transformers and this repository; nothing is downloaded.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from verl.models import export_weights
from verl.rollout.base import Completion, Request, SamplingParams
from verl.rollout.hf.sampler import HFSampler
from verl.weight_sync import chunk_weights

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {"family": "qwen3", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 128, "vocab_size": 512},
    "qwen3-0.6b": {"family": "qwen3", "hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16,
                   "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 3072, "vocab_size": 151936},
    "qwen2.5-1.5b": {"family": "qwen2", "hidden_size": 1536, "num_hidden_layers": 28, "num_attention_heads": 12,
                     "num_key_value_heads": 2, "intermediate_size": 8960, "vocab_size": 151936},
}  # fmt: skip


@dataclass
class Setup:
    """What a run works with; a dry run is the same with smaller numbers."""

    device: str
    model: PreTrainedModel
    prompt: int
    new: int
    batches: list[int]
    bandwidth: float
    budget: float
    started: float

    @property
    def weight_bytes(self) -> int:
        """What a step reads: every parameter once (a tied embedding is read as the head)."""
        return sum(p.nbytes for p in self.model.parameters())

    @property
    def token_bytes(self) -> int:
        config = self.model.config
        dim = vars(config).get("head_dim") or config.hidden_size // config.num_attention_heads
        return 2 * config.num_hidden_layers * config.num_key_value_heads * dim * self.model.dtype.itemsize

    def synchronize(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def timed(self, run: Callable[[], object]) -> float:
        self.synchronize()
        start = time.perf_counter()
        run()
        self.synchronize()
        return time.perf_counter() - start

    @property
    def has_time(self) -> bool:
        return time.perf_counter() - self.started < self.budget


def build(shape: str, device: str, max_positions: int) -> PreTrainedModel:
    settings = dict(SHAPES[shape])
    family = settings.pop("family")
    config = AutoConfig.for_model(
        family, **settings, max_position_embeddings=max_positions, tie_word_embeddings=True, eos_token_id=None,
        bos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def jobs(count: int, length: int, new: int, vocab: int, samples: int = 1) -> list[Request]:
    generator = torch.Generator().manual_seed(count)
    prompts = [tuple(torch.randint(0, vocab, (length,), generator=generator).tolist()) for _ in range(count // samples)]
    sampling = SamplingParams(max_tokens=new, ignore_eos=True)
    return [
        Request(f"{i}-{j}", prompt, sampling, uid=str(i), sample_index=j)
        for i, prompt in enumerate(prompts)
        for j in range(samples)
    ]


def sample(sampler: HFSampler, requests: list[Request]) -> list[Completion]:
    async def run() -> list[Completion]:
        return list(await asyncio.gather(*map(sampler.generate, requests)))

    return asyncio.run(run())


def sampler_of(setup: Setup, rows: int, **arguments: Any) -> HFSampler:
    return HFSampler(
        copy.deepcopy(setup.model),
        max_num_seqs=rows,
        max_num_batched_tokens=max(16384, rows),
        max_model_len=setup.prompt + setup.new,
        owns_model=True,
        **{"record": not arguments.get("enforce_eager", False), **arguments},
    )


def limits(setup: Setup) -> dict[str, float]:
    """Bandwidth of a copy (bytes read and written) and of bf16 matrix products."""
    size = 1 << 31 if setup.device == "cuda" else 1 << 24
    source = torch.empty(size, dtype=torch.uint8, device=setup.device)
    target = torch.empty_like(source)
    target.copy_(source)
    copied = min(setup.timed(lambda: target.copy_(source)) for _ in range(5))
    n = 8192 if setup.device == "cuda" else 256
    a = torch.randn(n, n, device=setup.device).bfloat16()
    a @ a
    multiplied = min(setup.timed(lambda: a @ a) for _ in range(5))
    return {"copy TB/s": 2 * size / copied / 1e12, "bf16 TFLOP/s": 2 * n**3 / multiplied / 1e12}


def decoding(setup: Setup, sampler: HFSampler, rows: int, new: int, repeats: int = 2) -> float:
    """Seconds of one decoding step."""
    vocab = sampler.vocab_size
    long, short = jobs(rows, setup.prompt, new, vocab), jobs(rows, setup.prompt, 1, vocab)
    sample(sampler, jobs(rows, setup.prompt, 4, vocab))  # captures graphs
    found = []
    for _ in range(repeats):
        before = setup.timed(lambda: sample(sampler, short))
        found.append((setup.timed(lambda: sample(sampler, long)) - before) / (new - 1))
    return min(found)


def decode_table(setup: Setup, measured: float) -> list[dict[str, float]]:
    print(
        f"{'rows':>6}{'ms/step':>9}{'tok/s':>10}{'limit tok/s':>13}{'of nominal':>12}{'of copy':>9}{'GB':>9}",
        flush=True,
    )
    rows_of_table = []
    for rows in setup.batches:
        if not setup.has_time:
            print(f"{rows:>6}  not run: out of time")
            continue
        forget(setup)
        sampler = sampler_of(setup, rows)
        try:
            seconds = decoding(setup, sampler, rows, setup.new)
        except torch.OutOfMemoryError as error:
            print(f"{rows:>6}  out of memory: {str(error).splitlines()[0]}", flush=True)
            del sampler
            continue
        read = setup.weight_bytes + rows * (setup.prompt + setup.new / 2) * setup.token_bytes
        limit = read / (setup.bandwidth * 1e12)
        row = {
            "rows": rows, "ms": seconds * 1e3, "tokens/s": rows / seconds, "limit tokens/s": rows / limit,
            "of nominal": limit / seconds, "of copy": read / (measured * 1e12) / seconds,
        }  # fmt: skip
        rows_of_table.append(row)
        print(
            f"{rows:>6}{row['ms']:>9.2f}{row['tokens/s']:>10.0f}{row['limit tokens/s']:>13.0f}"
            f"{row['of nominal']:>12.1%}{row['of copy']:>9.1%}{peak(setup):>9.1f}",
            flush=True,
        )
        del sampler
    return rows_of_table


def peak(setup: Setup) -> float:
    """Most memory that tensors took since `forget`, in GB."""
    return torch.cuda.max_memory_allocated() / 1e9 if setup.device == "cuda" else 0.0


def forget(setup: Setup) -> None:
    """Free what the last sampler held: its rows and blocks refer to each other."""
    gc.collect()
    if setup.device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def rounded_table(setup: Setup) -> list[dict[str, Any]]:
    """Steps with weights in 8 bits, which each product restores."""
    rows_of_table = []
    for rows in sorted({1, min(64, max(setup.batches))}):
        for kind in (None, "int8", "fp8"):
            if not setup.has_time:
                print(f"{kind}, {rows} rows: not run: out of time")
                continue
            forget(setup)
            sampler, new = sampler_of(setup, rows, quantization=kind), min(setup.new, 128)
            seconds, held = decoding(setup, sampler, rows, new), sampler.stats()["weight_bytes"]
            rows_of_table.append({"rows": rows, "weights": kind or "bf16", "ms": seconds * 1e3, "MB": held / 1e6})
            print(f"{kind or 'bf16'}, {rows} rows: {seconds * 1e3:.2f} ms a step, {held / 1e6:.0f} MB", flush=True)
            del sampler
    return rows_of_table


def graphs_table(setup: Setup) -> list[dict[str, float]]:
    """Steps with and without graphs, and what capturing costs."""
    found = []
    for rows in (1, 8):
        if not setup.has_time:
            print(f"graphs, {rows} rows: not run: out of time")
            continue
        new = min(setup.new, 128)
        with_graphs, eager = sampler_of(setup, rows), sampler_of(setup, rows, enforce_eager=True)
        first = setup.timed(lambda: sample(with_graphs, jobs(rows, setup.prompt, 4, with_graphs.vocab_size)))  # noqa: B023
        again = setup.timed(lambda: sample(with_graphs, jobs(rows, setup.prompt, 4, with_graphs.vocab_size)))  # noqa: B023
        on, off = decoding(setup, with_graphs, rows, new), decoding(setup, eager, rows, new)
        found.append({"rows": rows, "graphs ms": on * 1e3, "eager ms": off * 1e3, "capture s": first - again})
        print(f"graphs, {rows} rows: {on * 1e3:.2f} ms a step, eager {off * 1e3:.2f} ms: {off / on:.2f} x; "
              f"first use {first - again:.2f} s", flush=True)  # fmt: skip
    return found


def peer(setup: Setup) -> dict[str, float]:
    """The same job (prompts of one length, all rows to the end) by ``transformers.generate``, interleaved."""
    rows, new = min(64, setup.batches[-1]), min(setup.new, 64)
    sampler = sampler_of(setup, rows)
    requests = jobs(rows, setup.prompt, new, sampler.vocab_size)
    ids = torch.tensor([r.token_ids for r in requests], device=setup.device)

    def generate() -> None:
        with torch.inference_mode():
            setup.model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=True, top_k=0, max_new_tokens=new, pad_token_id=0
            )

    sample(sampler, requests)
    generate()
    pairs = [(setup.timed(lambda: sample(sampler, requests)), setup.timed(generate)) for _ in range(3)]
    ours, theirs = (statistics.median(p[side] for p in pairs) for side in (0, 1))
    print(f"{rows} rows x {new} tokens after {setup.prompt}: hf {rows * new / ours:.0f} tok/s, transformers.generate "
          f"{rows * new / theirs:.0f} tok/s: {theirs / ours:.2f} x", flush=True)  # fmt: skip
    return {"rows": rows, "hf s": ours, "generate s": theirs}


def exactness(setup: Setup) -> dict[str, float]:
    """Reported log-probs against one forward pass of the model's own modules."""
    sampler = sampler_of(setup, 8)
    requests = jobs(8, setup.prompt, min(32, setup.new), sampler.vocab_size, samples=4)
    errors = []
    for request, completion in zip(requests, sample(sampler, requests)):
        ids = torch.tensor([[*request.token_ids, *completion.token_ids]], device=setup.device)
        with torch.inference_mode():
            logits = setup.model(input_ids=ids, use_cache=False).logits[0, len(request.token_ids) - 1 : -1].float()
        expected = logits.log_softmax(-1).gather(-1, ids[0, len(request.token_ids) :, None])[:, 0].cpu()
        errors.append((expected - torch.tensor(completion.log_probs)).abs())
    error = torch.cat(errors)
    print(f"log-probs against the model's own forward pass (bf16): mean {error.mean():.1e}, max {error.max():.1e}; "
          f"prompts of 4 samples computed once: {sampler.stats()['prefill_tokens']:.0f} tokens "
          f"for {sum(len(r.token_ids) for r in requests)}", flush=True)  # fmt: skip
    return {"mean": error.mean().item(), "max": error.max().item()}


def sync(setup: Setup, copy_rate: float) -> dict[str, float]:
    """New weights into the sampler on the same device, against a plain copy."""
    sampler = sampler_of(setup, 1)
    version = iter(range(1, 100))

    def update() -> None:
        number = next(version)
        stream = chunk_weights(export_weights(setup.model), 512 << 20, number)
        asyncio.run(sampler.update_weights(stream, number))

    update()
    seconds = min(setup.timed(update) for _ in range(3))
    rate = 2 * setup.weight_bytes / seconds / 1e12
    print(f"weight update, same device: {setup.weight_bytes / 1e9:.2f} GB in {seconds * 1e3:.1f} ms, "
          f"{rate / copy_rate:.0%} of a copy", flush=True)  # fmt: skip
    return {"seconds": seconds, "of copy": rate / copy_rate}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--model", default="qwen3-0.6b", choices=sorted(SHAPES))
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--new", type=int, default=512)
    parser.add_argument("--batches", type=int, nargs="*", default=[64, 256, 1])
    parser.add_argument(
        "--bandwidth", type=float, default=4.8, help="TB/s of the device, nominal (H200: 4.8, H100: 3.35)"
    )
    parser.add_argument("--budget", type=float, default=170, help="seconds after which further parts are left out")
    parser.add_argument("--json", help="write the numbers there too")
    args = parser.parse_args()
    started, device = time.perf_counter(), "cpu" if args.dry_run else "cuda"
    if args.dry_run:
        torch.set_num_threads(1)
        args.model, args.prompt, args.new, args.batches = "tiny", 70, 12, [4, 1]
    model = build(args.model, device, args.prompt + args.new)
    setup = Setup(device, model, args.prompt, args.new, args.batches, args.bandwidth, args.budget, started)
    name = torch.cuda.get_device_name() if device == "cuda" else "cpu (dry run: the numbers mean nothing)"
    print(f"{args.model}, {setup.weight_bytes / 2e6:.1f}M parameters, bf16, {name}, torch {torch.__version__}")
    result: dict[str, Any] = {"device": name, "model": args.model, "torch": torch.__version__}
    result["limits"] = limits(setup)
    print(", ".join(f"{name} {value:.3g}" for name, value in result["limits"].items()), flush=True)
    copy_rate = result["limits"]["copy TB/s"]
    parts: dict[str, Callable[[], object]] = {
        "exactness": lambda: exactness(setup),
        "decode": lambda: decode_table(setup, copy_rate),
        "graphs": lambda: graphs_table(setup),
        "rounded": lambda: rounded_table(setup),
        "sync": lambda: sync(setup, copy_rate),
        "peer": lambda: peer(setup),
    }
    for part, run in parts.items():
        if setup.has_time:
            result[part] = run()
        else:
            print(f"{part}: not run: out of time")
    print(f"{time.perf_counter() - started:.0f} s in all")
    if args.json:
        Path(args.json).write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
