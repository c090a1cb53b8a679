"""What every rank does with recorded experts, beside the plain engine."""

from __future__ import annotations

import torch

from tests.harness.engines import make_engine, ragged_batch, relative_error
from tests.megatron.cells import (
    CONTEXT,
    EXPERT,
    OPTIM,
    PIPELINE,
    ROWS,
    STEPS,
    TENSOR,
    VIRTUAL,
    kept,
    loss_for,
    megatron,
    share,
    shared_model,
)
from tests.megatron.families import LATENT, MIXTURE
from verl.config.schema.role import MegatronEngineOverrideTransformerConfigConfig
from verl.engines.settings import PassSettings
from verl.errors import ModelError

AGAIN = {"override_transformer_config": MegatronEngineOverrideTransformerConfigConfig("full")}
PASSES = PassSettings(router_replay=True)
COLUMN = "routed_experts"


def replayed(ranks, folder, family, config, layers, limits=None, **sizes):
    """Random experts for all tokens but every fifth, which has no record; and those that a free pass records."""
    path, limits = shared_model(ranks, folder, family, **config), limits or {}
    experts = config.get("n_routed_experts", config.get("num_experts"))
    free, batch = ragged_batch(ROWS), ragged_batch(ROWS)
    generator = torch.Generator().manual_seed(0)
    drawn = torch.rand(*batch.batch["input_ids"].shape, layers, experts, generator=generator).argsort(-1)
    there = batch.batch["attention_mask"].bool() & (batch.batch["input_ids"] % 5 != 0)
    chosen = torch.where(there[..., None, None], drawn[..., : config["num_experts_per_tok"]], -1)
    batch.batch[COLUMN] = chosen.to(torch.int16)
    mine, loss_fn = share(batch, ranks), loss_for("causal_lm")
    engine = megatron(path, passes=PASSES, **sizes)
    plain = make_engine(path, optim=OPTIM, passes=PASSES)
    found = {}
    for name, rows in (("free", free), ("forced", batch)):
        ours, theirs = (e.infer(r, ("log_probs", COLUMN), **limits) for e, r in ((engine, rows[mine]), (plain, rows)))
        if len(mine):
            found[name] = relative_error(ours["log_probs"], theirs["log_probs"][mine])
            found[f"{name} column"] = same_where_known(ours[COLUMN], theirs[COLUMN][mine])
    told = [engine.train_batch(batch[mine], loss_fn, **limits).values() for _ in range(STEPS)]
    theirs = [plain.train_batch(batch, loss_fn).values() for _ in range(STEPS)]
    after = kept(engine.export_weights())
    # Padded rows also count choices of tokens on which no loss depends.
    names = ["loss", "grad_norm", *(["moe/replay_differs"] if engine.forward.passes.packed else [])]
    for name in names:
        found[name] = max(abs(a[name] - b[name]) / abs(b[name]) for a, b in zip(told, theirs))
    found["weights"] = max(relative_error(after[name], tensor) for name, tensor in plain.export_weights())
    found["share"] = theirs[0]["moe/replay_differs"]
    return found


def same_where_known(ours, theirs):
    """Of each token that the plain engine computes the same experts, in any order; padded rows compute others too."""
    known = theirs >= 0
    return bool(((ours.sort(-1)[0] == theirs.sort(-1)[0]) | ~known).all())


# ---- two ranks -------------------------------------------------------------------------------------------------


def experts_and_tokens_shared(ranks, folder):
    sizes = {CONTEXT: 2, EXPERT: 2}
    return replayed(ranks, folder, "qwen3_moe", MIXTURE, 2, {"micro_batch_size": 4}, **sizes, **AGAIN)


def rows_padded_and_cut(ranks, folder):
    """One layer without experts, groups of experts, a bias on the choice; two ranks share the tokens between layers."""
    padded, limits = {"use_remove_padding": False}, {"micro_batch_size": 3}
    return replayed(ranks, folder, "deepseek_v3", LATENT, 1, limits, model=padded, **{TENSOR: 2})


def a_dense_model(ranks, folder):
    try:
        megatron(shared_model(ranks, folder, "qwen2"), passes=PASSES, **{TENSOR: 2})
    except ModelError as error:
        return str(error)


# ---- four ranks ------------------------------------------------------------------------------------------------


def virtual_stages_computed_again(ranks, folder):
    """Three micro-batches, which the schedule wants to be four; the first of four layers has no experts."""
    config = {**MIXTURE, "layers": 4, "mlp_only_layers": [0]}
    sizes = {CONTEXT: 2, PIPELINE: 2, VIRTUAL: 2, **AGAIN}
    return replayed(ranks, folder, "qwen3_moe", config, 3, {"micro_batch_size": 3}, **sizes)
