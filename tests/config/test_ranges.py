"""Every number of a configuration has a range, and is refused with it."""

import pytest

from tests.config.test_validate import REF, A, R, changed
from tests.config.test_validate import files as files
from tests.config.test_validate import machine as machine
from tests.config.test_validate import read_ppo as read_ppo
from tests.config.test_validate import read_sft as read_sft
from tests.config.test_validate import usual as usual
from tests.config.test_validate import usual_sft as usual_sft
from verl.config.rules.supervised import validate_sft
from verl.config.rules.validate import validate

NUMBERS = [
    ("data.train_batch_size", 0, "1 or more"),
    ("data.max_prompt_length", 0, "1 or more"),
    ("data.max_response_length", 0, "1 or more"),
    ("data.val_batch_size", 0, "1 or more"),
    ("data.dataloader_num_workers", -1, "0 or more"),
    ("skip.rollout.steps", [0], "a list of steps, each 1 or more"),
    ("data.min_response_length", -1, "0 to data.max_response_length"),
    ("data.min_response_length", 10**9, "0 to data.max_response_length"),
    (f"{R}.repetition_penalty", 0, "above 0"),
    ("data.filter_overlong_prompts_workers", 0, "1 or more"),
    ("data.train_max_samples", 0, "-1 for all rows"),
    ("data.val_max_samples", -2, "-1 for all rows"),
    (f"{A}.ppo_mini_batch_size", 0, "1 or more"),
    (f"{A}.ppo_epochs", 0, "1 or more"),
    (f"{A}.ppo_micro_batch_size_per_gpu", 0, "1 or more"),
    (f"{A}.ppo_max_token_len_per_gpu", 0, "1 or more"),
    (f"{A}.clip_ratio", 0, "above 0"),
    (f"{A}.clip_ratio_low", -0.1, "above 0"),
    (f"{A}.clip_ratio_high", 0, "above 0"),
    (f"{A}.clip_ratio_c", 1, "above 1"),
    (f"{A}.grad_clip", 0, "above 0"),
    (f"{A}.kl_loss_coef", -1, "0 or more"),
    (f"{A}.loss_scale_factor", 0, "above 0"),
    (f"{A}.optim.lr", -1e-06, "0 or more"),
    (f"{A}.optim.weight_decay", -1, "0 or more"),
    (f"{A}.optim.betas", [0.9], "two numbers"),
    (f"{A}.optim.betas", [0.9, 1.0], "below 1"),
    (f"{A}.optim.lr_warmup_steps", -2, "-1 or more"),
    (f"{A}.optim.lr_warmup_steps_ratio", 1.5, "0 to 1"),
    (f"{A}.optim.min_lr_ratio", 2, "0 to 1"),
    (f"{A}.optim.num_cycles", 0, "above 0"),
    (f"{A}.optim.clip_grad", 0, "above 0"),
    (f"{A}.fsdp_config.dtype", "fp8", "bfloat16"),
    (f"{A}.fsdp_config.model_dtype", "auto", "fp32"),
    (f"{REF}.log_prob_micro_batch_size_per_gpu", 0, "1 or more"),
    (f"{REF}.fsdp_config.dtype", "int8", "bfloat16"),
    (f"{R}.n", 0, "1 or more"),
    (f"{R}.n", 10**9, "at most 65536"),
    (f"{R}.temperature", 0, "do_sample=false is greedy"),
    (f"{R}.top_p", 0, "at most 1"),
    (f"{R}.top_k", -2, "-1 for all tokens"),
    (f"{R}.max_num_seqs", 0, "1 or more"),
    (f"{R}.max_num_batched_tokens", 0, "1 or more"),
    (f"{R}.checkpoint_engine.update_weights_bucket_megabytes", 0, "1 or more"),
    (f"{R}.dtype", "float33", "float32"),
    (f"{R}.val_kwargs.n", 0, "1 or more"),
    (f"{R}.val_kwargs.n", 10**9, "at most 65536"),
    (f"{R}.val_kwargs.top_p", 1.5, "at most 1"),
    (f"{R}.val_kwargs.temperature", -1, "0 or more"),
    ("critic.ppo_epochs", 0, "1 or more"),
    ("critic.cliprange_value", 0, "above 0"),
    ("critic.optim.lr", -1, "0 or more"),
    ("critic.fsdp.model_dtype", "x", "fp32"),
    ("algorithm.gamma", 1.1, "0 to 1"),
    ("algorithm.lam", -0.1, "0 to 1"),
    ("algorithm.kl_ctrl.kl_coef", -1, "0 or more"),
    ("algorithm.kl_ctrl.horizon", 0, "above 0"),
    ("algorithm.kl_ctrl.target_kl", 0, "above 0"),
    ("reward.timeout", 0, "above 0"),
    ("reward.max_concurrent", 0, "1 or more"),
    ("reward.max_rpm", 0, "above 0"),
    ("reward.max_tpm", 0, "above 0"),
    ("reward.num_workers", 0, "1 or more"),
    ("trainer.total_epochs", 0, "1 or more"),
    ("trainer.total_training_steps", 0, "1 or more"),
    ("trainer.critic_warmup", -1, "0 or more"),
    ("trainer.save_freq", -2, "-1 for never"),
    ("trainer.test_freq", -5, "-1 for never"),
    ("trainer.max_actor_ckpt_to_keep", 0, "1 or more"),
    ("trainer.journal_max_bytes", 0, "above 0"),
    ("trainer.nnodes", 0, "1 or more"),
    ("trainer.seed", -1, "0 to 4294967295"),
    ("trainer.seed", 10**20, "0 to 4294967295"),
    ("data.seed", -3, "0 to 4294967295"),
    (f"{R}.seed", 2**32, "0 to 4294967295"),
    (f"{A}.data_loader_seed", -1, "0 to 4294967295"),
    ("trainer.n_gpus_per_node", 0, "1 or more"),
]


@pytest.mark.parametrize("key, value, allowed", NUMBERS, ids=[f"{key}={value}" for key, value, _ in NUMBERS])
def test_a_number_out_of_range_is_refused_with_the_range(read_ppo, key, value, allowed):
    said = changed(validate, read_ppo, **{key: value})
    assert f"{key}: " in said and f"Got {value!r}." in said and allowed in said


SFT_NUMBERS = [
    ("data.train_batch_size", 0, "1 or more"),
    ("data.micro_batch_size_per_gpu", 0, "1 or more"),
    ("data.max_length", 1, "2 or more"),
    ("data.num_workers", -1, "0 or more"),
    ("engine.dtype", "fp7", "bfloat16"),
    ("optim.lr", -1, "0 or more"),
    ("trainer.total_epochs", 0, "1 or more"),
    ("trainer.max_ckpt_to_keep", 0, "1 or more"),
    ("trainer.seed", -1, "0 to 4294967295"),
]


@pytest.mark.parametrize("key, value, allowed", SFT_NUMBERS, ids=[f"{key}={value}" for key, value, _ in SFT_NUMBERS])
def test_a_number_out_of_range_is_refused_in_supervised_runs_too(read_sft, key, value, allowed):
    said = changed(validate_sft, read_sft, **{key: value})
    assert f"{key}: " in said and f"Got {value!r}." in said and allowed in said
