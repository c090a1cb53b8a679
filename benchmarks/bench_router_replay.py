"""How far a bf16 sampler is from a float32 trainer, on tiny mixtures with and without router replay, and a dense model.

    PYTHONPATH=. python benchmarks/bench_router_replay.py [--prompts 16] [--tokens 48] [--seeds 3]

Random models of four layers; the mixtures have 16 experts, four per token. Printed are the means over the seeds:
differences of the probabilities of sampled tokens, and the share of (token, layer, place) whose expert is another one.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

from verl.agent_loop.base import AgentLoopOutput
from verl.agent_loop.batch import to_batch
from verl.config import FSDPEngineConfig, HFModelConfig
from verl.engines.plain import PlainEngine
from verl.engines.settings import PassSettings
from verl.models.router_replay import COLUMN, NO_RECORD
from verl.protocol import DataProto
from verl.rollout.base import Request, SamplingParams
from verl.rollout.hf.sampler import HFSampler

SIZES = {
    "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "intermediate_size": 128, "vocab_size": 256, "max_position_embeddings": 512, "eos_token_id": None,
    "bos_token_id": None, "pad_token_id": 0, "tie_word_embeddings": False,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "qwen3_moe": {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 32, "norm_topk_prob": True},
    "mixtral": {"num_local_experts": 16, "num_experts_per_tok": 4},
}


def save(folder: Path, family: str, seed: int, scale: float) -> Path:
    """A random model of this family."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SIZES, **MODELS[family]))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(scale)
    model.save_pretrained(folder / f"{family}-{seed}")
    return folder / f"{family}-{seed}"


def sampled(path: Path, is_mixture: bool, prompts: int, tokens: int) -> DataProto:
    """Answers of a bf16 sampler, with the experts that it chose."""
    sampler = HFSampler(str(path), dtype="bfloat16", record_experts=is_mixture)
    generator = torch.Generator().manual_seed(1)
    ids = [tuple(torch.randint(1, 256, (8,), generator=generator).tolist()) for _ in range(prompts)]
    sampling = SamplingParams(max_tokens=tokens, ignore_eos=True)

    async def every() -> list[Any]:
        made = (sampler.generate(Request(str(n), prompt, sampling, uid=str(n))) for n, prompt in enumerate(ids))
        return list(await asyncio.gather(*made))

    return to_batch(
        [
            AgentLoopOutput(
                list(prompt),
                list(done.token_ids),
                [1] * len(done.token_ids),
                list(done.log_probs),
                routed_experts=done.routed_experts,
            )
            for prompt, done in zip(ids, asyncio.run(every()))
        ],
        0,
    )


def differences(path: Path, batch: DataProto, replays: bool) -> list[float]:
    """Mean and largest difference of probabilities, and the share of other experts, against a float32 trainer."""
    is_mixture = COLUMN in batch.tensors.keys()
    engine = PlainEngine(
        HFModelConfig(path=str(path)), FSDPEngineConfig(), passes=PassSettings(router_replay=is_mixture)
    )
    given = batch if replays else batch.select([key for key in batch.tensors.keys() if key != COLUMN])
    made = engine.infer(given, ("log_probs", *([COLUMN] if is_mixture else [])))
    differs = (made["log_probs"].exp() - batch.tensors["rollout_log_probs"].exp()).abs()
    share = 0.0
    if is_mixture:
        ours, theirs = made[COLUMN], batch.tensors[COLUMN]
        known = (ours[..., 0, 0] != NO_RECORD) & (theirs[..., 0, 0] != NO_RECORD)
        share = float((ours[known][..., :, None] != theirs[known][..., None, :]).all(-1).float().mean())
    return [float(differs.mean()), float(differs.max()), share]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--scale", type=float, default=6.0, help="factor of the random weights")
    chosen = parser.parse_args()
    logging.disable_progress_bar()
    print("| model | replay | mean difference | largest | share of other experts |\n| --- | --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory() as folder:
        for family, config in MODELS.items():
            rows: dict[bool, list[list[float]]] = {False: [], True: []}
            for seed in range(chosen.seeds):
                path = save(Path(folder), family, seed, chosen.scale)
                batch = sampled(path, bool(config), chosen.prompts, chosen.tokens)
                for replays in [False, True] if config else [False]:
                    rows[replays].append(differences(path, batch, replays))
            for replays, values in rows.items():
                if values:
                    mean, most, share = torch.tensor(values).mean(0).tolist()
                    name = ("R3" if replays else "none") if config else "dense"
                    print(f"| {family} | {name} | {mean:.2e} | {most:.2e} | {100 * share:.2f} % |")


if __name__ == "__main__":
    main()
