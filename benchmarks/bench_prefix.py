"""A training step in which the prompt of a group is computed once, beside the same step without sharing.

    OMP_NUM_THREADS=1 python benchmarks/bench_prefix.py [--prompts 32 128 512] [--samples 8] [--response 32]

Both are the plain engine on packed rows with the same weights and token budget; only ``use_prefix_grouper`` differs.
Tokens are counted by a hook on the first MLP. The ratio of tokens is what sharing can bring.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch
from bench_packing import VOCAB, make_model
from figures import Figures, add_json

from verl.algorithms.losses import SFTLoss
from verl.config import FSDPEngineConfig, HFModelConfig, OptimizerConfig
from verl.engines.plain import PlainEngine
from verl.engines.settings import PassSettings
from verl.protocol import DataProto


def make_batch(groups: int, samples: int, prompt: int, response: int) -> DataProto:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, VOCAB, (groups * samples, prompt + response), generator=generator)
    ids[:, :prompt] = ids[::samples, :prompt].repeat_interleave(samples, 0)
    return DataProto.from_dict(
        tensors={
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "responses": ids[:, prompt:],
            "response_mask": torch.ones(len(ids), response, dtype=torch.long),
        }
    )


def tokens_of_a_step(engine: PlainEngine, batch: DataProto, budget: int) -> int:
    """A step, and how many tokens went through the first MLP."""
    tokens: list[int] = []
    layer = engine.model.model.layers[0].mlp
    handle = layer.register_forward_hook(lambda *call: tokens.append(call[2][..., 0].numel()))
    engine.train_batch(batch, SFTLoss(), max_tokens=budget)
    handle.remove()
    return sum(tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", nargs="+", type=int, default=[32, 128, 512])
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--response", type=int, default=32)
    parser.add_argument("--groups", type=int, default=4)
    parser.add_argument("--budget", type=int, default=1024, help="tokens per micro-batch")
    parser.add_argument("--rounds", type=int, default=5)
    add_json(parser)
    a = parser.parse_args()
    figures = Figures()
    with tempfile.TemporaryDirectory() as folder:
        path = make_model(Path(folder))
        settings = HFModelConfig(path=str(path)), FSDPEngineConfig(), OptimizerConfig(lr=0.0)
        engines = [PlainEngine(*settings, passes=PassSettings(share_prompts=share)) for share in (False, True)]
        print(f"{a.groups} groups of {a.samples} responses of {a.response} tokens, {torch.get_num_threads()} threads")
        print("| prompt | tokens | shared | ratio | s | shared, s | gain | share of the ratio |\n|" + "---|" * 8)
        for prompt in a.prompts:
            batch = make_batch(a.groups, a.samples, prompt, a.response)
            counts = [tokens_of_a_step(engine, batch, max(a.budget, prompt + a.response)) for engine in engines]
            seconds: list[list[float]] = [[], []]
            for _ in range(a.rounds):
                for found, engine in zip(seconds, engines):
                    start = time.process_time()
                    engine.train_batch(batch, SFTLoss(), max_tokens=max(a.budget, prompt + a.response))
                    found.append(time.process_time() - start)
            plain, shared = (statistics.median(found) for found in seconds)
            ratio, gain = counts[0] / counts[1], plain / shared
            figures.add(
                f"prompts of {prompt}",
                {
                    "tokens": counts[0],
                    "tokens, shared": counts[1],
                    "tokens / (prompts + responses)": counts[1] / (a.groups * (prompt + a.samples * a.response)),
                    "ratio of tokens": ratio,
                    "times as fast": gain,
                    "gain / ratio": gain / ratio,
                },
            )
            print(
                f"| {prompt} | {counts[0]} | {counts[1]} | {ratio:.2f} | {plain:.2f} | {shared:.2f} | {gain:.2f} "
                f"| {gain / ratio:.0%} |",
                flush=True,
            )
    figures.write(a.json)


if __name__ == "__main__":
    main()
