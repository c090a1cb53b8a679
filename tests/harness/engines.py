"""Engines over tiny models, ragged batches, and an independent forward pass to compare them with."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.harness.models import tiny_model_dir
from verl.algorithms.losses import PPOPolicyLoss
from verl.config import ActorConfig, FSDPEngineConfig, HFModelConfig, OptimizerConfig
from verl.engines.plain import PlainEngine
from verl.protocol import DataProto

VOCAB = 259
FAMILIES = ("qwen2", "qwen3", "llama", "gemma2")


def model_dir(folder: Path, family: str = "qwen2", **config: Any) -> Path:
    return tiny_model_dir(folder / family, family, **config)


def make_engine(
    path: Path,
    kind: str = "causal_lm",
    trains: bool = True,
    optim: dict[str, Any] | None = None,
    engine: dict[str, Any] | None = None,
    model: dict[str, Any] | None = None,
    **arguments: Any,
) -> PlainEngine:
    settings = {"lr": 1e-2, **(optim or {})}
    return PlainEngine(
        HFModelConfig(path=str(path), **(model or {})),
        FSDPEngineConfig(**(engine or {})),
        OptimizerConfig(**settings) if trains else None,
        kind=kind,
        **{"total_training_steps": 10, **arguments},
    )


def ragged_batch(rows: int = 6, prompt: int = 5, response: int = 7, seed: int = 0, vocab: int = VOCAB) -> DataProto:
    """Prompts of 1 to ``prompt`` tokens, responses of 1 to ``response`` with a gap that is not trained on; one row is
    trained on nowhere. Everything outside the response mask is NaN where it can be."""
    generator = np.random.default_rng(seed)
    ids = torch.from_numpy(generator.integers(3, vocab, (rows, prompt + response)))
    attention = torch.zeros(rows, prompt + response, dtype=torch.long)
    mask = torch.zeros(rows, response, dtype=torch.long)
    for row in range(rows):
        before, after = generator.integers(1, prompt + 1), generator.integers(1, response + 1)
        attention[row, prompt - before : prompt + after] = 1
        mask[row, :after] = 1
        if after > 3:
            mask[row, 1:3] = 0  # a tool's answer inside the response
    mask[rows // 2] = 0
    ids = torch.where(attention.bool(), ids, 0)
    floats = {}
    for name in ("advantages", "old_log_probs", "returns", "values"):
        drawn = torch.from_numpy(generator.standard_normal((rows, response))).float()
        if name == "old_log_probs":
            drawn = 0.2 * drawn - float(np.log(vocab))  # near an untrained model's, so that few tokens are clipped
        floats[name] = torch.where(mask.bool(), drawn, torch.nan)
    return DataProto.from_dict(
        tensors={
            "prompts": ids[:, :prompt],
            "responses": ids[:, prompt:],
            "input_ids": ids,
            "attention_mask": attention,
            "position_ids": (attention.cumsum(-1) - 1).clamp(min=0),
            "response_mask": mask,
            **floats,
        }
    )


def on_policy_batch(rows: int, constant: Iterable[int], seed: int = 0, **columns: Tensor) -> DataProto:
    """`ragged_batch` without ``old_log_probs``, with an advantage of 0 in the ``constant`` rows."""
    batch = ragged_batch(rows=rows, seed=seed)
    tensors = {name: tensor.clone() for name, tensor in batch.batch.items() if name != "old_log_probs"}
    tensors["advantages"][list(constant)] *= 0
    return DataProto.from_dict(tensors={**tensors, **columns})


def grouped_batch(prompts: int = 3, samples: int = 4, prompt: int = 9, response: int = 12, seed: int = 0) -> DataProto:
    """``ragged_batch`` in which ``samples`` rows have the same prompt, in an order that mixes the groups."""
    batch = ragged_batch(rows=prompts * samples, prompt=prompt, response=response, seed=seed)
    tensors = {name: tensor.clone() for name, tensor in batch.batch.items()}
    for row in range(prompts * samples):
        source = row % prompts
        for name in ("input_ids", "attention_mask"):
            tensors[name][row, :prompt] = tensors[name][source, :prompt]
        tensors["prompts"][row] = tensors["input_ids"][row, :prompt]
    tensors["position_ids"] = (tensors["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    return DataProto.from_dict(tensors=tensors)


def padded_logits(model: Any, batch: DataProto) -> Tensor:
    """(B, T, V): the logits that predict each response token, from one padded forward pass with an attention mask."""
    tensors = batch.batch
    logits = model(
        input_ids=tensors["input_ids"],
        attention_mask=tensors["attention_mask"],
        position_ids=tensors["position_ids"],
        use_cache=False,
    ).logits
    return logits[:, tensors["prompts"].shape[1] - 1 : -1]


def policy_loss(**settings: Any) -> PPOPolicyLoss:
    return PPOPolicyLoss(ActorConfig(**settings))


def train(engine: Any, seeds: Iterable[int]) -> dict[str, float]:
    """A step on the batch of each seed; the metrics of the last one."""
    metrics: dict[str, float] = {}
    for seed in seeds:
        metrics = engine.train_batch(ragged_batch(seed=seed), policy_loss()).values()
        engine.step_scheduler()
    return metrics


def parameter(gradient: list[float]) -> torch.nn.Parameter:
    """Zeros with this gradient."""
    made = torch.nn.Parameter(torch.zeros(len(gradient)))
    made.grad = torch.tensor(gradient)
    return made


def relative_error(found: Tensor, expected: Tensor) -> float:
    """||found - expected|| / ||expected||."""
    return float((found.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-12))


def flat_gradient(engine: Any) -> Tensor:
    return torch.cat([p.grad.flatten().clone() for p in engine.model.parameters() if p.grad is not None])


def gradients(
    engine: Any, batch: DataProto, loss_fn: Any, read: Callable[[Any], Tensor] = flat_gradient, **limits: Any
) -> tuple[float, Tensor]:
    """Loss and gradient of one mini-batch, as ``read`` finds it where the optimizer would use it."""
    caught: list[Tensor] = []

    def step(closure: Any = None) -> None:
        caught.append(read(engine))

    original, engine.optimizer.step = engine.optimizer.step, step
    clip, engine.grad_clip = engine.grad_clip, None
    try:
        metrics = engine.train_batch(batch, loss_fn, **limits)
    finally:
        engine.optimizer.step, engine.grad_clip = original, clip
    return metrics.values()["loss"], caught[0]
