"""Every rule of the validation, with the parts of its message that a person needs; a valid configuration is silent."""

import json

import pytest

from tests.harness.configs import changed as replaced
from tests.harness.configs import refused
from verl import device, registry
from verl.config import load_config, record_reads, replace
from verl.config.loading.configuration import read_config
from verl.config.rules.validate import validate
from verl.config.schema.tree import KL_KINDS, LOSS_AGG_MODES
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
        return load_config("ppo_trainer", replaced(usual, *overrides))

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


def changed(check, config, **changes):
    """What ``check`` says about a configuration with other values."""
    return refused(lambda: check(replace(config, **changes)))


def test_a_valid_configuration_passes_without_a_word(ppo, told):
    ppo()
    ppo("algorithm.adv_estimator=grpo", f"{R}.n=4")
    assert told() == {}


def test_a_valid_supervised_configuration_passes_without_a_word(sft, told):
    sft()
    assert told() == {}


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
    said = refused(ppo, override)
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
    said = refused(ppo, f"{key}=someday", kind=NotBuiltError)
    assert said.startswith(f"{key}: the {names.kind} 'someday' is not built yet. Got 'someday'. Allowed: ")
    assert instead in said


@pytest.mark.parametrize(
    ("switch", "key"),
    [(f"{A}.use_kl_loss", f"{A}.kl_loss_type"), ("algorithm.use_kl_in_reward", "algorithm.kl_penalty")],
)
def test_the_exact_kl_is_refused_where_the_logits_of_two_models_never_meet(ppo, switch, key):
    exact = (f"{switch}=true", f"{key}=full")
    ppo(*exact)
    ppo(f"{key}=full", "actor_rollout_ref.model.use_fused_kernels=true")  # no KL is computed
    fused = refused(ppo, *exact, "actor_rollout_ref.model.use_fused_kernels=true", kind=NotBuiltError)
    assert fused.startswith(f"{key}: ") and "use_fused_kernels=false" in fused and "low_var_kl" in fused
    sizes = [f"{A}.fsdp_config.ulysses_sequence_parallel_size=2", "trainer.n_gpus_per_node=2", "trainer.device=cpu"]
    assert "several ranks share a row" in refused(ppo, *exact, *sizes, kind=NotBuiltError)
    apart = "trainer.resource_pools={second:{roles:[ref],processes:[1]}}"
    assert "in the pool 'second'" in refused(ppo, *exact, apart, "trainer.device=cpu", kind=NotBuiltError)
    with pytest.raises(ConfigError, match="has the gradient of the KL as it is"):
        ppo(f"{key}=full+")


def test_the_bypass_mode_has_no_distribution_of_the_old_policy_to_charge_for(ppo):
    charged = ["algorithm.use_kl_in_reward=true", "algorithm.kl_penalty=full"]
    said = refused(ppo, *charged, "algorithm.rollout_correction.bypass_mode=true")
    assert said.startswith("algorithm.kl_penalty: the bypass mode") and "bypass_mode=false" in said


@pytest.mark.parametrize("role", [A, "critic"])
def test_a_training_backend_is_refused_under_the_key_of_its_own_role(ppo, role):
    said = refused(ppo, f"{role}.strategy=plane")
    assert said.startswith(f"{role}.strategy: unknown training backend") and "Did you mean 'plain'" in said
    assert "settings cannot stand" not in said  # the reference follows the actor and is not told apart


def test_a_training_backend_of_a_supervised_run_is_checked_too(sft):
    assert refused(sft, "engine.strategy=plane").startswith("engine.strategy: unknown training backend")


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

    assert set(KL_KINDS) == {*ESTIMATORS, "full"} and set(LOSS_AGG_MODES) == set(built_modes)


def test_a_straight_through_kl_is_known(ppo):
    assert ppo(f"{A}.use_kl_loss=true", f"{A}.kl_loss_type=k3+").actor_rollout_ref.actor.kl_loss_type == "k3+"


def test_a_tracker_whose_package_is_missing_is_an_error_with_the_command_that_installs_it(ppo, monkeypatch):
    import importlib.util

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    said = refused(ppo, "trainer.logger=[console,wandb]")
    assert said.startswith("trainer.logger: ") and "pip install wandb" in said and "not installed" in said


def test_more_gpus_than_a_cpu_machine_has_is_one_error_with_both_counts(ppo):
    said = refused(ppo, "trainer.n_gpus_per_node=8")
    assert said.startswith("trainer.n_gpus_per_node: 8 GPUs are requested, and this machine has no GPU")
    assert "Set trainer.n_gpus_per_node=1 trainer.nnodes=1 to run on CPU" in said and "\n" not in said


def test_more_gpus_than_a_gpu_machine_has_names_both_counts(ppo, machine):
    machine(2)
    said = refused(ppo, "trainer.n_gpus_per_node=8")
    assert "8 GPUs are requested, and this machine has 2 GPUs" in said and "Allowed: 1 to 2" in said


def test_a_supervised_run_of_several_processes_is_started_by_torchrun(sft, monkeypatch):
    said = refused(sft, "trainer.nnodes=2")
    assert "2 processes are requested, and 1 was started" in said and "torchrun --nnodes=2" in said
    assert "this machine has no GPU" in refused(sft, "trainer.n_gpus_per_node=8")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert sft("trainer.nnodes=2").trainer.nnodes == 2


def test_one_gpu_asked_for_on_a_cpu_machine_runs_on_cpu_and_says_so(ppo, told):
    ppo("trainer.n_gpus_per_node=1", "trainer.nnodes=1")
    assert told() == {"trainer.n_gpus_per_node": "this machine has no GPU, so the run uses the CPU"}


def test_several_gpus_of_which_one_is_used_are_worth_a_notice(ppo, machine, told):
    machine(4)
    ppo()
    assert "uses 1 of 4 GPUs" in told()["trainer.n_gpus_per_node"]


def test_a_device_that_is_not_there_is_an_error(ppo):
    assert (said := refused(ppo, "trainer.device=cuda")).startswith("trainer.device: ") and "Allowed: cpu" in said


def test_a_missing_file_is_an_error_with_the_nearest_name_in_its_folder(ppo, files):
    said = refused(ppo, f"data.train_files={files}/tran.parquet")
    assert said.startswith("data.train_files: no such file") and "Did you mean 'train.parquet'" in said


def test_every_missing_file_of_a_list_is_named(ppo, files):
    said = refused(ppo, f"data.val_files=[{files}/test.parquet,{files}/a.parquet,/no/where/b.parquet]")
    assert f"{files}/a.parquet" in said and "The folder '/no/where' does not exist either" in said
    assert said.count("data.val_files: no such file") == 2


def test_the_default_data_that_was_never_made_is_an_error_with_both_ways_out(usual, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    said = refused(load_config, "ppo_trainer", usual[2:])
    assert f"Got '{tmp_path}/data/rlhf/gsm8k/train.parquet'" in said
    assert "default path: set data.train_files, or make the file (`python examples/data_preprocess/gsm8k.py" in said


def test_a_folder_of_data_is_an_error_that_lists_its_files(ppo, files):
    said = refused(ppo, f"data.train_files={files}")
    assert "this is a folder; name the files in it" in said and "train.parquet" in said


@pytest.mark.parametrize("given", ["[]", "''"])
def test_no_training_files_is_an_error(ppo, given):
    assert refused(ppo, f"data.train_files={given}").startswith("data.train_files: ")


def test_files_of_a_dataset_class_of_the_users_own_are_not_looked_up(ppo, files):
    ppo("data.train_files=anything", f"data.custom_cls.path={files}/my.py", "data.custom_cls.name=Mine")


def test_remote_files_and_hub_models_are_not_looked_up(ppo, told):
    ppo("data.train_files=hdfs://a/b.parquet", "actor_rollout_ref.model.path=Qwen/Qwen3-8B")
    assert told() == {}


@pytest.mark.parametrize(
    "key",
    [
        "reward.custom_reward_function.path",
        "reward.reward_manager.module.path",
        "data.custom_cls.path",
        "data.filter_function.path",
    ],
)
def test_a_python_file_of_the_user_that_is_missing_is_an_error(ppo, files, key):
    said = refused(ppo, f"{key}={files}/mi.py", "data.custom_cls.name=Mine")
    assert f"{key}: no such file" in said and "Did you mean 'my.py'" in said


def test_a_model_folder_that_does_not_exist_is_an_error(ppo, files):
    said = refused(ppo, f"actor_rollout_ref.model.path={files}/modle")
    assert said.startswith("actor_rollout_ref.model.path: no such model folder")
    assert "Did you mean 'model'" in said and "a name on the hub" in said


def test_a_folder_without_a_model_is_an_error(ppo, sft, tmp_path):
    said = refused(ppo, f"actor_rollout_ref.model.path={tmp_path}")
    assert "this folder is not a Hugging Face model: it has no config.json" in said and "\n" not in said
    assert refused(sft, f"model.path={tmp_path}").startswith("model.path: this folder is not")


def test_the_critics_own_model_is_checked_only_where_there_is_a_critic(ppo, tmp_path):
    assert refused(ppo, f"critic.model.path={tmp_path}").startswith("critic.model.path: ")
    ppo(f"critic.model.path={tmp_path}", "algorithm.adv_estimator=grpo", f"{R}.n=2")


@pytest.mark.parametrize("estimator", ["grpo", "rloo", "opo", "gpg", "reinforce_plus_plus_baseline"])
def test_a_group_estimator_needs_several_samples(ppo, estimator):
    said = refused(ppo, f"algorithm.adv_estimator={estimator}")
    assert said.startswith(f"{R}.n: the estimator '{estimator}' compares the samples of one prompt")
    assert "Got 1. Allowed: 2 or more." in said and "adv_estimator=gae" in said


def test_a_group_estimator_needs_samples_that_differ(ppo):
    said = refused(ppo, "algorithm.adv_estimator=grpo", f"{R}.n=4", f"{R}.do_sample=false")
    assert said.startswith(f"{R}.do_sample: greedy samples of one prompt are all the same")


@pytest.mark.parametrize("estimator", ["gae", "reinforce_plus_plus"])
def test_other_estimators_take_one_sample(ppo, estimator):
    ppo(f"algorithm.adv_estimator={estimator}")


@pytest.mark.parametrize("batch, mini, near", [(1000, 256, 250), (64, 256, 64), (96, 40, 32)])
def test_a_batch_that_does_not_divide_is_an_error_with_the_sizes_that_do(ppo, batch, mini, near):
    said = refused(ppo, f"data.train_batch_size={batch}", f"{A}.ppo_mini_batch_size={mini}")
    assert f"data.train_batch_size={batch} prompts cannot be cut into mini-batches of {mini}" in said
    assert f"Set {A}.ppo_mini_batch_size={near}." in said and "\n" not in said


def test_a_critic_with_a_mini_batch_of_its_own_is_checked_too(ppo):
    said = refused(ppo, "critic.ppo_mini_batch_size=100")
    assert said.startswith("critic.ppo_mini_batch_size: data.train_batch_size=1024 prompts cannot be cut")


def test_without_group_filtering_a_step_trains_on_what_it_samples(ppo):
    assert ppo("data.gen_batch_size=512").data.train_batch_size == 512
    assert ppo("data.gen_batch_size=512", "algorithm.filter_groups.enable=true").data.train_batch_size == 1024


def test_samples_that_do_not_divide_by_processes_are_noticed(ppo, machine, told):
    machine(3)
    ppo("trainer.n_gpus_per_node=3")
    said = told()[f"{A}.ppo_mini_batch_size"]
    assert "256 samples do not divide by 3 processes: the shortest is computed 2 more time(s), masked" in said


def test_pairs_that_do_not_divide_by_processes_are_an_error(ppo, machine):
    machine(3)
    said = refused(ppo, "trainer.n_gpus_per_node=3", f"{A}.policy_loss.loss_mode=recipe.spin.core:dpo",
                   f"{A}.dpo_beta=0.1", f"{R}.n=2")  # fmt: skip
    assert f"{A}.ppo_mini_batch_size: 256 pairs cannot be shared evenly by 3 processes" in said


@pytest.mark.parametrize(
    "section, name",
    [
        (A, "ppo_micro_batch_size"),
        (R, "log_prob_micro_batch_size"),
        (REF, "log_prob_micro_batch_size"),
        ("critic", "ppo_micro_batch_size"),
        ("critic", "forward_micro_batch_size"),
    ],
)
def test_two_micro_batch_sizes_contradict_each_other_only_where_they_differ(ppo, section, name):
    said = refused(ppo, f"{section}.{name}=8", f"{section}.{name}_per_gpu=4")
    assert f"{section}.{name}=8 and {section}.{name}_per_gpu=4 contradict each other" in said
    ppo(f"{section}.{name}=4", f"{section}.{name}_per_gpu=4")


def test_sampling_in_validation_needs_a_temperature(ppo):
    said = refused(ppo, f"{R}.val_kwargs.do_sample=true")
    assert said.startswith(f"{R}.val_kwargs.temperature: sampling at temperature 0 is greedy")
    ppo(f"{R}.val_kwargs.do_sample=true", f"{R}.val_kwargs.temperature=0.7")


def test_a_length_has_one_value(ppo):
    said = refused(ppo, f"{R}.response_length=100")
    assert said.startswith(f"{R}.response_length: ") and "data.max_response_length, which is 512" in said
    assert ppo("data.max_response_length=100").actor_rollout_ref.rollout.response_length == 100


def test_prompts_and_responses_have_to_fit_the_models_context(ppo):
    said = refused(ppo, f"{R}.max_model_len=1000")
    assert "= 1024 tokens do not fit" in said and f"Set {R}.max_model_len=1024" in said
    ppo(f"{R}.max_model_len=1024")


def test_gae_needs_its_critic(ppo):
    assert refused(ppo, "critic.enable=false").startswith("critic.enable: the estimator 'gae' needs the values")
    ppo("critic.enable=false", "algorithm.adv_estimator=reinforce_plus_plus")


CORRECTIONS = ["algorithm.rollout_is_threshold", "algorithm.rollout_is", "algorithm.rollout_correction.rollout_is"]


@pytest.mark.parametrize("key, value", zip(CORRECTIONS, [2.0, True, "token"], strict=True), ids=CORRECTIONS)
def test_a_rollout_correction_needs_the_samplers_log_probs(read_ppo, key, value):
    said = changed(validate, read_ppo, **{key: value, f"{R}.calculate_log_probs": False})
    assert f"{key} compares the trainer's log-probs with the sampler's" in said
    assert f"Set {R}.calculate_log_probs=true." in said


def test_raw_log_probs_are_compared_with_the_trainers_at_its_temperature_only(read_ppo):
    raw = {f"{R}.logprobs_mode": "raw_logprobs", "algorithm.rollout_is_threshold": 2.0}
    said = changed(validate, read_ppo, **raw, **{f"{R}.temperature": 0.7})
    assert "compares raw log-probs, of temperature 1, with the trainer's, of temperature 0.7" in said
    assert f"or set {R}.temperature=1." in said


def test_two_forms_of_the_rollout_correction_exclude_each_other(read_ppo):
    newer = "algorithm.rollout_correction.rollout_is"
    said = changed(validate, read_ppo, **{"algorithm.rollout_is_threshold": 2.0, newer: "token"})
    assert f"algorithm.rollout_is_threshold and {newer} are two forms of one correction" in said


def test_rejection_of_rollouts_needs_a_threshold(read_ppo):
    said = changed(validate, read_ppo, **{"algorithm.rollout_correction.rollout_rs": "seq_mean_k1"})
    assert "rollout_rs_threshold: rejection needs a threshold" in said


def test_a_reward_manager_from_a_file_needs_the_file(ppo):
    said = refused(ppo, "reward.reward_manager.source=importlib")
    assert said.startswith("reward.reward_manager.module.path: ") and "Name the Python file" in said


@pytest.mark.parametrize("given, missing", [("path", "name"), ("name", "path")])
def test_a_dataset_class_needs_its_file_and_its_name(ppo, sft, files, given, missing):
    value = f"{files}/my.py" if given == "path" else "Mine"
    for load in (ppo, sft):
        said = refused(load, f"data.custom_cls.{given}={value}")
        assert said.startswith(f"data.custom_cls.{missing}: data.custom_cls.{given} alone names no class")


@pytest.mark.parametrize("given, missing", [("prompt_key", "response_key"), ("response_key", "prompt_key")])
def test_two_column_data_needs_both_columns(sft, given, missing):
    said = refused(sft, f"data.{given}=question")
    assert said.startswith(f"data.{missing}: two-column data needs the names of both columns")
    sft(f"data.{given}=question", f"data.{missing}=answer")


@pytest.mark.parametrize("path, part", [("null", "needs the folder of a step"), ("/a/run", "global_step_<number>")])
def test_resuming_from_a_path_needs_a_step_folder(ppo, sft, path, part):
    for load in (ppo, sft):
        said = refused(load, "trainer.resume_mode=resume_path", f"trainer.resume_from_path={path}")
        assert said.startswith("trainer.resume_from_path: ") and part in said


def test_resuming_from_a_step_that_does_not_exist_is_an_error_with_the_nearest(ppo, tmp_path):
    (tmp_path / "global_step_20").mkdir()
    said = refused(ppo, "trainer.resume_mode=resume_path", f"trainer.resume_from_path={tmp_path}/global_step_30")
    assert "no such folder" in said and "Did you mean 'global_step_20'" in said
    ppo("trainer.resume_mode=resume_path", f"trainer.resume_from_path={tmp_path}/global_step_20")


def test_validating_only_needs_something_to_validate_on(ppo):
    said = refused(ppo, "trainer.val_only=true", "data.val_files=null")
    assert said.startswith("data.val_files: trainer.val_only=true leaves nothing to do")


def test_all_problems_are_told_at_once_each_on_its_own_line(ppo, files):
    said = refused(ppo, "algorithm.adv_estimator=grpo", "trainer.n_gpus_per_node=8", f"data.train_files={files}/no")
    lines = said.splitlines()
    assert lines[0] == "3 settings cannot stand:" and len(lines) == 4
    assert [line.split(":")[0] for line in lines[1:]] == [
        "  - trainer.n_gpus_per_node",
        "  - data.train_files",
        f"  - {R}.n",
    ]


def test_only_features_that_are_not_built_make_an_error_of_that_kind(ppo):
    load = [f"{A}.qat.enable=true", "actor_rollout_ref.model.mtp.enable=true"]
    refused(ppo, *load, kind=NotBuiltError)
    with pytest.raises(ConfigError) as caught:
        ppo(*load, "trainer.nnodes=two")
    assert not isinstance(caught.value, NotBuiltError)


def test_an_engine_that_is_not_built_comes_alone_with_the_number_of_the_other_problems(ppo):
    details = [f"{A}.veomni.param_offload=true", f"{A}.veomni.seed=2", "trainer.total_epoch=2"]
    said = refused(ppo, "model_engine=veomni", *details, kind=NotBuiltError).splitlines()
    assert said[0].startswith(f"{A}.strategy: the training backend 'veomni' is not built yet")
    assert said[1:] == ["(1 more problem of these settings may go with it.)"]
    both = refused(ppo, f"{R}.name=trtllm", f"{A}.strategy=automodel", "algorithm.gamma=2", kind=NotBuiltError)
    keys = [f"  - {A}.strategy", f"  - {R}.name"]
    assert [line.split(":")[0] for line in both.splitlines()[1:]] == keys  # gamma is judged once the others stand


def test_a_device_that_is_not_built_decides_too(ppo):
    said = refused(
        ppo, "trainer.device=npu", "actor_rollout_ref.model.mtp.enable=true", kind=NotBuiltError
    ).splitlines()
    assert "Ascend NPUs" in said[0] and len(said) == 2


def test_the_settings_of_one_missing_feature_are_one_problem_named_by_its_switch(ppo):
    own = [f"{R}.qat={{mode: w4a16}}", f"{A}.fsdp_config.qat.enable=true"]
    said = refused(ppo, *own, "actor_rollout_ref.model.mtp.enable=true", kind=NotBuiltError).splitlines()
    assert len(said) == 3 and said[1].startswith(f"  - {A}.fsdp_config.qat.enable: not built yet: quantization")
    assert said[1].endswith("The same holds for 1 more setting of it.")


def test_a_message_lists_a_dozen_problems_and_says_how_many_there_are_more(ppo):
    names = ("gamma", "lam", "norm_adv_by_std_in_grpo", "use_kl_in_reward", "kl_penalty", "adv_estimator", "use_pf_ppo")
    wrong = [f"trainer.{n}=x" for n in ("seed", "nnodes", "n_gpus_per_node", "save_freq", "total_epochs", "val_only")]
    said = refused(ppo, *wrong, *(f"algorithm.{name}={{a: 1}}" for name in names)).splitlines()
    assert said[0] == "13 settings cannot stand:" and said[-1] == "  (1 more problem is not listed.)"
    assert len(said) == 14


def test_unknown_settings_are_suggested_only_what_is_near_and_else_the_mapping_that_takes_them(ppo):
    said = refused(ppo, f"{A}.motor.tp=1", f"{A}.motor.pp=2")
    assert said.startswith(f"{A}.motor: unknown settings of a section that does not exist: tp, pp.")
    assert "Did you mean" not in said
    said = refused(ppo, "actor_rollout_ref.model.rope_theta=1", f"{R}.max_num_sqs=3").splitlines()
    assert said[1].endswith("belongs in actor_rollout_ref.model.override_config.")
    assert said[2].endswith(f"Did you mean '{R}.max_num_seqs'?")


def test_looking_at_a_setting_to_check_it_is_not_reading_it(read_ppo):
    with record_reads() as reads:
        validate(read_ppo)
    assert reads == set()


def test_a_number_of_samples_has_one_value(ppo):
    said = refused(ppo, "critic.rollout_n=2")
    assert said.startswith(f"critic.rollout_n: it is the same number as {R}.n, which is 1")
    assert ppo(f"{R}.n=2").critic.rollout_n == 2


@pytest.mark.parametrize(
    "key",
    [
        f"{A}.ppo_max_token_len_per_gpu",
        f"{REF}.log_prob_max_token_len_per_gpu",
        f"{R}.log_prob_max_token_len_per_gpu",
        *(f"critic.{name}_max_token_len_per_gpu" for name in ("ppo", "forward")),
    ],
)
def test_a_token_budget_has_to_hold_the_longest_sample(read_ppo, key):
    used = [f"{name}_dynamic_bsz" for name in (f"{A}.use", "critic.use", f"{R}.log_prob_use", f"{REF}.log_prob_use")]
    switches = dict.fromkeys([*used, f"{A}.use_kl_loss"], True)
    said = changed(validate, read_ppo, **switches, **{key: 1023})
    assert said.startswith(f"{key}: ") and "data.max_prompt_length + data.max_response_length = 1024 tokens" in said
    for settings in ({**switches, key: 1024}, {key: 1023}):  # without dynamic batching there is no budget
        validate(replace(read_ppo, **settings))


def test_a_token_budget_of_a_supervised_run_has_to_hold_the_longest_row(sft):
    said = refused(sft, "data.max_length=9000", "data.max_token_len_per_gpu=8192")
    assert said.startswith("data.max_token_len_per_gpu: ") and "data.max_length = 9000 tokens" in said
    sft("data.max_length=9000", "data.max_token_len_per_gpu=8192", "data.use_dynamic_bsz=false")
    sft("data.max_length=9000")


@pytest.mark.parametrize("name", ["../../x", "a/../../x", "/tmp/x", "~/x", ".."])
@pytest.mark.parametrize("key", ["trainer.experiment_name", "trainer.project_name"])
def test_a_name_that_leads_out_of_its_folder_is_refused(ppo, sft, key, name):
    for load in (ppo, sft):
        assert f"{key}: a name must not lead out of the folder" in refused(load, f"{key}={name}")


def test_a_name_may_have_folders_and_dots(ppo):
    assert ppo("trainer.experiment_name=runs/a..b").trainer.experiment_name == "runs/a..b"
