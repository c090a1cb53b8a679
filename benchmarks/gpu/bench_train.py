"""Share of the device's bf16 peak that a training step of a 1.5B model reaches, packed, on one GPU.

    python benchmarks/gpu/bench_train.py [--tokens 65536] [--lengths 4096 lognormal] [--fused none torch triton]

The model has the shape of Qwen2.5-1.5B and random weights, which are made on the spot; the loss is PPO's over every
response token, with AdamW on float32 weights under bf16 autocast, as a run has it. In the same process a large matrix
product says what the device gives at best here. One JSON line per cell; ``--tiny`` runs the same code on a CPU.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from verl import device as devices
from verl.algorithms.losses import PPOPolicyLoss
from verl.config import ActorConfig, FSDPEngineConfig, HFModelConfig, OptimizerConfig, replace
from verl.engines.plain import PlainEngine
from verl.models.flops import device_peak_flops
from verl.protocol import DataProto

SHAPE = {
    "vocab_size": 151_936, "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28,
    "num_attention_heads": 12, "num_key_value_heads": 2, "max_position_embeddings": 32_768, "tie_word_embeddings": True,
}  # fmt: skip
TINY = SHAPE | {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
PROMPT = 512


def make_model(folder: str, shape: dict, device: str) -> str:
    torch.manual_seed(0)
    with torch.device(device):
        model = Qwen2ForCausalLM(Qwen2Config(**shape)).to(torch.bfloat16)
    model.save_pretrained(folder)
    return folder


def make_batch(kind: str, tokens: int, vocab: int, longest: int) -> DataProto:
    """Rows that together have about ``tokens`` tokens: all of one length, or log-normal around a quarter of it."""
    generator = np.random.default_rng(0)
    lengths: list[int] = []
    while sum(lengths) < tokens:
        drawn = int(kind) if kind.isdigit() else int(np.exp(generator.normal(np.log(longest / 4), 0.8)))
        lengths.append(min(max(drawn, PROMPT + 16 if longest > PROMPT else 16), longest))
    width, prompt = max(lengths), min(PROMPT, min(lengths) // 2)
    real = torch.from_numpy(np.arange(width) < np.array(lengths)[:, None]).long()
    ids = torch.from_numpy(generator.integers(3, vocab, (len(lengths), width))) * real
    mask = real[:, prompt:]
    zeros = torch.zeros(mask.shape)
    return DataProto.from_dict(
        tensors={
            "input_ids": ids,
            "attention_mask": real,
            "responses": ids[:, prompt:],
            "response_mask": mask,
            "advantages": torch.randn(mask.shape, generator=torch.Generator().manual_seed(0)) * mask,
            "old_log_probs": zeros - 11.9 * mask,
        }
    )


def ceiling(device: str) -> float:
    """Operations per second of one large bf16 matrix product, measured."""
    size = 8192 if device == "cuda" else 512
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    for _ in range(3):
        a @ b
    wait(device)
    start = time.perf_counter()
    for _ in range(10):
        a @ b
    wait(device)
    return 10 * 2 * size**3 / (time.perf_counter() - start)


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def measure(engine: PlainEngine, loss: PPOPolicyLoss, batch: DataProto, budget: int, rounds: int) -> dict:
    lengths = batch.tensors["attention_mask"].sum(-1).tolist()
    seconds = []
    for _ in range(rounds + 1):  # the first warms up
        wait(engine.device)
        start = time.perf_counter()
        metrics = engine.train_batch(batch, loss, max_tokens=budget).values()
        wait(engine.device)
        seconds.append(time.perf_counter() - start)
    assert np.isfinite(metrics["grad_norm"]), metrics
    best = statistics.median(seconds[1:])
    return {
        "rows": len(lengths),
        "tokens": sum(lengths),
        "seconds": round(best, 3),
        "tokens_per_second": round(sum(lengths) / best),
        "tflops": round(engine.train_flops(lengths) / best / 1e12, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=65_536, help="per optimizer step")
    parser.add_argument("--budget", type=int, default=16_384, help="per micro-batch")
    parser.add_argument("--longest", type=int, default=4096)
    parser.add_argument("--lengths", nargs="+", default=["4096", "lognormal"])
    parser.add_argument("--fused", nargs="+", default=["none", "torch", "triton"])
    parser.add_argument("--checkpointing", nargs="+", default=["true", "false"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tiny", action="store_true", help="a few seconds on a CPU, to see that it runs")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shape = TINY if args.tiny else SHAPE
    if args.tiny:
        args.tokens, args.budget, args.longest, args.lengths = 512, 256, 64, ["64", "lognormal"]
        args.fused = [name for name in args.fused if name != "triton"]
    best, peak = ceiling(device), device_peak_flops(devices.device_name(device))
    print(json.dumps({"device": devices.device_name(device), "matmul_tflops": round(best / 1e12, 1)}), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        path = make_model(str(Path(folder, "model")), shape, device)
        for fused, again in itertools.product(args.fused, args.checkpointing):
            model = replace(
                HFModelConfig(path=path),
                use_fused_kernels=fused != "none",
                enable_gradient_checkpointing=again == "true",
                **({} if fused == "none" else {"fused_kernel_options.impl_backend": fused}),
            )
            engine = PlainEngine(model, FSDPEngineConfig(), OptimizerConfig(lr=1e-6), device=device)
            loss = PPOPolicyLoss(ActorConfig(strategy="plain"), response_length=args.longest)
            for kind in args.lengths:
                if device == "cuda":
                    torch.cuda.reset_peak_memory_stats()
                batch = make_batch(kind, args.tokens, shape["vocab_size"], args.longest)
                cell = {"fused": fused, "checkpointing": again, "lengths": kind}
                try:
                    cell |= measure(engine, loss, batch, args.budget, args.rounds)
                except torch.cuda.OutOfMemoryError as error:
                    cell["out_of_memory"] = str(error).splitlines()[0]
                if "tflops" in cell:
                    cell["of_matmul"] = round(cell["tflops"] * 1e12 / best, 3)
                    cell |= {"mfu": round(cell["tflops"] * 1e12 / peak, 3)} if peak else {}
                if device == "cuda":
                    cell["memory_gb"] = round(torch.cuda.max_memory_allocated() / 1e9, 1)
                print(json.dumps(cell), flush=True)
            del engine
            if device == "cuda":
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
