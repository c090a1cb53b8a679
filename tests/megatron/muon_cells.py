"""What every rank does with Muon on Megatron-Core's weights, beside the plain engine."""

from __future__ import annotations

from tests.harness.engines import make_engine, ragged_batch, relative_error
from tests.megatron.adapter_cells import LORA
from tests.megatron.cells import (
    OPTIM,
    PIPELINE,
    ROWS,
    STEPS,
    TENSOR,
    kept,
    loss_for,
    megatron,
    saved_in,
    share,
    shared_model,
)
from tests.megatron.families import GLM4, LATENT

MUON = {"optimizer": "Muon", "lr": 2e-3, "override_optimizer_config": {}, "lr_scheduler_type": "constant"}
WITHOUT_BIASES = {**GLM4, "attention_bias": False}
"""AdamW makes a step of every gradient, also of a key's bias, whose gradient is rounding errors alone."""


def beside_plain(ranks, folder, family, config=None, model=None, **sizes):
    """Three steps: losses, gradient norms and weights, and how far matrices have come."""
    path, batch = shared_model(ranks, folder, family, **(config or {})), ragged_batch(ROWS)
    mine, loss_fn = share(batch, ranks), loss_for("causal_lm")
    engine = megatron(path, optim=MUON, model=model, **sizes)
    plain = make_engine(path, optim={**OPTIM, **MUON}, model=model)
    before = kept(plain.export_weights())
    told = [engine.train_batch(batch[mine], loss_fn).values() for _ in range(STEPS)]
    theirs = [plain.train_batch(batch, loss_fn).values() for _ in range(STEPS)]
    after, expected = kept(engine.export_weights()), kept(plain.export_weights())
    return {
        "loss": max(abs(a["loss"] - b["loss"]) for a, b in zip(told, theirs)),
        "norm": max(abs(a["grad_norm"] / b["grad_norm"] - 1) for a, b in zip(told, theirs)),
        "weights": max(relative_error(after[n], t) for n, t in expected.items()),
        "moved": max(relative_error(before[n], expected[n]) for n in expected if "_proj.weight" in n),
        "momenta": sum(name.endswith("/momentum_buffer") for name in engine.state().tensors),
    }


def muon_on_cut_weights(ranks, folder):
    """Tensor and sequence parallel; gate and up are one matrix."""
    return beside_plain(ranks, folder, "glm4", WITHOUT_BIASES, **{TENSOR: 2})


def muon_on_latent_attention_and_experts(ranks, folder):
    return beside_plain(ranks, folder, "deepseek_v3", LATENT, **{TENSOR: 2})


def muon_on_copies(ranks, folder):
    """Data parallel, with the optimizer's state shared by the two."""
    return beside_plain(ranks, folder, "qwen3", {"head_dim": 16})


def muon_on_copies_of_their_own(ranks, folder):
    return beside_plain(ranks, folder, "qwen3", {"head_dim": 16}, use_distributed_optimizer=False)


def muon_on_an_adapter(ranks, folder):
    return beside_plain(ranks, folder, "qwen2", model=LORA, **{TENSOR: 2})


def muon_on_tensor_parallel_copies(ranks, folder):
    """Four ranks."""
    return beside_plain(ranks, folder, "llama", **{TENSOR: 2})


def muon_from_a_checkpoint(ranks, folder):
    """Two updates, saved; the third here, from the file in two layouts, and in the plain engine."""
    path, batch = shared_model(ranks, folder, "qwen3", head_dim=16), ragged_batch(ROWS)
    mine, loss_fn = share(batch, ranks), loss_for("causal_lm")

    def step(engine, rows):
        told = engine.train_batch(batch[rows], loss_fn).values()
        again = engine.train_batch(batch[rows], loss_fn).values()["loss"]
        return [told["loss"], told["grad_norm"], again]

    engine = megatron(path, optim=MUON, **{TENSOR: 2})
    for _ in range(2):
        engine.train_batch(batch[mine], loss_fn)
    saved = saved_in(engine, folder / "muon")
    found = {"here": step(engine, mine)}
    for name, sizes in {"again": {TENSOR: 2}, "stages": {PIPELINE: 2}, "copies": {}}.items():
        other = megatron(path, optim=MUON, **sizes)
        other.load_state(saved)
        found[name] = step(other, mine)
    if ranks.is_first:
        plain = make_engine(path, optim={**OPTIM, **MUON})
        plain.load_state(saved)
        found["plain"] = step(plain, slice(None))
    ranks.barrier()
    return found
