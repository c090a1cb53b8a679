"""What every rank does with adapters on Megatron-Core's layers, beside the plain engine's on the same model."""

from __future__ import annotations

import torch

from tests.harness.engines import make_engine, ragged_batch, relative_error
from tests.megatron.cells import (
    EXPERT,
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
from tests.megatron.families import MIXTRAL, MIXTURE
from verl.config.loading.configuration import read_config
from verl.engines.adapters import AdapterBaseEngine
from verl.errors import CheckpointError, NotBuiltError

LORA = {"lora_rank": 4, "lora_alpha": 8}
SPELLED = ["actor_rollout_ref.model.lora.rank=4", "actor_rollout_ref.model.lora.alpha=8"]
"""The same as Megatron's users spell it."""


def farthest(mine, theirs):
    return max(
        relative_error(mine[name], tensor) if tensor.any() else float(mine[name].abs().max())
        for name, tensor in theirs.items()
    )


def beside_plain(ranks, folder, family="qwen2", kind="causal_lm", config=None, limits=None, model=None, **sizes):
    """Three steps: losses, gradient norms, factors and merged weights; what the base says; and what is saved."""
    path, batch = shared_model(ranks, folder, family, **(config or {})), ragged_batch(ROWS)
    mine, model, limits = share(batch, ranks), {**LORA, **(model or {})}, limits or {}
    name = "values" if kind == "value" else "log_probs"
    engine = megatron(path, kind, model=model, **sizes)
    plain = make_engine(path, kind, optim=OPTIM, model=model)
    first, theirs_first = kept(engine.export_adapter()), kept(plain.export_adapter())
    before = engine.infer(batch[mine], (name,))[name]
    told = [engine.train_batch(batch[mine], loss_for(kind), **limits).values() for _ in range(STEPS)]
    theirs = [plain.train_batch(batch, loss_for(kind)).values() for _ in range(STEPS)]
    after = engine.infer(batch[mine], (name,))[name]
    names = {name for answer in ranks.exchange(sorted(engine.state().tensors)) for name in answer}
    return {
        "same bits": first.keys() == theirs_first.keys()
        and all(torch.equal(first[n], t) for n, t in theirs_first.items()),
        "loss": max(abs(a["loss"] - b["loss"]) for a, b in zip(told, theirs)),
        "norm": max(abs(a["grad_norm"] / b["grad_norm"] - 1) for a, b in zip(told, theirs)),
        "adapter": farthest(kept(engine.export_adapter()), kept(plain.export_adapter())),
        "merged": farthest(kept(engine.export_weights()), kept(plain.export_weights())),
        "outputs": float((after - plain.infer(batch, (name,))[name][mine]).abs().max()),
        "moved": float((after - before).abs().max()) if len(mine) else 1.0,
        "base": float((AdapterBaseEngine(engine).infer(batch[mine], (name,))[name] - before).abs().max()),
        "trained": sum(b.parameter.numel() for b in engine.trainable.trained)
        / sum(t.numel() for t in theirs_first.values()),
        "saved": sorted(names ^ set(plain.state().tensors)),
    }


EXPERTS = {
    "target_modules": ["q_proj", "v_proj"],
    "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
}
COMPLETE = {TENSOR: 2, "expert_tensor_parallel_size": 1}
"""Attention over two ranks, each expert complete on both or one of them."""


def an_adapter_on_experts_goes_elsewhere(ranks, folder):
    """Train a step with shared experts, save; another layout goes on, the plain engine takes over the weights."""
    path, batch = shared_model(ranks, folder, "qwen3_moe", **MIXTURE), ragged_batch(ROWS)
    mine, loss_fn, model = share(batch, ranks), loss_for("causal_lm"), {**LORA, **EXPERTS}

    def step(engine):
        told = engine.train_batch(batch[mine], loss_fn).values()
        return [told["loss"], told["grad_norm"]]

    engine = megatron(path, model=model, **{EXPERT: 2})
    step(engine)
    saved = saved_in(engine, folder / "adapted experts")
    outputs, adapter = [engine.infer(batch[mine])["log_probs"]], kept(engine.export_adapter())
    found = {"here": step(engine)}
    other = megatron(path, model=model, **COMPLETE)
    other.load_state(saved)
    found["elsewhere"] = step(other)
    other.load_weights(adapter)
    outputs.append(other.infer(batch[mine])["log_probs"])
    file = str(folder / "adapted experts" / "huggingface")
    again = megatron(path, model={"lora_adapter_path": file}, **{PIPELINE: 2})
    outputs.append(again.infer(batch[mine])["log_probs"])
    plain = make_engine(path, optim=OPTIM, model={"lora_adapter_path": file})
    expected = plain.infer(batch)["log_probs"][mine]
    found["outputs"] = max((float((x - expected).abs().max()) for x in outputs if len(mine)), default=0.0)
    found["same file"] = {n: t.shape for n, t in adapter.items()} == {n: t.shape for n, t in plain.export_adapter()}
    try:
        plain.load_state(saved)
    except CheckpointError as error:
        found["refused"] = str(error)
    return found


def an_adapters_state_goes_elsewhere(ranks, folder):
    """Train a step, save; the plain engine and another layout go on from it, and back."""
    path, batch = shared_model(ranks, folder, "qwen2"), ragged_batch(ROWS)
    mine, loss_fn = share(batch, ranks), loss_for("causal_lm")

    def step(engine, rows):
        told = engine.train_batch(batch[rows], loss_fn).values()
        return [told["loss"], told["grad_norm"]]

    engine = megatron(path, model=LORA, **{TENSOR: 2})
    first = kept(engine.export_adapter())
    step(engine, mine)
    saved = saved_in(engine, folder / "adapted")
    found = {"here": step(engine, mine)}
    other = megatron(path, model=LORA, **{PIPELINE: 2})
    other.load_state(saved)
    found["elsewhere"] = step(other, mine)
    if ranks.is_first:
        plain = make_engine(path, optim=OPTIM, model=LORA)
        plain.load_state(saved)
        found["plain"] = step(plain, slice(None))
        found["files"] = sorted(f.name for f in (folder / "adapted" / "huggingface").iterdir() if "adapter" in f.name)
    ranks.barrier()
    resolved = read_config("ppo_trainer", SPELLED).actor_rollout_ref.model
    names = ("lora_rank", "lora_alpha", "target_modules", "exclude_modules")
    at_hand = megatron(path, model={name: resolved[name] for name in names}, **{TENSOR: 2})
    spelled = kept(at_hand.export_adapter())
    at_hand.load_state(saved)
    again = megatron(path, model={"lora_adapter_path": str(folder / "adapted" / "huggingface")}, **{TENSOR: 2})
    outputs = [one.infer(batch[mine])["log_probs"] for one in (at_hand, again)]
    found["from its file"] = torch.equal(*outputs)
    found["spelled otherwise"] = {
        "first": spelled.keys() == first.keys() and all(torch.equal(first[n], t) for n, t in spelled.items()),
        "next": step(at_hand, mine) == found["here"],
    }
    return found


def adapters_that_are_refused(ranks, folder):
    found = []
    for family, config, model in (("qwen3_moe", MIXTURE, {}), ("mixtral", MIXTRAL, {}), ("mixtral", MIXTRAL, EXPERTS)):
        try:
            megatron(shared_model(ranks, folder, family, **config), model={**LORA, **model}, **{TENSOR: 2})
        except NotBuiltError as error:
            found.append(str(error))
    return found
