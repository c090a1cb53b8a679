"""What every rank does with a Megatron-Core engine to show that settings and calls count."""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM

from tests.harness.engines import ragged_batch
from tests.megatron.cells import EXPERT, PIPELINE, ROWS, SHIM, TENSOR, kept, loss_for, megatron, share, shared_model
from tests.megatron.families import MIXTURE
from verl.algorithms.losses import PPOPolicyLoss
from verl.config import ActorConfig, HFModelConfig, OptimizerConfig, leaves, record_reads
from verl.config.schema.node import place
from verl.config.schema.role import MegatronEngineConfig, MegatronEngineOverrideTransformerConfigConfig
from verl.protocol import SHARED_ROWS


def settings_that_nothing_reads(ranks, folder):
    """Those of the section that a run may change with effect, and that neither building nor a step looks at."""
    from verl.engines.megatron import MegatronEngine
    from verl.engines.megatron.parallel import leave

    model, found = HFModelConfig(path=str(shared_model(ranks, folder, "qwen2")), external_lib=SHIM), set()
    for granularity in ("selective", "full"):
        leave()
        section = MegatronEngineConfig(
            dtype="float32",
            override_transformer_config=MegatronEngineOverrideTransformerConfigConfig(granularity),
        )
        place(section, "megatron")
        with record_reads() as reads:
            MegatronEngine(model, section, OptimizerConfig())
        found |= reads
    known = {k for k, f in leaves(type(section)) if not f.metadata["planned"] and not f.metadata["no_effect"]}
    return sorted(known - {name.removeprefix("megatron.") for name in found})


def rows_that_all_get(ranks, folder):
    """Every rank is handed all rows, marked as such; beside ranks that are handed rows of their own."""
    path, batch = shared_model(ranks, folder, "qwen2"), ragged_batch(ROWS)
    found = {}
    for name in ("own", "same"):
        engine, loss_fn = megatron(path, **{TENSOR: 2}), loss_for("causal_lm")
        rows = batch[share(batch, ranks)] if name == "own" else batch
        if name == "same":
            rows.meta_info[SHARED_ROWS] = True
        log_probs = engine.infer(rows)["log_probs"]
        told = engine.train_batch(rows, loss_fn).values()
        width = log_probs.shape[1]
        mine = log_probs if name == "own" else log_probs[share(batch, ranks)]
        found[name] = [mine.tolist(), told["loss"], told["grad_norm"], width, list(engine.data_rank)]
    return found


def moved_to_the_host_in_between(ranks, folder):
    """Two steps, with weights and optimizer on the way between two names of the same device, and without."""
    path, batch = shared_model(ranks, folder, "llama"), ragged_batch(ROWS)
    mine, loss_fn = share(batch, ranks), loss_for("causal_lm")
    weights = []
    for device in ("cpu", "cpu:0"):
        engine = megatron(path, **{TENSOR: 2, "param_offload": True, "optimizer_offload": True})
        engine.device = device
        for _ in range(2):
            engine.train_batch(batch[mine], loss_fn)
            engine.step_scheduler()
        held = [master.grad is None for master in engine.gradients.masters.values()]
        weights.append((kept(engine.export_weights()), all(held)))
    (plain, _), (moved, freed) = weights
    return {"equal": all(torch.equal(moved[n], t) for n, t in plain.items()), "freed": freed}


Z_LOSS = 0.25
LAYOUTS = {
    2: {
        "tokens": {"context_parallel_size": 2},
        "experts": {EXPERT: 2, TENSOR: 2, "expert_tensor_parallel_size": 1},
        "computed again": {EXPERT: 2, "override_transformer_config": ("full",)},
    },
    4: {"stages": {TENSOR: 2, PIPELINE: 2}},
}


def the_loss_of_routers(ranks, folder):
    """A step whose own loss is zero, so that the gradient is the routers' alone, beside Hugging Face's logits."""
    path, batch = shared_model(ranks, folder, "qwen3_moe", **MIXTURE), ragged_batch(ROWS)
    mask = batch.tensors["response_mask"].bool()
    batch.tensors["advantages"] = torch.where(mask, 0.0, torch.nan)
    loss_fn, found = PPOPolicyLoss(ActorConfig(entropy_coeff=0.0)), {"expected": by_hand(path, batch)}
    for name, sizes in LAYOUTS[ranks.size].items():
        if "override_transformer_config" in sizes:
            section = MegatronEngineOverrideTransformerConfigConfig(*sizes["override_transformer_config"])
            sizes = {**sizes, "override_transformer_config": section}
        engine = megatron(path, override_mcore_model_config={"moe_z_loss_coeff": Z_LOSS}, **sizes)
        told = engine.train_batch(batch[share(batch, ranks)], loss_fn, micro_batch_size=3).values()
        found[name] = [told["moe/z_loss"], told["grad_norm"]]
    return found


def by_hand(path, batch):
    """Mean of logsumexp^2 over tokens and layers, and the norm of the gradient of its sum over layers."""
    model, squares, count = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32), [], 0
    for ids, attention, mask in zip(*(batch.tensors[n] for n in ("input_ids", "attention_mask", "response_mask"))):
        tokens, own = ids[attention.bool()], mask.nonzero()
        prompt = len(tokens) - int(attention[-len(mask) :].sum())
        length = prompt + int(own[-1]) if len(own) else 1  # the last response token predicts nothing
        logits = model(tokens[None, :length], output_router_logits=True, use_cache=False).router_logits
        squares.append(torch.stack([layer.logsumexp(-1).square().sum() for layer in logits]))
        count += length
    mean = torch.stack(squares).sum(0) / count
    (Z_LOSS * mean.sum()).backward()
    norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
    return [mean.mean().item(), norm.item()]
