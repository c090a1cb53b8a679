"""Training and sampling on the same ranks, in layouts of their own: the sampler's log-probs beside the trainer's."""

from __future__ import annotations

import asyncio
import dataclasses

import torch

from tests.dist.engine_cells import loss_of, sharded, shared_model
from tests.dist.expert_cells import MIXTURE
from tests.dist.lockstep_cells import turn
from tests.engines.builders import ragged_batch
from tests.rollout.builders import prompt, requests, sample
from verl.config import HFModelConfig, RolloutConfig
from verl.errors import VerlError
from verl.protocol import DataProto
from verl.rollout import Completion
from verl.rollout.group import Sharing
from verl.weight_sync import chunk_weights

STEPS, BUCKET = 3, 1 << 14
WANTED = requests([prompt(n, n) for n in (2, 5, 9, 14)], samples=2, max_tokens=[5, 9], ignore_eos=True)


def as_batch(wanted, completions):
    """Prompts padded on the left, responses on the right, as workers make them."""
    before = max(len(request.token_ids) for request in wanted)
    after = max(len(completion.token_ids) for completion in completions)
    ids, attention, mask = (torch.zeros(len(wanted), before + after, dtype=torch.long) for _ in range(3))
    for row, (request, completion) in enumerate(zip(wanted, completions)):
        start, end = before - len(request.token_ids), before + len(completion.token_ids)
        ids[row, start:end] = torch.tensor([*request.token_ids, *completion.token_ids])
        attention[row, start:end] = mask[row, before:end] = 1
    return DataProto.from_dict(
        tensors={
            "prompts": ids[:, :before],
            "responses": ids[:, before:],
            "input_ids": ids,
            "attention_mask": attention,
            "position_ids": (attention.cumsum(-1) - 1).clamp(min=0),
            "response_mask": mask[:, before:],
        }
    )


def gap(ranks, engine, wanted, completions):
    """The largest difference between the sampler's log-probs and the engine's, over all rows and ranks."""
    batch = as_batch(wanted, completions)
    mine = torch.arange(len(batch)).tensor_split(ranks.size)[ranks.rank].tolist()
    found = engine.infer(batch[mine], ("log_probs",))["log_probs"]
    largest = 0.0
    for row, values in zip(mine, found):
        said = torch.tensor(completions[row].log_probs)
        largest = max(largest, float((values[: len(said)] - said).abs().max()))
    return float(ranks.max(torch.tensor([largest])))


def trained_and_sampled(ranks, engine, path, layout, batch, loss, mine):
    """Per step the gap after the weights were handed over; first the one before any was; whether a plan was followed,
    and what share of the model's elements this rank's sampler was sent and has."""
    settings = RolloutConfig(name="hf", tensor_model_parallel_size=layout)
    together = Sharing.of(settings, HFModelConfig(path=str(path)), "cpu", ranks.size).on(ranks, engine)
    sampler, held = together.sampler, 0
    stale, gaps = None, []
    for step in range(1, STEPS + 1):
        engine.train_batch(batch[mine], loss)
        if step == 1:
            stale = gap(ranks, engine, WANTED, _sampled(ranks, together))
        shards = [(name, shard.clone()) for name, shard in together.weights(engine)]
        held = sum(shard.numel() for _, shard in shards) / engine.num_parameters
        asyncio.run(sampler.update_weights(chunk_weights(shards, BUCKET, step), step))
        gaps.append(gap(ranks, engine, WANTED, _sampled(ranks, together)))
    kept = sum(t.numel() for t in sampler.model.parameters()) / engine.num_parameters
    return {"stale": stale, "gaps": gaps, "planned": together.plan is not None, "sent": held, "kept": kept}


def _sampled(ranks, together):
    """Every tensor group samples the same; one of them is heard by all ranks."""
    found = turn(together.sampler, lambda: sample(together.sampler, WANTED))
    heard = ranks.exchange(None if found is None else [dataclasses.asdict(completion) for completion in found])
    return [Completion(**fact) for fact in next(answer for answer in heard if answer is not None)]


def on_fsdp(ranks, folder, family="qwen2", config=None, model=None, **engine):
    path, batch = shared_model(ranks, folder, family, **(config or {})), ragged_batch(rows=5)
    trainer = sharded(path, engine=engine, model=model or {})
    mine = torch.arange(len(batch)).tensor_split(ranks.size)[ranks.rank].tolist()
    return trained_and_sampled(ranks, trainer, path, ranks.size, batch, loss_of("causal_lm"), mine)


def fsdp_shards_to_a_tensor_group(ranks, folder):
    return on_fsdp(ranks, folder)


def shared_linear_maps_to_a_tensor_group(ranks, folder):
    """No plan: whole weights are gathered one unit at a time."""
    return on_fsdp(ranks, folder, "qwen3", tensor_parallel_size=2)


def an_adapter_to_a_tensor_group(ranks, folder):
    """No plan: it is merged on the way."""
    return on_fsdp(ranks, folder, model={"lora_rank": 4, "lora_alpha": 32})


def experts_to_a_tensor_group(ranks, folder):
    """No plan: in memory experts lie together, and in files apart."""
    return on_fsdp(ranks, folder, "qwen3_moe", MIXTURE)


def layouts_that_a_sampler_cannot_hold(ranks, folder):
    """Before anything is allocated, with the sizes that would do."""
    path, told = shared_model(ranks, folder, "qwen2"), {}
    for name, (world, settings) in {
        "workers": (4, {"tensor_model_parallel_size": 3}),
        "heads": (8, {"tensor_model_parallel_size": 8}),
        "elsewhere": (2, {"tensor_model_parallel_size": 2, "checkpoint_engine": {"backend": "shared_memory"}}),
        "exactness": (2, {"tensor_model_parallel_size": 2, "full_determinism": True}),
    }.items():
        try:
            Sharing.of(RolloutConfig(name="hf", **settings), HFModelConfig(path=str(path)), "cpu", world)
        except VerlError as error:
            told[name] = str(error)
    return told
