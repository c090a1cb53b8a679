"""strategy=torchtitan is held against processes, models and packages before anything is allocated."""

from __future__ import annotations

import importlib.metadata
import importlib.util

import pytest

from tests.harness.configs import PPO, describe
from tests.sanity.test_packaging import pins
from verl.config import load_config
from verl.config.machine.pools import roles
from verl.config.rules.runs import parts_of, sequence_ranks
from verl.config.rules.validate_torchtitan import missing_or_other
from verl.config.schema.torchtitan import INSTALL
from verl.errors import ConfigError, NotBuiltError

A, M = "actor_rollout_ref.actor", "actor_rollout_ref.model"
TITAN = f"{A}.torchtitan"
T, COPIES = f"{TITAN}.tensor_parallel_size", f"{TITAN}.data_parallel_replicate_size"
PIPELINE, CONTEXT = f"{TITAN}.pipeline_parallel_size", f"{TITAN}.context_parallel_size"
EXPERTS = f"{TITAN}.expert_parallel_size"
LLAMA = {"model_type": "llama", "num_attention_heads": 8, "num_key_value_heads": 4, "num_hidden_layers": 6}
needs_titan = pytest.mark.skipif(importlib.util.find_spec("torchtitan") is None, reason="TorchTitan is not installed")


@pytest.fixture
def run(workplace):
    """The configuration of a run of eight processes whose model has the given facts."""

    def go(*words: str, facts=LLAMA):
        describe(facts)
        eight = ("trainer.device=cpu", "trainer.n_gpus_per_node=8", "model_engine=torchtitan")
        return load_config("ppo_trainer", [*PPO, *eight, *words])

    return go


@pytest.fixture
def tune(workplace, monkeypatch):
    """The same of a supervised program that torchrun started in four processes."""
    monkeypatch.setenv("WORLD_SIZE", "4")

    def go(*words: str, program: str = "sft_trainer"):
        describe(LLAMA)
        common = ["data.train_files=rows.parquet", "model.path=model", "trainer.device=cpu", "engine=torchtitan"]
        return load_config(program, [*common, *words])

    return go


MIXTURE = {"model_type": "qwen3_moe", "num_attention_heads": 8, "num_key_value_heads": 4, "num_hidden_layers": 6,
           "num_experts": 6}  # fmt: skip
REFUSED = {
    f"{T}=3": "8 process(es) cannot be shared by tensor_parallel_size 3. Got 3. Allowed: sizes whose product is one of",
    f"{T}=2 {COPIES}=8": "tensor_parallel_size 2 x data_parallel_replicate_size 8. Got 16. Allowed: sizes whose",
    f"{T}=2 {PIPELINE}=8": "cannot be shared by tensor_parallel_size 2 x pipeline_parallel_size 8. Got 16.",
    f"{T}=8": "4 KV heads cannot be split evenly over 8 processes. Got 8. Allowed: 1, 2, 4.",
    f"{T}=4 {CONTEXT}=4 trainer.n_gpus_per_node=16": "2 attention heads of a process cannot be exchanged for tokens",
    f"{PIPELINE}=8": "the model's 6 layers are fewer than its stages. Got 8. Allowed: 1 to 6.",
    f"{EXPERTS}=2": "a dense model has no experts to share. Got 2. Allowed: 1.",
    f"{EXPERTS}=3": "the 8 process(es) that hold a copy of the weights cannot share the experts evenly. Got 3.",
    f"{CONTEXT}=2 {M}.use_remove_padding=false": "shared only where rows are packed. Got 2.",
    f"{T}=0": "out of range. Got 0. Allowed: 1 or more.",
    f"{T}=2 {TITAN}.data_parallel_shard_size=8": "the other sizes leave 4 of 8 process(es). Got 8. Allowed: 4, -1.",
    f"{T}=2 {TITAN}.data_parallel_size=2": "the other sizes leave 4 of 8 process(es). Got 2. Allowed: 4, -1.",
}
NOT_BUILT = {
    f"{M}.lora_rank=8": f"{M}.lora_rank: an adapter is not built yet on TorchTitan's models",
    f"{M}.tiled_mlp.enabled=true": f"{M}.tiled_mlp: a tiled MLP is not built yet",
    f"{M}.use_fused_kernels=true": f"{M}.use_fused_kernels: a fused head is not built yet",
    "algorithm.adv_estimator=gae": "critic.strategy: a value model is not built yet",
}


@pytest.mark.parametrize("words", REFUSED)
def test_sizes_that_do_not_fit_are_refused_with_those_that_do(run, words):
    with pytest.raises(ConfigError) as caught:
        run(*words.split())
    assert REFUSED[words] in str(caught.value)


@pytest.mark.parametrize("words", NOT_BUILT)
def test_what_the_engine_has_not_is_refused_by_name(run, words):
    with pytest.raises(NotBuiltError) as caught:
        run(*words.split())
    assert NOT_BUILT[words] in str(caught.value)


def test_a_family_that_is_not_there_is_refused_with_those_that_are(run):
    with pytest.raises(
        NotBuiltError, match=r"model\.path: a model of the type 'qwen2' .* Allowed: llama, qwen3, qwen3_moe\."
    ):
        run(facts={**LLAMA, "model_type": "qwen2"})


def test_tied_embeddings_are_refused_beside_stages(run):
    with pytest.raises(NotBuiltError, match=r"pipeline_parallel_size: one weight for embedding and head"):
        run(f"{PIPELINE}=2", facts={**LLAMA, "tie_word_embeddings": True})


def test_experts_are_shared_whole_and_evenly(run):
    with pytest.raises(
        ConfigError, match=r"6 experts cannot be split evenly over 4 processes\. Got 4\. Allowed: 1, 2, 3, 6\."
    ):
        run(f"{EXPERTS}=4", facts=MIXTURE)
    with pytest.raises(NotBuiltError, match=r"experts cut by tensor-parallel ranks .* Set it to 2"):
        run(f"{T}=2", facts=MIXTURE)
    with pytest.raises(NotBuiltError, match=r"router_replay\.mode: replaying experts is not built yet"):
        run(f"{EXPERTS}=2", f"{A}.router_replay.mode=R2", "trainer.skip_old_log_prob=false", facts=MIXTURE)


@needs_titan
def test_stages_and_ranks_that_share_tokens_have_the_rows_of_one_part(run):
    cfg = run(f"{PIPELINE}=2", f"{CONTEXT}=2", f"{A}.use_kl_loss=true")
    assert {role.key: parts_of(role) for role in roles(cfg)} == {A: 2, "actor_rollout_ref.ref": 2}
    assert {sequence_ranks(role) for role in roles(cfg)} == {2}


@needs_titan
def test_tensor_parallel_ranks_share_the_rows_of_a_batch_and_the_reference_has_the_actors_sizes(run):
    cfg = run(f"{T}=4", f"{A}.use_kl_loss=true", f"{TITAN}.data_parallel_shard_size=2")
    assert {role.key: parts_of(role) for role in roles(cfg)} == {A: 2, "actor_rollout_ref.ref": 2}
    assert cfg.actor_rollout_ref.ref.torchtitan.tensor_parallel_size == 4


@needs_titan
def test_settings_of_another_backend_get_a_notice(run, told):
    run(f"{A}.fsdp_config.fsdp_size=2", f"{A}.megatron.tensor_model_parallel_size=2", f"{A}.use_torch_compile=true")
    said = told()
    assert f"its settings are {TITAN}" in said[f"{A}.fsdp_config.fsdp_size"]
    assert f"without {A}.strategy=megatron" in said[f"{A}.megatron.tensor_model_parallel_size"]
    assert f"{TITAN}.use_torch_compile has" in said[f"{A}.use_torch_compile"]


@needs_titan
def test_without_the_engine_its_settings_get_a_notice(run, told):
    run(f"{A}.strategy=fsdp2", f"{T}=2")
    assert f"without {A}.strategy=torchtitan" in told()[T]


@needs_titan
def test_a_supervised_run_has_its_settings_below_the_engine(tune, told):
    cfg = tune("engine.torchtitan.tensor_parallel_size=2", "engine.dtype=float32", "engine.fsdp_size=2")
    assert (cfg.engine.strategy, cfg.engine.torchtitan.dtype) == ("torchtitan", "float32")
    assert "its settings are engine.torchtitan" in told()["engine.fsdp_size"]
    with pytest.raises(ConfigError, match=r"4 process\(es\) cannot be shared by tensor_parallel_size 3"):
        tune("engine.torchtitan.tensor_parallel_size=3")


@pytest.mark.parametrize("program", ["dpo_trainer", "rm_trainer"])
def test_training_on_pairs_is_refused(tune, program):
    with pytest.raises(NotBuiltError, match=r"engine\.strategy: training on pairs of answers is not built yet"):
        tune(program=program)


def test_a_missing_package_or_another_version_is_an_error_with_the_line_that_installs_it(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "tyro" else True)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.2.1")
    assert INSTALL in str(missing_or_other("k")[0]) and "tyro is missing" in str(missing_or_other("k")[0])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True)
    assert "Got 'torchtitan 0.2.1'. Allowed: 0.3.x." in str(missing_or_other("k")[0])


def test_the_line_that_installs_it_has_the_pins():
    named = dict(word.split("==") for word in INSTALL.split() if "==" in word)
    assert named and named == {name: version for name, version in pins().items() if name in named}
