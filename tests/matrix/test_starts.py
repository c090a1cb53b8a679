"""A configuration resolves if and only if it starts: engines, samplers, sizes and features against each other.

Every cell is read twice: once as a program reads it, and once with the rules between settings left out, so that what is
built says for itself what it cannot do. Both must agree. Of all combinations of values that work alone the cells cover
each pair; each value that does not work stands alone or with what makes it wrong.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from tests.harness.ranks import run_cells
from tests.matrix.cells import outcomes

M = "engine.megatron"
SHIM = "model.external_lib=tests.megatron.shim"
FSDP2, MEGATRON = ("engine.strategy=fsdp2",), ("engine.strategy=megatron", SHIM)
WORKING = {
    "engine": {"fsdp2": FSDP2, "megatron": MEGATRON},
    "model": {"dense": ("model.path=@dense",), "mixture": ("model.path=@experts",)},
    "shared": {
        "nothing": (),
        "linear layers": (f"{M}.tensor_model_parallel_size=2",),
        "depth or rows": ("engine.ulysses_sequence_parallel_size=2", f"{M}.pipeline_model_parallel_size=2"),
    },
    "adapter": {"none": (), "some": ("model.lora_rank=4", "model.target_modules=[q_proj]")},
    "optimizer": {"AdamW": (), "SGD": ("optim.optimizer=SGD",)},
    "memory": {
        "usual": (),
        "offloaded": ("engine.optimizer_offload=true", f"{M}.optimizer_offload=true"),
        "again": ("model.enable_gradient_checkpointing=true",
                  f"{M}.override_transformer_config.recompute_granularity=selective"),
    },
    "batch": {"by tokens": (), "by rows": ("data.use_dynamic_bsz=false", "data.micro_batch_size_per_gpu=1")},
}  # fmt: skip
"""Factor -> value -> the settings that mean it; those of the other engine have no effect."""
DENSE, MIXTURE = "model.path=@dense", "model.path=@experts"
ONE_KV, ODD = "model.path=@one_kv", "model.path=@odd_heads"
U, E = "engine.ulysses_sequence_parallel_size=2", "engine.expert_parallel_size=2"
EDGES = [
    *((model, *FSDP2, size) for model in (ONE_KV, ODD) for size in (U,)),
    (DENSE, *FSDP2, E), (MIXTURE, *FSDP2, E), (ONE_KV, *FSDP2, E),
    (MIXTURE, *FSDP2, U, E), (MIXTURE, *FSDP2, E, "model.lora_rank=4"),
    (MIXTURE, *FSDP2, E, "engine.fsdp_size=1"),
    (DENSE, *FSDP2, U, "engine.fsdp_size=1"), (DENSE, *FSDP2, U, "model.use_remove_padding=false"),
    (MIXTURE, *FSDP2, U, "model.lora_rank=4"),
    *((DENSE, *FSDP2, f"optim.optimizer={name}")
      for name in ("Adafactor", "Rprop", "Muon", "LBFGS", "adam", "Adagrad")),
    *((DENSE, *MEGATRON, f"optim.optimizer={name}") for name in ("Adafactor", "adam", "Rprop", "Muon")),
    (DENSE, *FSDP2, "optim.override_optimizer_config={nope: 1}"),
    (DENSE, *FSDP2, "optim.optimizer_impl=tests.harness.models"),
    *((DENSE, *FSDP2, f"+model.override_config.attn_implementation={name}")
      for name in ("eager", "flash_attention_2", "flex_attention", "nonsense")),
    (DENSE, *FSDP2, "model.use_liger=true"), (DENSE, *FSDP2, "engine.dtype=float16"),
    (DENSE, *FSDP2, "model.use_fused_kernels=true", "model.fused_kernel_options.impl_backend=triton"),
    (DENSE, *FSDP2, "model.lora_rank=4", "model.lora_adapter_path=/no/adapter"),
    *((model, *MEGATRON, f"{M}.{size}") for model, size in (
        (ONE_KV, "tensor_model_parallel_size=2"), (ODD, "tensor_model_parallel_size=2"),
        (ONE_KV, "pipeline_model_parallel_size=2"), (DENSE, "tensor_model_parallel_size=3"),
        (DENSE, "expert_model_parallel_size=2"), (MIXTURE, "expert_model_parallel_size=2"),
        (DENSE, "virtual_pipeline_model_parallel_size=2"))),
    *((DENSE, *MEGATRON, f"{M}.pipeline_model_parallel_size=2", f"{M}.virtual_pipeline_model_parallel_size={n}")
      for n in (1, 2)),
    (MIXTURE, *MEGATRON, "model.lora_rank=4"),
]  # fmt: skip
"""Sizes that divide and sizes that do not, and what an engine has and has not."""
OTHERWISE = [
    (DENSE, "engine.strategy=plain"), (DENSE, *FSDP2, "engine.model_dtype=fp16"), (DENSE, *MEGATRON, f"{M}.dtype=fp16"),
]  # fmt: skip
"""Refused though a step would run: every process would train alone, or gradients vanish."""
R, A, P = "actor_rollout_ref.rollout", "actor_rollout_ref.actor", "actor_rollout_ref.model.path=@dense"
GRPO = ("algorithm.adv_estimator=grpo", f"{R}.n=2", P)
ALONE = [
    ("algorithm.adv_estimator=gae", "critic.model.path=@dense", P), GRPO, (*GRPO, f"{A}.strategy=fsdp2"),
    (*GRPO, f"{A}.use_kl_loss=true", f"{A}.optim.optimizer=Adafactor"), (*GRPO, f"{A}.optim.optimizer=Muon"),
    (*GRPO, f"{R}.name=vllm"), (*GRPO, f"{R}.name=sglang"), (*GRPO, f"{A}.policy_loss.loss_mode=gspo"),
    (*GRPO, f"{A}.fsdp_config.ulysses_sequence_parallel_size=2"), (*GRPO, "actor_rollout_ref.model.use_liger=true"),
]  # fmt: skip
ASKED_OTHERWISE = [
    (*GRPO, f"{A}.ppo_mini_batch_size=3"), (*GRPO, f"{R}.n=1"), (*GRPO, f"{R}.tensor_model_parallel_size=2"),
]  # fmt: skip
"""Refused though one process would run a step: of another batch, without a baseline, without the peers."""


def pairs(factors: dict[str, dict[str, tuple[str, ...]]]) -> list[dict[str, str]]:
    """Few choices of a value for each factor in which every two values of two factors meet."""
    open_pairs = {
        frozenset({(one, a), (two, b)})
        for one, two in itertools.combinations(factors, 2)
        for a, b in itertools.product(factors[one], factors[two])
    }
    every = [dict(zip(factors, values)) for values in itertools.product(*factors.values())]
    chosen = []
    while open_pairs:
        best = max(every, key=lambda cell: len(_met(cell) & open_pairs))
        chosen.append(best)
        open_pairs -= _met(best)
    return chosen


def _met(cell: dict[str, str]) -> set[frozenset[tuple[str, str]]]:
    return {frozenset(two) for two in itertools.combinations(cell.items(), 2)}


def words_of(cell: dict[str, str]) -> tuple[str, ...]:
    """The settings of a choice; an engine gets its own sizes alone, so that the words say what is asked of it."""
    words = [word for factor, value in cell.items() for word in WORKING[factor][value]]
    is_megatron = cell["engine"] == "megatron"
    sizes = [word for word in words if word.startswith("engine.") and not word.startswith("engine.strategy")]
    left_out = {word for word in sizes if word.startswith(M) != is_megatron}
    return tuple(word for word in words if word not in left_out)


def ran(folder: Path, size: int, cells: list[tuple[str, tuple[str, ...], bool]]) -> list[list[str | None]]:
    folder.mkdir()
    (folder / "cells.json").write_text(json.dumps(cells))
    by_rank = run_cells(size, [outcomes], folder)["outcomes"]
    assert all([bool(why) for why in two] == [bool(why) for why in one]
               for answers in by_rank for one, two in zip(by_rank[0], answers))  # fmt: skip
    return by_rank[0]


def disagreeing(cells, answers) -> list[str]:
    told = []
    for (_, words, starts), (refused, failed) in zip(cells, answers):
        if (refused is None) != (failed is None) if starts else refused is None:
            told.append(f"{' '.join(words)}\n    refused: {refused}\n    fails: {failed}")
    return told


@pytest.mark.slow
def test_what_resolves_starts_and_what_is_refused_does_not_on_two_ranks(tmp_path):
    covering = pairs(WORKING)
    chosen = [words_of(cell) for cell in covering]
    cells = [("sft_trainer", words, True) for words in (*chosen, *EDGES)]
    cells += [("sft_trainer", words, False) for words in OTHERWISE]
    answers = ran(tmp_path / "two", 2, cells)
    refused = sum(why is not None for why, _ in answers)
    possible = len(list(itertools.product(*WORKING.values())))
    print(f"\n{len(cells)} cells on 2 ranks: {len(cells) - refused} resolve and start, {refused} are refused; "
          f"{len(chosen)} of them meet every pair of the {possible} combinations")  # fmt: skip
    assert disagreeing(cells, answers) == []
    assert len(cells) >= 50 and refused >= 25


@pytest.mark.slow
def test_what_resolves_starts_and_what_is_refused_does_not_in_one_process(tmp_path):
    cells = [("ppo_trainer", words, True) for words in ALONE]
    cells += [("ppo_trainer", words, False) for words in ASKED_OTHERWISE]
    answers = ran(tmp_path / "one", 1, cells)
    refused = sum(why is not None for why, _ in answers)
    print(f"\n{len(cells)} cells in 1 process: {len(cells) - refused} resolve and start, {refused} are refused")
    assert disagreeing(cells, answers) == []
    assert refused == 7


def test_the_covering_choice_meets_every_pair_of_values():
    chosen = pairs(WORKING)
    for one, two in itertools.combinations(WORKING, 2):
        met = {(cell[one], cell[two]) for cell in chosen}
        assert met == set(itertools.product(WORKING[one], WORKING[two]))
    assert len(chosen) < 16
