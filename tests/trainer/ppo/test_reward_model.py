"""A reward model as a role of PPO: its scores, its own tokens, what a function makes of them, and what is refused."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from tests.harness.models import tiny_model_dir
from tests.harness.reward_models import direct_score, judge, reward_model_dir
from tests.harness.rows import write_prompts
from tests.harness.runs import train
from verl.config import load_config
from verl.errors import ConfigError, VerlError
from verl.metrics import notices
from verl.trainer import placement

ALONE = "reward.custom_reward_function.path=null"
ON = "reward_model.enable=true"


def sampled_ids(batch, row: int) -> list[int]:
    """Prompt and response of a row without padding."""
    kept = batch.tensors["attention_mask"][row].bool()
    return batch.tensors["input_ids"][row][kept].tolist()


def test_the_score_behind_the_last_token_is_the_reward_and_stands_on_that_token(here):
    folder = reward_model_dir("rm")
    seen = train(ALONE, ON, "reward_model.model.path=rm", "data.val_files=train.parquet", "trainer.test_freq=1")
    (batch,) = seen.batches
    scores, mask = batch.tensors["token_level_scores"], batch.tensors["response_mask"]
    for row in range(len(batch)):
        last = int(mask[row].nonzero()[-1])
        assert scores[row].nonzero().flatten().tolist() == [last]
        assert scores[row, last].item() == pytest.approx(direct_score(folder, sampled_ids(batch, row)), abs=1e-5)
    (metrics,) = seen.metrics
    assert metrics["reward_model/score/mean"] == pytest.approx(scores.sum(-1).mean().item(), abs=1e-5)
    assert metrics["reward_model/score/min"] == pytest.approx(scores.sum(-1).min().item(), abs=1e-6)
    assert metrics["reward_model/failed"] == 0 and "reward_model/truncated" not in metrics
    validated, _ = seen.trainer.validator.run(seen.trainer.roles, 1)
    assert validated["val-core/test/addition/reward/mean@1"] == pytest.approx(
        validated["val-aux/test/addition/rm_score/mean@1"]
    )


def test_micro_batches_and_packing_change_nothing_but_rounding(here):
    reward_model_dir("rm")
    common = (ALONE, ON, "reward_model.model.path=rm")
    whole = train(*common).batches[0].tensors["token_level_scores"]
    for changes in (
        ["reward_model.micro_batch_size_per_gpu=3", "reward_model.model.use_remove_padding=false"],
        ["reward_model.use_dynamic_bsz=true", "reward_model.forward_max_token_len_per_gpu=80"],
    ):
        other = train(*common, *changes).batches[0].tensors["token_level_scores"]
        torch.testing.assert_close(other, whole, atol=1e-5, rtol=1e-5)


def test_a_model_with_a_tokenizer_of_its_own_reads_the_conversation_in_its_chat_template(here):
    folder = reward_model_dir("rm", own_tokenizer=True)
    seen = train(ALONE, ON, "reward_model.model.path=rm", "reward_model.model.input_tokenizer=model")
    (batch,) = seen.batches
    policy, own = AutoTokenizer.from_pretrained("model"), AutoTokenizer.from_pretrained("rm")
    assert policy.encode("7") != own.encode("7")
    for row in range(len(batch)):
        question = batch.non_tensor_batch["raw_prompt"][row][0]["content"]
        there = batch.tensors["response_mask"][row].bool()
        answer = policy.decode(batch.tensors["responses"][row][there], skip_special_tokens=True)
        text = f"user: {question}<|im_end|>assistant: {answer}<|im_end|>"
        expected = direct_score(folder, own.encode(text, add_special_tokens=False))
        assert batch.tensors["token_level_scores"][row].sum().item() == pytest.approx(expected, abs=1e-5)
    assert "rendered again" in notices()["reward.reward_model"]
    assert seen.metrics[0]["reward_model/truncated"] == 0


def test_a_conversation_that_is_too_long_for_the_model_is_cut_in_front_and_counted(here):
    folder = reward_model_dir("rm", own_tokenizer=True)
    seen = train(ALONE, ON, "reward_model.model.path=rm", "reward_model.max_length=6")
    (batch,) = seen.batches
    assert seen.metrics[0]["reward_model/truncated"] == len(batch)
    policy, own = AutoTokenizer.from_pretrained("model"), AutoTokenizer.from_pretrained("rm")
    there = batch.tensors["response_mask"][0].bool()
    answer = policy.decode(batch.tensors["responses"][0][there], skip_special_tokens=True)
    ids = own.encode(f"assistant: {answer}<|im_end|>", add_special_tokens=False)[-6:]
    assert batch.tensors["token_level_scores"][0].sum().item() == pytest.approx(direct_score(folder, ids), abs=1e-5)


def test_a_function_of_the_user_reads_the_score_and_has_the_last_word(here):
    reward_model_dir("rm")
    Path("scorer.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return {'score': 2 * extra_info['rm_score'] + 1, 'length': len(solution_str)}\n"
    )
    (batch,) = train(ON, "reward_model.model.path=rm").batches
    rewards, scores = batch.tensors["token_level_scores"].sum(-1), batch.tensors["rm_scores"].sum(-1)
    torch.testing.assert_close(rewards, 2 * scores + 1, atol=1e-5, rtol=1e-5)
    assert batch.non_tensor_batch["rm_score"].tolist() == pytest.approx(scores.tolist(), abs=1e-6)


def test_the_overlong_penalty_of_dapo_falls_on_the_models_score(here):
    reward_model_dir("rm")
    penalty = "+reward.reward_kwargs.overlong_buffer_cfg={enable: true, len: 4, penalty_factor: 2.0}"
    changes = ("reward.reward_manager.name=dapo", penalty, "actor_rollout_ref.rollout.ignore_eos=true")
    (batch,) = train(ALONE, ON, "reward_model.model.path=rm", *changes).batches
    paid = batch.tensors["token_level_scores"].sum(-1) - batch.tensors["rm_scores"].sum(-1)
    torch.testing.assert_close(paid, torch.full_like(paid, -2.0), atol=1e-5, rtol=0)


def test_a_score_that_is_no_number_takes_its_sample_out_of_the_batch(here):
    """One weight of the embedding of a letter is NaN: only conversations with that letter are lost."""
    folder = reward_model_dir("rm")
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tokenizer = AutoTokenizer.from_pretrained("rm")
    (letter,) = tokenizer.encode("3", add_special_tokens=False)
    tensors["model.embed_tokens.weight"][letter, 0] = math.nan
    save_file(tensors, file, metadata={"format": "pt"})
    write_prompts("train.parquet", [_row("3"), _row("4"), _row("5"), _row("6")])
    seen = train(ALONE, ON, "reward_model.model.path=rm", "data.shuffle=false")
    (batch,), (metrics,) = seen.batches, seen.metrics
    lost = batch.non_tensor_batch["unscorable"].astype(bool)
    hit = [letter in sampled_ids(batch, row) for row in range(len(batch))]
    assert lost.tolist() == hit and 4 <= sum(hit) < len(batch)
    assert metrics["reward_model/failed"] == sum(hit)
    assert batch.tensors["response_mask"][torch.tensor(hit)].sum() == 0
    assert batch.tensors["advantages"].isfinite().all()


def _row(text: str) -> dict:
    return {
        "data_source": "test",
        "prompt": [{"role": "user", "content": text}],
        "reward_model": {"style": "rule", "ground_truth": "0"},
    }


ASKING = """import json
import urllib.request


def compute_score(data_source, solution_str, ground_truth, extra_info=None, reward_router_address=None):
    body = {"model": "judge", "messages": [{"role": "user", "content": "Grade: " + solution_str}]}
    request = urllib.request.Request(f"http://{reward_router_address}/v1/chat/completions",
                                     json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=10) as answer:
        return float(json.load(answer)["choices"][0]["message"]["content"])
"""
WITH_TOKENIZER = """async def compute_score(data_source, solution_str, ground_truth, extra_info=None,
                        reward_router_address=None, reward_model_tokenizer=None):
    assert ":" in reward_router_address
    return float(len(reward_model_tokenizer.encode(solution_str)))
"""


def test_a_language_model_on_a_server_judges_through_the_users_function(here):
    Path("scorer.py").write_text(ASKING)
    with judge("0.75") as (url, asked):
        served = (ON, "reward_model.rollout.name=server", f"reward.reward_model.rollout.server.url={url}")
        (batch,) = train(*served).batches
        assert batch.tensors["token_level_scores"].sum(-1).tolist() == [0.75] * 16
        assert len(asked) == 16 and asked[0]["messages"][0]["content"].startswith("Grade: ")
        Path("scorer.py").write_text(WITH_TOKENIZER)
        seen = train(*served, "reward.reward_model.model_path=model")
    assert "rm" not in seen.trainer.roles
    assert seen.batches[0].tensors["token_level_scores"].sum(-1).max() > 1


RM = "reward.reward_model"


@pytest.mark.parametrize(
    "changes, key, words",
    [
        ([ON], f"{RM}.model_path", "needs a folder"),
        ([ON, f"{RM}.model_path=model"], f"{RM}.model_path", "without a scalar head"),
        ([ON, f"{RM}.model_path=rm", f"{RM}.strategy=veomni"], f"{RM}.strategy", "veomni"),
        ([ON, f"{RM}.model_path=rm", f"{RM}.strategy=megatron", f"{RM}.megatron.tensor_model_parallel_size=2"],
         f"{RM}.megatron.tensor_model_parallel_size", "1 process(es) cannot be cut"),
        ([ON, f"{RM}.model_path=rm", f"{RM}.micro_batch_size_per_gpu=0"],
         f"{RM}.micro_batch_size_per_gpu", "1 or more"),
        ([ON, f"{RM}.model_path=rm", f"{RM}.use_dynamic_bsz=true", f"{RM}.forward_max_token_len_per_gpu=10"],
         f"{RM}.forward_max_token_len_per_gpu", "72"),
        ([ON, f"{RM}.model_path=rm", f"{RM}.enable_resource_pool=true"], f"{RM}.nnodes", "1 or more"),
        ([ON, f"{RM}.rollout.name=server"], f"{RM}.rollout.server.url", "needs the address"),
        ([ON, f"{RM}.rollout.name=server", f"{RM}.rollout.server.url=http://h:1", ALONE],
         "reward.custom_reward_function.path", "a function that queries it"),
        ([ON, f"{RM}.rollout.name=nothing"], f"{RM}.rollout.name", "unknown value"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_said_before_anything_is_loaded(here, changes, key, words):
    reward_model_dir("rm")
    with pytest.raises(ConfigError) as raised:
        train(*changes)
    assert key in str(raised.value) and words in str(raised.value)


JUDGE = (ON, f"{RM}.rollout.name=hf_server", f"{RM}.model_path=model")
POOL = (f"{RM}.enable_resource_pool=true", f"{RM}.nnodes=1")
TENSOR = f"{RM}.rollout.tensor_model_parallel_size"


@pytest.mark.parametrize(
    "changes, key, words",
    [
        ([*JUDGE, ALONE], "reward.custom_reward_function.path", "a function that queries it"),
        ([*JUDGE, f"{RM}.model_path=null"], f"{RM}.model_path", "a judge needs a folder"),
        ([*JUDGE, f"{RM}.model_path=rm"], f"{RM}.model_path", "has a scalar head"),
        ([*JUDGE, f"{RM}.rollout.server.url=http://h:1"], f"{RM}.rollout.server.url", "the run starts the servers"),
        ([*JUDGE, f"{TENSOR}=2"], TENSOR, "holds a model in one process"),
        ([*JUDGE, f"{RM}.rollout.engine_kwargs={{trt: {{a: 1}}}}"], f"{RM}.rollout.engine_kwargs.trt", "no engine"),
        ([*JUDGE, f"{RM}.rollout.pipeline_model_parallel_size=2"], "pipeline_model_parallel_size", "not built"),
        ([*JUDGE, *POOL, f"{RM}.nnodes=2"], f"{RM}.nnodes", "on several machines"),
        ([*JUDGE, *POOL, f"{RM}.n_gpus_per_node=3", f"{RM}.rollout.data_parallel_size=2"], f"{RM}.n_gpus_per_node",
         "cannot be shared out"),
        ([*JUDGE, "reward.while_sampling=true", "trainer.nnodes=2", "trainer.runtime=ray"], "reward.while_sampling",
         "on 2 machines"),
        ([*JUDGE, f"{RM}.rollout.name=sglang"], f"{RM}.rollout.name", "SGLang is not installed"),
    ],
)  # fmt: skip
def test_a_judge_that_a_run_cannot_start_is_refused_with_the_reason(here, changes, key, words):
    reward_model_dir("rm")
    with pytest.raises(ConfigError) as raised:
        train(*changes)
    assert key in str(raised.value) and words in str(raised.value)


def test_its_settings_without_it_give_one_notice(here):
    train("reward_model.strategy=fsdp2", "trainer.total_training_steps=1")
    assert "has no effect without reward.reward_model.enable=true" in notices()[f"{RM}.strategy"]


def test_it_lives_with_the_others_or_in_a_pool_of_its_own(here):
    reward_model_dir("rm")
    words = ["data.train_files=train.parquet", "actor_rollout_ref.model.path=model", ON, f"{RM}.model_path=rm",
             "algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=4", "data.train_batch_size=4",
             "actor_rollout_ref.actor.ppo_mini_batch_size=4", "trainer.device=cpu"]  # fmt: skip

    def sizes(config):
        return {pool.name: pool.size for pool in placement.topology_of(config).pools}

    shared = load_config("ppo_trainer", words)
    assert sizes(shared) == {"global_pool": 1}
    own = load_config(
        "ppo_trainer", [*words, f"{RM}.enable_resource_pool=true", f"{RM}.nnodes=1", f"{RM}.n_gpus_per_node=2"]
    )
    assert sizes(own) == {"global_pool": 1, "reward_pool": 2}
    named = load_config("ppo_trainer", [*words, "+trainer.resource_pools.judges={roles: [rm], processes: [1]}"])
    assert sizes(named) == {"global_pool": 1, "judges": 1}


def test_a_folder_of_several_labels_is_refused(here):
    tiny_model_dir("rm")
    from transformers import AutoConfig, AutoModelForTokenClassification

    AutoModelForTokenClassification.from_config(AutoConfig.from_pretrained("rm", num_labels=3)).save_pretrained("rm")
    with pytest.raises(VerlError):
        train(ALONE, ON, "reward_model.model.path=rm")
