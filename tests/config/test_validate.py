"""Every rule of the validation, with the parts of its message that a person needs; a valid configuration is silent."""

import json

import pytest

from verl import device, registry
from verl.config import load_config, record_reads, replace
from verl.config.loading import read_config
from verl.config.validate import GROUP_ESTIMATORS, KL_KINDS, LOSS_AGG_MODES, validate, validate_sft
from verl.errors import ConfigError, NotBuiltError

A, R, REF = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.ref"


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    """A machine without accelerators, until a test says otherwise."""

    def has(count, kind="cuda"):
        monkeypatch.setattr(device, "accelerator", lambda: kind if count else None)
        monkeypatch.setattr(device, "device_count", lambda _: count)

    has(0)
    return has


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Files that exist: what is in them is another room's business."""
    tmp_path = tmp_path_factory.mktemp("files")
    for name in ("train.parquet", "test.parquet", "my.py"):
        (tmp_path / name).write_text("")
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    return tmp_path


@pytest.fixture(scope="module")
def usual(files):
    """A command line that is valid."""
    return [
        f"data.train_files={files}/train.parquet",
        f"data.val_files={files}/test.parquet",
        f"actor_rollout_ref.model.path={files}/model",
        f"{A}.ppo_micro_batch_size_per_gpu=4",
        f"{R}.log_prob_micro_batch_size_per_gpu=4",
        f"{REF}.log_prob_micro_batch_size_per_gpu=4",
        "critic.ppo_micro_batch_size_per_gpu=4",
    ]


@pytest.fixture
def ppo(usual):
    """Load a PPO configuration that is valid but for what the overrides change."""

    def load(*overrides):
        given = {override.partition("=")[0] for override in overrides}
        return load_config("ppo_trainer", [u for u in usual if u.partition("=")[0] not in given] + list(overrides))

    return load


@pytest.fixture(scope="module")
def read_ppo(usual):
    return read_config("ppo_trainer", usual)


@pytest.fixture(scope="module")
def usual_sft(files):
    data = [f"data.train_files={files}/train.parquet", f"data.val_files={files}/test.parquet"]
    return [*data, f"model.path={files}/model"]


@pytest.fixture
def sft(usual_sft):
    return lambda *overrides: load_config("sft_trainer", [*usual_sft, *overrides])


@pytest.fixture(scope="module")
def read_sft(usual_sft):
    return read_config("sft_trainer", usual_sft)


def message(load, *overrides, kind=ConfigError):
    with pytest.raises(kind) as caught:
        load(*overrides)
    return str(caught.value)


def changed(check, config, **changes):
    """What ``check`` says about a configuration with other values."""
    return message(lambda: check(replace(config, **changes)))


def test_a_valid_configuration_passes_without_a_word(ppo, told):
    ppo()
    ppo("algorithm.adv_estimator=grpo", f"{R}.n=4")
    assert told() == {}


def test_a_valid_supervised_configuration_passes_without_a_word(sft, told):
    sft()
    assert told() == {}


NUMBERS = [
    ("data.train_batch_size", 0, "1 or more"),
    ("data.max_prompt_length", 0, "1 or more"),
    ("data.max_response_length", 0, "1 or more"),
    ("data.val_batch_size", 0, "1 or more"),
    ("data.dataloader_num_workers", -1, "0 or more"),
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
    (f"{R}.temperature", 0, "do_sample=false is greedy"),
    (f"{R}.top_p", 0, "at most 1"),
    (f"{R}.top_k", -2, "-1 for all tokens"),
    (f"{R}.max_num_seqs", 0, "1 or more"),
    (f"{R}.max_num_batched_tokens", 0, "1 or more"),
    (f"{R}.checkpoint_engine.update_weights_bucket_megabytes", 0, "1 or more"),
    (f"{R}.dtype", "float33", "float32"),
    (f"{R}.val_kwargs.n", 0, "1 or more"),
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
    ("reward.num_workers", 0, "1 or more"),
    ("trainer.total_epochs", 0, "1 or more"),
    ("trainer.total_training_steps", 0, "1 or more"),
    ("trainer.critic_warmup", -1, "0 or more"),
    ("trainer.save_freq", -2, "-1 for never"),
    ("trainer.test_freq", -5, "-1 for never"),
    ("trainer.max_actor_ckpt_to_keep", 0, "1 or more"),
    ("trainer.nnodes", 0, "1 or more"),
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
]


@pytest.mark.parametrize("key, value, allowed", SFT_NUMBERS, ids=[f"{key}={value}" for key, value, _ in SFT_NUMBERS])
def test_a_number_out_of_range_is_refused_in_supervised_runs_too(read_sft, key, value, allowed):
    said = changed(validate_sft, read_sft, **{key: value})
    assert f"{key}: " in said and f"Got {value!r}." in said and allowed in said


NAMES = [
    ("algorithm.adv_estimator=gro", ["unknown advantage estimator", "'gro'", "Did you mean 'grpo'"]),
    (f"{A}.policy_loss.loss_mode=vanila", ["unknown policy loss", "Did you mean 'vanilla'"]),
    (f"{R}.name=hff", ["unknown rollout engine", "Did you mean 'hf'"]),
    (f"{R}.agent.default_agent_loop=single_turn", ["unknown agent loop", "Did you mean 'single_turn_agent'"]),
    ("reward.reward_manager.name=niave", ["unknown reward manager", "Did you mean 'naive'"]),
    (f"{A}.loss_agg_mode=token_mean", ["Did you mean 'token-mean'", "seq-mean-token-sum-norm"]),
    (f"{A}.kl_loss_type=k9", ["low_var_kl"]),
    ("algorithm.kl_penalty=lowvar_kl", ["Did you mean 'low_var_kl'"]),
    ("trainer.logger=[console,wandbb]", ["unknown tracker", "Did you mean 'wandb'"]),
]


@pytest.mark.parametrize("override, parts", NAMES, ids=[case[0] for case in NAMES])
def test_a_name_that_nobody_knows_is_refused_with_the_nearest_one(ppo, override, parts):
    said = message(ppo, override)
    assert said.startswith(f"{override.partition('=')[0]}: ") and "Allowed: " in said
    assert [part for part in parts if part not in said] == []


@pytest.mark.parametrize(
    "names, key, instead",
    [
        (registry.ADVANTAGE_ESTIMATORS, "algorithm.adv_estimator", "Take one of these."),
        (registry.POLICY_LOSSES, f"{A}.policy_loss.loss_mode", "Leave it out"),
        (registry.SAMPLERS, f"{R}.name", f"Set {R}.name=hf."),
        (registry.AGENT_LOOPS, f"{R}.agent.default_agent_loop", "Leave it out"),
        (registry.REWARD_MANAGERS, "reward.reward_manager.name", "Leave it out"),
        (registry.ENGINES, f"{A}.strategy", "Leave it out (auto)"),
        (registry.TRACKERS, "trainer.logger", "Take 'someday' out of trainer.logger."),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_name_that_is_not_built_yet_is_refused_with_what_works_today(ppo, monkeypatch, names, key, instead):
    monkeypatch.setattr(names, "_planned", frozenset({"someday"}))
    said = message(ppo, f"{key}=someday", kind=NotBuiltError)
    assert said.startswith(f"{key}: the {names.kind} 'someday' is not built yet. Got 'someday'. Allowed: ")
    assert instead in said


@pytest.mark.parametrize("key", [f"{A}.kl_loss_type", "algorithm.kl_penalty"])
def test_the_exact_kl_is_refused_as_not_built(ppo, key):
    assert message(ppo, f"{key}=full", kind=NotBuiltError).startswith(f"{key}: the exact KL is not built yet")


@pytest.mark.parametrize("role", [A, "critic"])
@pytest.mark.parametrize("strategy", ["fsdp2", "megatron"])
def test_a_training_backend_that_is_not_built_is_refused_under_the_key_of_its_role(ppo, role, strategy):
    said = message(ppo, f"{role}.strategy={strategy}", kind=NotBuiltError)
    assert said.startswith(f"{role}.strategy: the training backend '{strategy}' is not built yet")
    assert "Leave it out" in said and "settings cannot stand" not in said


def test_a_training_backend_of_a_supervised_run_is_checked_too(sft):
    assert message(sft, "engine.strategy=fsdp2", kind=NotBuiltError).startswith("engine.strategy: ")
    assert "Did you mean 'plain'" in message(sft, "engine.strategy=plane")


@pytest.mark.parametrize(
    "override",
    [
        "algorithm.adv_estimator=my_pkg.estimators:mine",
        "algorithm.adv_estimator=my_pkg.estimators.mine",
        f"{A}.policy_loss.loss_mode=my_pkg.losses:mine",
        f"{R}.agent.default_agent_loop=my_pkg.loops:Mine",
        "reward.reward_manager.name=my_pkg.managers:Mine",
        "trainer.logger=[console,'my_pkg.trackers:Mine']",
    ],
)
def test_a_dotted_path_of_the_user_passes(ppo, told, override):
    ppo(override)
    assert told() == {}


def test_every_kl_kind_and_aggregation_mode_of_the_algorithms_is_known_here():
    from verl.algorithms.aggregation import LOSS_AGG_MODES as built_modes
    from verl.algorithms.kl import ESTIMATORS

    assert set(KL_KINDS) == set(ESTIMATORS) and set(LOSS_AGG_MODES) == set(built_modes)


def test_a_straight_through_kl_is_known(ppo):
    assert ppo(f"{A}.use_kl_loss=true", f"{A}.kl_loss_type=k3+").actor_rollout_ref.actor.kl_loss_type == "k3+"


def test_a_tracker_whose_package_is_missing_is_an_error_with_the_command_that_installs_it(ppo, monkeypatch):
    import importlib.util

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    said = message(ppo, "trainer.logger=[console,wandb]")
    assert said.startswith("trainer.logger: ") and "pip install wandb" in said and "not installed" in said


def test_more_gpus_than_a_cpu_machine_has_is_one_error_with_both_counts(ppo):
    said = message(ppo, "trainer.n_gpus_per_node=8")
    assert said.startswith("trainer.n_gpus_per_node: 8 GPUs are asked for, and this machine has no GPU")
    assert "Set trainer.n_gpus_per_node=1 trainer.nnodes=1 to run on CPU" in said and "\n" not in said


def test_more_gpus_than_a_gpu_machine_has_names_both_counts(ppo, machine):
    machine(2)
    said = message(ppo, "trainer.n_gpus_per_node=8")
    assert "8 GPUs are asked for, and this machine has 2 GPUs" in said and "Allowed: 1 to 2" in said


def test_a_cluster_that_this_machine_is_no_part_of_names_nodes_and_gpus(ppo):
    said = message(ppo, "trainer.nnodes=4", "trainer.n_gpus_per_node=8")
    assert "4 nodes (trainer.nnodes) with 8 GPUs each are asked for, and this machine has no GPU" in said


@pytest.mark.parametrize(
    "overrides, key",
    [
        (["trainer.n_gpus_per_node=2"], "trainer.n_gpus_per_node"),
        (["trainer.nnodes=2"], "trainer.nnodes"),
        (["trainer.runtime=ray"], "trainer.runtime"),
        (["trainer.device=cpu", "trainer.n_gpus_per_node=4"], "trainer.n_gpus_per_node"),
    ],
)
def test_a_run_of_several_processes_is_refused_as_not_built(ppo, machine, overrides, key):
    machine(2)
    said = message(ppo, *overrides, kind=NotBuiltError)
    assert said.startswith(f"{key}: ") and "not built yet" in said and "to run in this process" in said


def test_a_supervised_run_of_several_processes_is_refused_without_naming_keys_it_does_not_have(sft):
    said = message(sft, "trainer.nnodes=2", kind=NotBuiltError)
    assert "supervised run" in said and "trainer.runtime" not in said
    assert "this machine has no GPU" in message(sft, "trainer.n_gpus_per_node=8")


def test_one_gpu_asked_for_on_a_cpu_machine_runs_on_cpu_and_says_so(ppo, told):
    ppo("trainer.n_gpus_per_node=1", "trainer.nnodes=1")
    assert told() == {"trainer.n_gpus_per_node": "this machine has no GPU, so the run uses the CPU"}


def test_several_gpus_of_which_one_is_used_are_worth_a_notice(ppo, machine, told):
    machine(4)
    ppo()
    assert "uses 1 of 4 GPUs" in told()["trainer.n_gpus_per_node"]


def test_a_device_that_is_not_there_is_an_error(ppo):
    said = message(ppo, "trainer.device=cuda")
    assert said.startswith("trainer.device: ") and "Allowed: cpu" in said
