"""A training step on packed rows beside the same step on padded ones, for log-normal lengths.

    OMP_NUM_THREADS=1 python benchmarks/bench_packing.py [--megatron] [--sigmas 0.3 0.6 0.9] [--rounds 3] [--rows 64]

Both are the plain engine with the same weights, rows and micro-batches (8 rows each, in the order of the batch); only
``use_remove_padding`` differs. The bound is padded tokens / real tokens: what a step would gain if its time went into
tokens alone. A share above 100 % is possible, because attention over padding costs more than its tokens. The last
column is our own padded layout as a run would use it, which sorts rows by length before it pads them. ``--megatron``
takes Megatron-Core's layers in one process, its CUDA calls answered by the stand-ins of the tests.
"""

from __future__ import annotations

import argparse
import importlib
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from figures import Figures, add_json
from transformers import Qwen2Config, Qwen2ForCausalLM

from verl.algorithms.losses import SFTLoss
from verl.config import FSDPEngineConfig, HFModelConfig, OptimizerConfig
from verl.config.schema.role import MegatronEngineConfig
from verl.engines.plain import PlainEngine
from verl.engines.rows import AlignedRows
from verl.engines.settings import PassSettings
from verl.models.config import quiet_transformers
from verl.protocol import DataProto

PROMPT, MEDIAN, LONGEST, VOCAB, ROWS_EACH = 16, 96, 1024, 512, 8


def make_model(folder: Path) -> Path:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCAB, hidden_size=320, num_hidden_layers=4, num_attention_heads=10, num_key_value_heads=5,
        intermediate_size=864, max_position_embeddings=2 * LONGEST, tie_word_embeddings=True,
    )  # fmt: skip
    with quiet_transformers():
        Qwen2ForCausalLM(config).save_pretrained(folder)
    return folder


def make_batch(rows: int, sigma: float, seed: int = 0) -> DataProto:
    """Prompts of equal length, responses whose lengths are log-normal around `MEDIAN`."""
    generator = np.random.default_rng(seed)
    lengths = np.clip(np.exp(generator.normal(np.log(MEDIAN), sigma, rows)).astype(int), 4, LONGEST)
    width = int(lengths.max())
    mask = torch.from_numpy(np.arange(width) < lengths[:, None]).long()
    ids = torch.from_numpy(generator.integers(3, VOCAB, (rows, PROMPT + width)))
    attention = torch.cat([torch.ones(rows, PROMPT, dtype=torch.long), mask], 1)
    return DataProto.from_dict(
        tensors={
            "input_ids": ids * attention,
            "attention_mask": attention,
            "responses": ids[:, PROMPT:] * mask,
            "response_mask": mask,
        }
    )


def in_order(engine: type) -> type:
    """An engine with micro-batches of adjacent rows, each padded to its longest."""

    def plan(self: Any, rows: AlignedRows, *limits: Any) -> list[list[int]]:
        everyone = list(range(len(rows.lengths)))
        return [everyone[i : i + ROWS_EACH] for i in range(0, len(everyone), ROWS_EACH)]

    return type("InOrder", (engine,), {"_plan": plan})


def plain_engines(path: Path) -> dict[str, Any]:
    settings = HFModelConfig(path=str(path)), FSDPEngineConfig(), OptimizerConfig(lr=0.0)
    return {
        "padded": in_order(PlainEngine)(*settings, passes=PassSettings(packed=False)),
        "packed": in_order(PlainEngine)(*settings, passes=PassSettings(packed=True)),
        "sorted": PlainEngine(*settings, passes=PassSettings(packed=False)),
    }


def megatron_engines(path: Path) -> dict[str, Any]:
    importlib.import_module("tests.megatron.shim")
    from verl.engines.megatron import MegatronEngine

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    engines = {}
    for name, packed in (("padded", False), ("packed", True), ("sorted", False)):
        model = HFModelConfig(path=str(path), external_lib="tests.megatron.shim", use_remove_padding=packed)
        engine = MegatronEngine if name == "sorted" else in_order(MegatronEngine)
        engines[name] = engine(model, MegatronEngineConfig(dtype="float32"), OptimizerConfig(lr=0.0))
    return engines


def padded_tokens(batch: DataProto) -> tuple[int, int]:
    """Tokens that the padded layout computes, and real ones."""
    lengths = AlignedRows.of(batch).lengths
    padded = sum(ROWS_EACH * max(lengths[i : i + ROWS_EACH]) for i in range(0, len(lengths), ROWS_EACH))
    return padded, sum(lengths)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sigmas", nargs="+", type=float, default=[0.3, 0.6, 0.9, 1.2])
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--megatron", action="store_true")
    add_json(parser)
    arguments = parser.parse_args()
    figures = Figures()
    with tempfile.TemporaryDirectory() as folder:
        path = make_model(Path(folder))
        engines = megatron_engines(path) if arguments.megatron else plain_engines(path)
        print(
            f"{arguments.rows} rows, prompts of {PROMPT}, responses around {MEDIAN} tokens, "
            f"{torch.get_num_threads()} threads"
        )
        print(
            "| sigma | bound | padded, s | packed, s | gain | share of the bound | sorted and padded, s |\n|"
            + "---|" * 7
        )
        for sigma in arguments.sigmas:
            batch = make_batch(arguments.rows, sigma)
            limits = {"padded": {}, "packed": {}, "sorted": {"micro_batch_size": ROWS_EACH}}
            seconds: dict[str, list[float]] = {name: [] for name in engines}
            for name, engine in engines.items():
                engine.train_batch(batch, SFTLoss(), **limits[name])  # memory is touched once
            for _ in range(arguments.rounds):
                for name, engine in engines.items():
                    start = time.process_time()
                    engine.train_batch(batch, SFTLoss(), **limits[name])
                    seconds[name].append(time.process_time() - start)
            padded, packed, ordered = (statistics.median(seconds[name]) for name in ("padded", "packed", "sorted"))
            tokens, real = padded_tokens(batch)
            gain, bound = padded / packed, tokens / real
            figures.add(
                f"sigma {sigma}", {"bound": bound, "times as fast as padded": gain, "share of the bound": gain / bound}
            )
            print(
                f"| {sigma} | {bound:.2f} | {padded:.2f} | {packed:.2f} | {gain:.2f} | {gain / bound:.0%} "
                f"| {ordered:.2f} |",
                flush=True,
            )
    figures.write(arguments.json)


if __name__ == "__main__":
    main()
