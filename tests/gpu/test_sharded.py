"""FSDP2 on one CUDA device: where weights, optimizer state and activations live; no number changes."""

from __future__ import annotations

import itertools
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from tests.harness.engines import make_engine, model_dir, ragged_batch, relative_error
from verl import distributed
from verl.algorithms.losses import PPOPolicyLoss
from verl.config import ActorConfig, FSDPEngineConfig, HFModelConfig, OptimizerConfig
from verl.engines.sharded_engine import ShardedEngine
from verl.registry import ENGINES

OPTIM = {"lr": 1e-2, "override_optimizer_config": {"eps": 1e-4}}


def engine_of(path: Path, model: dict[str, Any] | None = None, **settings: Any) -> ShardedEngine:
    distributed.join_group(device="cuda")
    return ENGINES.get("fsdp2")(
        HFModelConfig(path=str(path), **(model or {})),
        FSDPEngineConfig(**{"dtype": "float32", **settings}),
        OptimizerConfig(**OPTIM),
        device="cuda",
        total_training_steps=10,
        seed=3,
    )


def steps(engine: Any, **limits: Any) -> torch.Tensor:
    """Two optimizer steps; the weights behind them."""
    for seed in range(2):
        engine.train_batch(ragged_batch(seed=seed), PPOPolicyLoss(ActorConfig()), **limits)
    return torch.cat([tensor.flatten().cpu() for _, tensor in engine.export_weights()])


def places(engine: ShardedEngine) -> tuple[set[str], set[str]]:
    """Kinds of device of weights and of moments."""
    entries = [t for state in engine.optimizer.state.values() for key, t in state.items() if key != "step"]
    local = [t.to_local() if isinstance(t, DTensor) else t for t in entries]
    return {p.device.type for p in engine.model.parameters()}, {t.device.type for t in local}


def test_weights_are_those_of_the_plain_engine_wherever_they_live():
    cases: tuple[dict[str, Any], ...] = (
        {},
        {"param_offload": True, "optimizer_offload": True},
        {"offload_policy": True},
        {"reshard_after_forward": False, "forward_prefetch": True},
    )
    with tempfile.TemporaryDirectory() as folder:
        path = model_dir(Path(folder), "qwen2", tie_word_embeddings=True)
        plain = make_engine(path, optim=OPTIM, engine={"dtype": "float32"}, device="cuda", seed=3)
        expected = steps(plain)
        for case in cases:
            found = steps(engine_of(path, **case), micro_batch_size=2)
            assert relative_error(found, expected) < 1e-4, case


def test_what_is_offloaded_is_on_the_host_between_uses_and_a_checkpoint_loads_there():
    with tempfile.TemporaryDirectory() as folder:
        path = model_dir(Path(folder), "qwen2")
        kept, away = engine_of(path), engine_of(path, param_offload=True, optimizer_offload=True)
        held = engine_of(path, offload_policy=True)
        for engine in (kept, away, held):
            steps(engine)
            engine.step_scheduler()
        assert places(kept) == ({"cuda"}, {"cuda"})
        assert places(away) == places(held) == ({"cpu"}, {"cpu"})
        for engine in (away, held):
            engine.load_state(kept.state())
        first, *others = (steps(engine) for engine in (kept, away, held))
        assert all(relative_error(found, first) < 1e-4 for found in others)


def test_activations_wait_on_the_host():
    with tempfile.TemporaryDirectory() as folder:
        path = model_dir(Path(folder), "qwen2", hidden=64)
        for strategy, checkpointed in itertools.product(("plain", "fsdp2"), (False, True)):
            found = []
            for offloaded in (False, True):
                model = {"enable_activation_offload": offloaded, "enable_gradient_checkpointing": checkpointed}
                if strategy == "plain":
                    engine: Any = make_engine(
                        path, optim=OPTIM, model=model, engine={"dtype": "float32"}, device="cuda", seed=3
                    )
                else:
                    engine = engine_of(path, model=model)
                if engine.activations is not None:
                    engine.activations.smallest = 0
                found.append(steps(engine))
            assert engine.activations.moved_bytes > 0, strategy
            assert relative_error(found[1], found[0]) < 1e-5, strategy
