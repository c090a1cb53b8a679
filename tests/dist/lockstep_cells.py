"""The `hf` sampler on the ranks of a tensor group, beside one process with the whole model."""

from __future__ import annotations

import asyncio

import torch
import torch.distributed as dist

from tests.rollout.builders import prompt, requests, sample, tiny_model
from verl.config import HFModelConfig, RolloutConfig
from verl.distributed import Ranks
from verl.errors import VerlError
from verl.models import load_causal_lm
from verl.models.weights import export_weights
from verl.rollout.hf.lockstep import LockstepSampler
from verl.rollout.hf.pool_runner import PoolRunner
from verl.rollout.hf.sampler import HFSampler
from verl.weight_sync import chunk_weights

LENGTHS = (1, 3, 9, 17, 26, 31)
MIXED = requests([prompt(n, n) for n in LENGTHS], samples=3, max_tokens=[4, 19, 11, 1], temperature=0.7)
MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True}


def folder_of(ranks, folder, family, **config):
    path = folder / "-".join([family, *(f"{key}={value}" for key, value in sorted(config.items()))])
    if ranks.is_first and not path.exists():
        tiny_model(family, scale=2.0, **config).save_pretrained(path)
    dist.barrier()
    return path


def sharded(path, ranks, **rollout):
    settings = RolloutConfig(**{"name": "hf", "tensor_model_parallel_size": ranks.size, **rollout})
    return LockstepSampler.with_part(settings, HFModelConfig(path=str(path)), "cpu", ranks)


def turn(sampler, work):
    """What the leader did while the others followed."""
    if not sampler.leads:
        sampler.follow()
        return None
    try:
        return work()
    finally:
        sampler.end_turn()


def difference(found, expected):
    """Whether tokens are the same, and the largest difference of log-probs."""
    same = [a.token_ids == b.token_ids and a.finish_reason == b.finish_reason for a, b in zip(found, expected)]
    gaps = [abs(x - y) for a, b in zip(found, expected) for x, y in zip(a.log_probs, b.log_probs)]
    return [all(same), max(gaps)]


def compared(ranks, folder, family="qwen2", config=None, wanted=MIXED, **rollout):
    path = folder_of(ranks, folder, family, **(config or {}))
    sampler = sharded(path, ranks, **rollout)
    found = turn(sampler, lambda: sample(sampler, wanted))
    whole = load_causal_lm(str(path))
    held = sum(p.numel() for p in sampler.model.parameters()) / sum(p.numel() for p in whole.parameters())
    runner = sampler._runner
    answer = {
        "held": held,
        "native": isinstance(runner, PoolRunner) and runner.native is not None,
        "pool": isinstance(runner, PoolRunner),
        "stats": {name: sampler.stats()[name] for name in ("steps", "forward_tokens", "prompt_hits")},
        "heads": [runner.shape.num_heads, whole.config.num_key_value_heads],
    }
    if ranks.is_first:
        alone = HFSampler(
            whole,
            max_num_seqs=rollout.get("max_num_seqs", 256),
            max_num_batched_tokens=rollout.get("max_num_batched_tokens", 8192),
            share_prompts=rollout.get("enable_prefix_caching", True),
            owns_model=True,
        )
        expected = sample(alone, wanted)
        answer["equal"] = difference(found, expected)
        answer["alone"] = {name: alone.stats()[name] for name in answer["stats"]}
    return answer


def plain_family(ranks, folder):
    return compared(ranks, folder)


def head_norms(ranks, folder):
    return compared(ranks, folder, "qwen3")


def softcaps_and_windows(ranks, folder):
    return compared(ranks, folder, "gemma2")


def tied_vocabulary_in_odd_parts(ranks, folder):
    return compared(ranks, folder, "qwen2-tied")


def few_seats_and_prompts_in_pieces(ranks, folder):
    return compared(ranks, folder, "llama", {"num_key_value_heads": 4}, max_num_seqs=4, max_num_batched_tokens=7)


def unshared_prompts(ranks, folder):
    return compared(ranks, folder, "mistral", enable_prefix_caching=False)


def experts(ranks, folder):
    return compared(ranks, folder, "qwen3_moe", MIXTURE)


def filtered_and_greedy(ranks, folder):
    wanted = requests(
        [prompt(7, 1), prompt(12, 2)],
        samples=4,
        max_tokens=9,
        temperature=[0.0, 0.7, 1.3],
        top_p=[1.0, 0.8],
        top_k=[-1, 5, 7],
        ignore_eos=True,
    )
    return compared(ranks, folder, wanted=wanted)


def fewer_key_value_heads_than_ranks(ranks, folder):
    """Both ranks hold the only key/value head."""
    return compared(ranks, folder, "qwen2", {"num_key_value_heads": 1})


def new_weights_whole_or_in_parts(ranks, folder):
    """Both ways of an update, and a sleep that frees the weights; afterwards the samples are the new model's."""
    return {
        family: updated(ranks, *(folder_of(ranks, folder, family, seed=seed, **config) for seed in (0, 1)))
        for family, config in (("qwen2", {}), ("qwen3_moe", MIXTURE))
    }


def updated(ranks, old, new):
    sampler, new = sharded(old, ranks), load_causal_lm(str(new))
    part = sampler._weights.part
    own = [(name, part.of(name, tensor)) for name, tensor in export_weights(new)]
    before = turn(sampler, lambda: sample(sampler, MIXED))
    asyncio.run(sampler.update_weights(chunk_weights(export_weights(new), 4096, 1), 1))
    whole = turn(sampler, lambda: sample(sampler, MIXED))
    asyncio.run(sampler.sleep(level=2))
    asyncio.run(sampler.wake())
    asyncio.run(sampler.update_weights(chunk_weights(own, 4096, 2), 2))
    parts = turn(sampler, lambda: sample(sampler, MIXED))
    if not ranks.is_first:
        return None
    expected = sample(HFSampler(new), MIXED)
    return [difference(found, expected) for found in (before, whole, parts)]


def requests_that_are_aborted_or_cancelled(ranks, folder):
    """Some leave while they run and while they wait; the others get what they would have got."""
    path = folder_of(ranks, folder, "qwen2")
    sampler = sharded(path, ranks, max_num_seqs=5)
    leaving = {request.id for request in MIXED[::4]}

    async def some_leave():
        tasks = {request.id: asyncio.ensure_future(sampler.generate(request)) for request in MIXED}
        for _ in range(6):
            await asyncio.sleep(0)
        gone = sorted(leaving)
        await sampler.abort(gone[:-2])
        for name in gone[-2:]:
            tasks[name].cancel()
        return await asyncio.gather(*tasks.values(), return_exceptions=True)

    found = turn(sampler, lambda: asyncio.run(some_leave()))
    again = turn(sampler, lambda: sample(sampler, MIXED))
    if not ranks.is_first:
        return {"steps": sampler.stats()["steps"]}
    expected = sample(HFSampler(load_causal_lm(str(path))), MIXED)
    stayed = [i for i, request in enumerate(MIXED) if request.id not in leaving]
    return {
        "stayed": difference([found[i] for i in stayed], [expected[i] for i in stayed]),
        "again": difference(again, expected),
        "steps": sampler.stats()["steps"],
    }


def broken_weights_end_the_requests_on_all_ranks(ranks, folder):
    """Logits that are not finite: the caller hears of it, and the group goes on."""
    sampler = sharded(folder_of(ranks, folder, "qwen2"), ranks)
    norm = sampler.model.model.norm.weight
    good = norm.data.clone()
    norm.data.fill_(torch.nan)

    def failing():
        try:
            sample(sampler, MIXED[:3])
        except VerlError as error:
            return str(error)
        return ""

    told = turn(sampler, failing)
    norm.data.copy_(good)
    fine = turn(sampler, lambda: len(sample(sampler, MIXED[:3])))
    return {"told": told, "fine": fine}


def refusals(ranks, folder):
    told = {}
    for name, (family, config, rollout) in {
        "determinism": ("qwen2", {}, {"full_determinism": True}),
        "heads": ("qwen2", {"num_attention_heads": 3, "num_key_value_heads": 3, "hidden_size": 24}, {}),
        "width": ("qwen2", {"intermediate_size": 45}, {}),
    }.items():
        try:
            sharded(folder_of(ranks, folder, family, **config), ranks, **rollout)
        except VerlError as error:
            told[name] = str(error)
    try:
        sampler = sharded(folder_of(ranks, folder, "qwen2"), ranks)
        if not ranks.is_first:
            sample(sampler, MIXED[:1])
    except VerlError as error:
        told["follower"] = str(error)
    return told


def ranks_in_another_order(ranks, folder):
    """A group whose second process holds the first part."""
    group = dist.new_group(list(range(ranks.size)))
    turned = Ranks(ranks.size - 1 - ranks.rank, ranks.size, group, order=list(reversed(range(ranks.size))))
    sampler = sharded(folder_of(ranks, folder, "qwen2"), turned)
    found = turn(sampler, lambda: sample(sampler, MIXED))
    if not sampler.leads:
        return []
    return difference(found, sample(HFSampler(load_causal_lm(str(folder / "qwen2"))), MIXED))
