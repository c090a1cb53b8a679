"""Batches are cut into as many parts as there are copies of a model, and a row has the budgets of all that share it."""

from __future__ import annotations

import pytest

from tests.harness.configs import PPO, changed, describe, refused
from verl.config import load_config
from verl.metrics import notices, reset_notices

A, R, REF = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.ref"
ULYSSES = "ulysses_sequence_parallel_size"
EIGHT = ["trainer.device=cpu", "trainer.n_gpus_per_node=8"]
LONG = ["data.max_prompt_length=2048", "data.max_response_length=2048"]  # 4096 tokens


@pytest.fixture
def files(workplace):
    describe({"num_attention_heads": 8, "num_key_value_heads": 8, "num_hidden_layers": 8})


@pytest.fixture
def run(files):
    usual = changed(PPO, f"{R}.n=2", "data.train_batch_size=4", f"{A}.ppo_mini_batch_size=1")
    return lambda *words: load_config("ppo_trainer", [*usual, *words])


def test_processes_of_one_megatron_model_get_the_same_samples(run):
    """Two samples per mini-batch: enough for eight processes that hold two copies, not for four copies."""
    megatron = [*EIGHT, f"{A}.strategy=megatron", f"{A}.megatron.tensor_model_parallel_size=2"]
    run(*megatron, f"{A}.megatron.pipeline_model_parallel_size=2")
    assert f"{A}.ppo_mini_batch_size" not in notices()
    run(*megatron)
    said = notices()[f"{A}.ppo_mini_batch_size"]
    assert f"1 prompts x {R}.n = 2 samples do not divide by 4 groups, of 2 processes each that compute the same" in said
    fields = f"{A}.megatron.override_mcore_model_config"
    said = refused(run, *megatron, f"+{fields}.moe_z_loss_coeff=1e-3")
    assert "= 2 samples cannot be shared evenly by 4 groups" in said and "Got 1." in said


def test_so_do_peers_that_share_sequences(run):
    for words, said in (
        ([f"{A}.strategy=fsdp2"], "= 2 samples do not divide by 8 processes"),
        ([f"{A}.strategy=fsdp2", f"{A}.fsdp_config.{ULYSSES}=4"], None),
        ([f"{A}.fsdp_config.{ULYSSES}=2"], "by 4 groups, of 2 processes each"),
    ):
        reset_notices()
        run(*EIGHT, *words)
        assert (said or "") in notices().get(f"{A}.ppo_mini_batch_size", "")
        assert said or f"{A}.ppo_mini_batch_size" not in notices()


def test_a_reference_may_have_more_processes_than_samples(run):
    """Eight samples in the batch: for eight processes of FSDP2 and, as its passes fill up themselves, for sixteen."""
    words = [f"{A}.use_kl_loss=true", f"{A}.strategy=megatron", f"{REF}.strategy=fsdp2", "trainer.device=cpu",
             f"{A}.megatron.tensor_model_parallel_size=8"]  # fmt: skip
    run(*words, "trainer.n_gpus_per_node=8")
    run(*words, "trainer.n_gpus_per_node=16")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (f"{A}.ppo_max_token_len_per_gpu", [f"{A}.use_dynamic_bsz=true", f"{A}.fsdp_config.{ULYSSES}=4"]),
        (f"{A}.ppo_max_token_len_per_gpu",
         [f"{A}.use_dynamic_bsz=true", f"{A}.strategy=megatron", f"{A}.megatron.context_parallel_size=4"]),
        (f"{R}.log_prob_max_token_len_per_gpu", [f"{R}.log_prob_use_dynamic_bsz=true", f"{A}.fsdp_config.{ULYSSES}=4"]),
        (f"{REF}.log_prob_max_token_len_per_gpu",
         [f"{REF}.log_prob_use_dynamic_bsz=true", f"{A}.use_kl_loss=true", f"{REF}.fsdp_config.{ULYSSES}=4"]),
        ("critic.ppo_max_token_len_per_gpu",
         ["critic.use_dynamic_bsz=true", "critic.enable=true", f"critic.fsdp.{ULYSSES}=4",
          "critic.forward_max_token_len_per_gpu=4096"]),
        ("critic.forward_max_token_len_per_gpu",
         ["critic.use_dynamic_bsz=true", "critic.enable=true", f"critic.fsdp.{ULYSSES}=4"]),
        ("reward.reward_model.forward_max_token_len_per_gpu",
         ["reward.reward_model.enable=true", "reward.reward_model.model_path=model",
          "reward.reward_model.use_dynamic_bsz=true", f"reward.reward_model.fsdp_config.{ULYSSES}=4"]),
    ],
)  # fmt: skip
def test_a_token_budget_is_that_of_one_process_of_those_that_share_a_row(run, name, words):
    """A row of 4096 tokens over 4 processes needs 1024 from each."""
    common = [*EIGHT, *LONG, f"{A}.ppo_mini_batch_size=4", *words]
    run(*common, f"{name}=1024")
    said = refused(run, *common, f"{name}=1023")
    assert f"{name}: one row may have " in said and "= 4096 tokens, which do not fit" in said
    assert f"into a micro-batch of 4 processes that share it. Got 1023. Allowed: 1024 or more. Set {name}=1024." in said


def test_a_supervised_budget_too(files, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    words = ["data.train_files=rows.parquet", "data.val_files=rows.parquet", "model.path=model", "trainer.device=cpu",
             "data.max_length=1000", f"engine.{ULYSSES}=2"]  # fmt: skip
    load_config("sft_trainer", [*words, "data.max_token_len_per_gpu=500"])
    assert "Allowed: 500 or more." in refused(
        lambda *more: load_config("sft_trainer", [*words, *more]), "data.max_token_len_per_gpu=499"
    )
    load_config("dpo_trainer", [*words, "data.max_token_len_per_gpu=1000"])
    assert "two rows of data.max_length = 2000" in refused(
        lambda *more: load_config("dpo_trainer", [*words, *more]), "data.max_token_len_per_gpu=999"
    )


def test_groups_that_share_something_divide_the_processes(run):
    key = f"{A}.fsdp_config.{ULYSSES}"
    assert f"{key}: one process cannot share its sequences with others. Got 2." in refused(run, f"{key}=2")
    said = refused(run, *EIGHT, f"{key}=3")
    assert f"{key}: 8 processes do not divide into groups of 3 that share their sequences" in said
    assert "Allowed: 1, 2, 4, 8." in said
