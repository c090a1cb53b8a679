"""What every rank does with a Megatron-Core engine, beside the plain engine on the same weights."""

from __future__ import annotations

import hashlib
import json
from functools import partial

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from tests.harness.engines import make_engine, model_dir, on_policy_batch, ragged_batch, relative_error
from tests.harness.several_tokens import distilled
from tests.megatron.families import MIXTURE
from verl.algorithms.losses import PPOPolicyLoss, PPOValueLoss
from verl.checkpoint.part import read_part
from verl.config import ActorConfig, CriticConfig, HFModelConfig, OptimizerConfig
from verl.config.schema.role import MegatronEngineConfig, MegatronEngineOverrideTransformerConfigConfig
from verl.errors import ConfigError, EngineError
from verl.metrics import notices
from verl.models.hf_folder import read_weights
from verl.models.megatron_conversion import convert_to_megatron, differences
from verl.models.merging import merge
from verl.workers.part import ModelPart, save_part

CONTENTS = ("model", "optimizer", "extra")

OPTIM = {"lr": 1e-2, "lr_scheduler_type": "cosine", "override_optimizer_config": {"eps": 1e-4}}
ROWS, STEPS = 7, 3
SMALL = 1e-3
"""Of a gradient that nearly vanishes (all ratios clipped) little but rounding is left, by the processor."""
SHIM = "tests.megatron.shim"
TENSOR, PIPELINE, EXPERT = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "expert_model_parallel_size",
)
VIRTUAL = "virtual_pipeline_model_parallel_size"
CONTEXT = "context_parallel_size"


def megatron(path, kind="causal_lm", trains=True, model=None, optim=None, passes=None, **sizes):
    from verl.engines.megatron import MegatronEngine
    from verl.engines.megatron.parallel import leave

    __import__(SHIM, fromlist=["install"])
    leave()
    return MegatronEngine(
        HFModelConfig(path=str(path), external_lib=SHIM, **(model or {})),
        MegatronEngineConfig(**{"dtype": "float32", **sizes}),
        OptimizerConfig(**{**OPTIM, **(optim or {})}) if trains else None,
        kind=kind,
        total_training_steps=10,
        passes=passes,
    )


def loss_for(kind):
    return PPOValueLoss(CriticConfig()) if kind == "value" else PPOPolicyLoss(ActorConfig(entropy_coeff=0.01))


def shared_model(ranks, folder, family, **config):
    named = json.dumps([family, config], sort_keys=True)
    path = folder / hashlib.sha256(named.encode()).hexdigest()[:12]
    if ranks.is_first and not path.exists():
        model_dir(path, family, **config)
        with_expert_bias(path / family)
    dist.barrier()
    return path / family


def with_expert_bias(path):
    """A new model's experts are all as welcome as the others; let this one's choices differ from its scores.

    And let it have a weight of a layer that predicts further tokens, as published ones do.
    """
    weights = read_weights(path)
    biases = [name for name in weights if name.endswith("e_score_correction_bias")]
    for name in biases:
        weights[name] = torch.linspace(0.3, -0.3, len(weights[name]))
    if biases:
        weights["model.layers.2.eh_proj.weight"] = torch.ones(4, 4)
        save_file(weights, path / "model.safetensors", metadata={"format": "pt"})


def kept(weights):
    """Copies: what an engine exports may be its own memory."""
    return {name: tensor.clone() for name, tensor in weights}


def share(batch, ranks):
    return torch.arange(len(batch)).tensor_split(ranks.size)[ranks.rank].tolist()


def compared(
    ranks, folder, family="qwen2", kind="causal_lm", config=None, limits=None, model=None, constant=(), **sizes
):
    """Outputs, loss and gradient norm of three steps and the weights after them, beside those of the plain engine."""
    path, limits = shared_model(ranks, folder, family, **(config or {})), limits or {}
    batch = on_policy_batch(ROWS, constant) if constant else ragged_batch(ROWS)
    name, mine = "values" if kind == "value" else "log_probs", share(batch, ranks)
    engine = megatron(path, kind, model=model, **sizes)
    plain = make_engine(path, kind, optim=OPTIM)
    plain.skips_constant_rows = False
    before, theirs_before = kept(engine.export_weights()), kept(plain.export_weights())
    names = (name,) if kind == "value" else (name, "entropy")
    outputs = engine.infer(batch[mine], names, temperature=0.7, **limits)
    expected = plain.infer(batch, names, temperature=0.7)
    told = [engine.train_batch(batch[mine], loss_for(kind), **limits).values() for _ in range(STEPS)]
    theirs = [plain.train_batch(batch, loss_for(kind)).values() for _ in range(STEPS)]
    after, copies = dict(engine.export_weights()), engine.compare_copies()
    shown = [(outputs[n], expected[n][mine]) for n in names if expected[n][mine].any()]
    return {
        "held": sum(b.parameter.numel() for b in engine.table.bound) / engine.num_parameters,
        "same bits": before.keys() == theirs_before.keys()
        and all(torch.equal(before[n], t) for n, t in theirs_before.items()),
        "outputs": max((relative_error(a, b) for a, b in shown), default=0.0),
        "loss": max(abs(a["loss"] - b["loss"]) for a, b in zip(told, theirs)),
        "norm": max(abs(a["grad_norm"] - b["grad_norm"]) / max(b["grad_norm"], SMALL) for a, b in zip(told, theirs)),
        "weights": max(relative_error(after[n], t) for n, t in plain.export_weights()),
        "routers": max((abs(a[n] / b[n] - 1) for a, b in zip(told, theirs) for n in b if n[:4] == "moe/"), default=0.0),
        "metrics": sorted(set(theirs[0]) ^ set(told[0])),
        "copies": [copies, of_a_flipped_bit(engine, ranks)],
        "said": [text for text in notices().values() if "further tokens" in text],
    }


def of_a_flipped_bit(engine, ranks):
    """What is said if one bit of a norm of the last rank is another one."""
    norm = next(bound for bound in engine.table.bound if bound.weights[0].name.endswith("norm.weight"))
    if ranks.rank == ranks.size - 1:
        norm.parameter.detach().view(torch.int32)[0] ^= 1
    try:
        return f"nothing: {engine.compare_copies()}"
    except EngineError as error:
        return str(error)


def several_tokens(ranks, folder):
    """Lists of tokens in every layout of as many ranks."""
    path = shared_model(ranks, folder, "qwen2")
    layouts = [{TENSOR: 2}, {PIPELINE: 2}, {CONTEXT: 2}] if ranks.size == 2 else [{TENSOR: 2, PIPELINE: 2}]
    findings = []
    for sizes in layouts:
        batch = ragged_batch(ROWS)
        make = partial(megatron, path, **sizes)
        plain = partial(make_engine, path, optim=OPTIM)
        findings.append(distilled(make, plain, batch, share(batch, ranks)))
    return findings


def state_goes_to_the_plain_engine_and_back(ranks, folder):
    """Train a step, save; the plain engine goes on from it, and another layout does: the next loss is the same."""
    path, batch = shared_model(ranks, folder, "qwen2"), ragged_batch(ROWS)
    mine, loss_fn = share(batch, ranks), loss_for("causal_lm")
    engine = megatron(path, **{TENSOR: 2})
    engine.train_batch(batch[mine], loss_fn)
    engine.step_scheduler()
    kept = saved_in(engine, folder / "sharded")
    told = engine.train_batch(batch[mine], loss_fn).values()
    other = megatron(path, **{PIPELINE: 2})
    other.load_state(kept)
    elsewhere = other.train_batch(batch[mine], loss_fn).values()
    answer = {"loss": told["loss"], "norm": told["grad_norm"], "elsewhere": [elsewhere["loss"], elsewhere["grad_norm"]]}
    if ranks.is_first:
        plain = make_engine(path, optim=OPTIM, model={"use_remove_padding": False})
        plain.load_state(kept)
        expected = plain.train_batch(batch, loss_fn).values()
        answer["plain"] = [expected["loss"], expected["grad_norm"]]
    return answer


def saved_in(engine, folder):
    """A state that every rank has written its part of."""
    save_part(ModelPart(engine), str(folder), CONTENTS)
    return read_part(folder)


def layers_computed_again(ranks, folder):
    """Calls of decoder layers and of their attention in one step of two micro-batches, and the step's loss and norm."""
    path, batch, found = shared_model(ranks, folder, "qwen3"), ragged_batch(ROWS), {}
    for granularity in (None, "selective", "full"):
        section = MegatronEngineOverrideTransformerConfigConfig(recompute_granularity=granularity)
        engine = megatron(path, **{TENSOR: 2, "override_transformer_config": section})
        calls = {"layers": 0, "attention": 0}

        def count(name, calls=calls):
            return lambda *_: calls.update({name: calls[name] + 1})

        for layer in engine.model.chunks[0].decoder.layers:
            layer.register_forward_hook(count("layers"))
            layer.self_attention.core_attention.register_forward_hook(count("attention"))
        told = engine.train_batch(batch[share(batch, ranks)], loss_for("causal_lm"), micro_batch_size=4).values()
        found[str(granularity)] = {**calls, "told": [told["loss"], told["grad_norm"]]}
    return found


def low_precision_of_shared_tokens(ranks, folder):
    return low_precision(ranks, folder, context_parallel_size=2)


def low_precision(ranks, folder, **sizes):
    """bf16 weights with float32 copies beside the plain engine in float32."""
    path, batch = shared_model(ranks, folder, "qwen2"), ragged_batch(ROWS)
    engine = megatron(path, dtype="bfloat16", **(sizes or {TENSOR: 2}))
    plain = make_engine(path, optim=OPTIM)
    told = [engine.train_batch(batch[share(batch, ranks)], loss_for("causal_lm")).values() for _ in range(STEPS)]
    theirs = [plain.train_batch(batch, loss_for("causal_lm")).values() for _ in range(STEPS)]
    masters = list(engine.gradients.masters.items())
    return {
        "dtypes": sorted({str(tensor.dtype) for _, tensor in engine.export_weights()}),
        "masters": sorted({str(m.dtype) for _, m in masters}),
        "rounded": all(torch.equal(p, m.bfloat16()) for p, m in masters),
        "finer": any(not torch.equal(p.float(), m) for p, m in masters),
        "loss": max(abs(a["loss"] - b["loss"]) for a, b in zip(told, theirs)),
        "norm": max(abs(a["grad_norm"] / b["grad_norm"] - 1) for a, b in zip(told, theirs)),
    }


def folders_go_in_and_out(ranks, folder):
    """Both processes convert a folder, train on it, save; the merger makes a Hugging Face folder of the checkpoint."""
    path = shared_model(ranks, folder, "qwen3_moe", **MIXTURE)
    converted = convert_to_megatron(path, folder / "converted", ranks=ranks)
    engine = megatron(converted, **{EXPERT: 2})
    found = {
        "differs": differences(path, converted, ranks),
        "exported": all(torch.equal(read_weights(path)[name], t) for name, t in kept(engine.export_weights()).items()),
        "files": len(list(converted.glob("megatron-*.safetensors"))),
    }
    batch = ragged_batch(ROWS)
    engine.train_batch(batch[share(batch, ranks)], loss_for("causal_lm"))
    records, trained = save_part(ModelPart(engine), str(folder / "actor"), CONTENTS), kept(engine.export_weights())
    found["files of this rank"] = sorted(name for name in records if "-of-" in name)
    if ranks.is_first:
        merged = merge(folder / "actor", folder / "merged")
        weights = read_weights(merged)
        found["merged"] = weights.keys() == trained.keys() and all(torch.equal(weights[n], trained[n]) for n in weights)
        found["moved"] = not torch.equal(trained["lm_head.weight"], read_weights(path)["lm_head.weight"])
    return found


def refusals(ranks, folder):
    path = shared_model(ranks, folder, "qwen2")
    found = {}
    for name, sizes in {
        "layers": {PIPELINE: ranks.size, "virtual_pipeline_model_parallel_size": 4},
        "experts": {EXPERT: 2},
        "processes": {TENSOR: 3},
        "copies": {"context_parallel_size": 3},
        "padded": {"context_parallel_size": 2, "model": {"use_remove_padding": False}},
        "routers": {"override_mcore_model_config": {"moe_router_load_balancing_type": "aux_loss"}},
        "Adafactor": {TENSOR: 2, "optim": {"optimizer": "Adafactor", "override_optimizer_config": {}}},
    }.items():
        try:
            megatron(path, **sizes)
        except Exception as error:
            found[name] = str(error)
    try:
        megatron(shared_model(ranks, folder, "gemma2"), model={"use_remove_padding": False})
    except ConfigError as error:
        found["scores"] = str(error)
    return found
