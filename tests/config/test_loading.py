import typing

import pytest

from tests.harness.programs import python
from verl.config import ActorConfig, PPOTrainerConfig, SFTTrainerConfig, load_config, save_config, to_dict
from verl.config.loading.configuration import read_config, to_yaml
from verl.config.loading.files import DefaultsEntry
from verl.config.loading.groups import PPO, SFT
from verl.config.loading.merge import Merge
from verl.config.loading.resolve import resolve
from verl.config.machine.profiling import LATER
from verl.config.rules.checks import INSTEAD
from verl.config.schema.node import convert, from_mapping, schema_of
from verl.errors import ConfigError, NotBuiltError

A, R = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"


def ppo(*argv):
    return read_config("ppo_trainer", list(argv))


def at(cfg, key):
    for part in key.split("."):
        cfg = cfg[part]
    return cfg


def changed(leaf):
    """A value that is allowed for a leaf and differs from its default."""
    if leaf.choices:
        other = next(choice for choice in leaf.choices if choice != leaf.default)
        return [other] if isinstance(leaf.default, list) else other
    options = typing.get_args(leaf.type) if typing.get_origin(leaf.type) is not list else ()
    kind = next(option for option in options or (leaf.type,) if option is not type(None))
    kind = typing.get_origin(kind) or kind
    old = leaf.default
    if kind is bool:
        return not old
    if kind in (int, float):
        return (old or 0) + 1
    return {str: "/other", list: ["0.5"], dict: {"a": 1}, typing.Any: "other"}[kind]


# ---- precedence, following, interpolation --------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["ppo_trainer", "sft_trainer", "sft_trainer_engine"])
def test_nothing_given_means_the_defaults(name):
    cfg = read_config(name, [])
    assert isinstance(cfg, SFTTrainerConfig if "sft" in name else PPOTrainerConfig)
    assert cfg.trainer.logger == ["console", "file"] and cfg.trainer.nnodes == 1


def test_the_megatron_program_name_chooses_that_engine():
    assert read_config("ppo_megatron_trainer", []).actor_rollout_ref.actor.strategy == "megatron"
    with pytest.raises(ConfigError, match=r"unknown configuration.*Did you mean 'ppo_trainer'"):
        read_config("ppo_trainr", [])


def test_the_command_line_wins_over_the_file_and_the_file_over_the_defaults(tmp_path):
    (tmp_path / "mine.yaml").write_text("trainer: {seed: 2, nnodes: 2}\n")
    cfg = ppo("-cp", str(tmp_path), "-cn", "mine", "trainer.seed=3")
    assert (cfg.trainer.seed, cfg.trainer.nnodes, cfg.trainer.save_freq) == (3, 2, -1)


@pytest.mark.parametrize(
    ("set_key", "value", "followers"),
    [
        (f"{R}.n", 8, [f"{A}.rollout_n", "actor_rollout_ref.ref.rollout_n", "critic.rollout_n"]),
        (f"{A}.ppo_mini_batch_size", 64, ["critic.ppo_mini_batch_size"]),
        (f"{A}.strategy", "fsdp2", ["actor_rollout_ref.ref.strategy"]),
        (
            f"{A}.use_dynamic_bsz",
            True,
            [
                "critic.use_dynamic_bsz",
                f"{R}.log_prob_use_dynamic_bsz",
                "actor_rollout_ref.ref.log_prob_use_dynamic_bsz",
            ],
        ),
        (f"{A}.ppo_max_token_len_per_gpu", 99, [f"{R}.log_prob_max_token_len_per_gpu"]),
        (f"{A}.loss_agg_mode", "token-sum", ["critic.loss_agg_mode"]),
        (f"{A}.optim.clip_grad", 0.5, [f"{A}.grad_clip"]),
        (f"{A}.checkpoint.save_contents", ["model"], [f"{A}.checkpoint.load_contents"]),
        ("critic.ppo_max_token_len_per_gpu", 77, ["critic.forward_max_token_len_per_gpu"]),
        (
            "critic.ppo_micro_batch_size",
            2,
            [
                "critic.ppo_micro_batch_size_per_gpu",
                "critic.forward_micro_batch_size",
                "critic.forward_micro_batch_size_per_gpu",
            ],
        ),
        ("data.max_prompt_length", 33, [f"{R}.prompt_length"]),
        ("data.max_response_length", 44, [f"{R}.response_length"]),
        ("actor_rollout_ref.model.path", "/m", ["critic.model.path"]),
        ("actor_rollout_ref.model.trust_remote_code", True, ["critic.model.trust_remote_code"]),
    ],
)
def test_a_setting_that_is_not_set_takes_the_value_of_the_one_it_follows(set_key, value, followers):
    cfg = ppo(f"{set_key}={value}")
    assert at(cfg, set_key) == value
    assert [at(cfg, key) for key in followers] == [value] * len(followers)


def test_a_follower_that_is_set_keeps_its_own_value():
    cfg = ppo(f"{A}.ppo_mini_batch_size=64", "critic.ppo_mini_batch_size=32", f"{R}.response_length=9")
    assert (cfg.critic.ppo_mini_batch_size, cfg.data.max_response_length) == (32, 512)
    assert cfg.actor_rollout_ref.rollout.response_length == 9


def test_the_two_keys_of_the_gradient_norm_may_not_contradict_each_other():
    assert ppo(f"{A}.grad_clip=0.5", f"{A}.optim.clip_grad=0.5").actor_rollout_ref.actor.grad_clip == 0.5
    with pytest.raises(ConfigError, match=r"critic\.grad_clip: two values for one setting"):
        ppo("critic.grad_clip=0.5", "critic.optim.clip_grad=2")


def test_a_list_that_is_followed_is_not_shared():
    cfg = ppo(f"{A}.checkpoint.save_contents=[model]")
    assert (
        cfg.actor_rollout_ref.actor.checkpoint.load_contents is not cfg.actor_rollout_ref.actor.checkpoint.save_contents
    )


def test_interpolations_reach_settings_defaults_followers_and_the_environment(monkeypatch):
    monkeypatch.setenv("RUN_NODES", "3")
    cfg = ppo(
        "trainer.project_name=p",
        "trainer.experiment_name=${trainer.project_name}_${critic.rollout_n}",
        f"{R}.n=5",
        "critic.optim.betas=${actor_rollout_ref.actor.optim.betas}",
        "trainer.nnodes=${oc.env:RUN_NODES}",
        "critic.optim.lr=${oc.select:no.such.key,0.5}",
        "data.val_files=${.train_files}",
        "data.train_files=[/a,/b]",
    )
    assert (cfg.trainer.experiment_name, cfg.trainer.default_local_dir) == ("p_5", "checkpoints/p/p_5")
    assert (cfg.critic.optim.betas, cfg.trainer.nnodes, cfg.critic.optim.lr) == ([0.9, 0.999], 3, 0.5)
    assert cfg.data.val_files == ["/a", "/b"]


def test_the_date_may_be_part_of_a_name():
    assert ppo("trainer.experiment_name=run_${now:%Y}").trainer.experiment_name.startswith("run_20")


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("${trainer.projct_name}", "Did you mean 'trainer.project_name'"),
        ("${HOME}/x", r"\$\{oc\.env:HOME\}"),
        ("${trainer.experiment_name}", "trainer.experiment_name: cannot be resolved"),
    ],
)
def test_an_interpolation_that_leads_nowhere_says_what_would(value, says):
    with pytest.raises(ConfigError, match=says):
        ppo(f"trainer.experiment_name={value}")


def test_every_path_expands_home_and_variables(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("OUT", "/out")
    leaves = {key: leaf for key, leaf in schema_of(PPOTrainerConfig).leaves.items() if leaf.path and not leaf.planned}
    cfg = ppo(*(f"{key}=~/$OUT/x" for key in leaves), "data.val_files=[~/a,$OUT/b]")
    assert all(at(cfg, key) == "/home/me//out/x" for key in leaves if key != "data.val_files")
    assert cfg.data.val_files == ["/home/me/a", "/out/b"]
    assert {"data.train_files", "actor_rollout_ref.model.path", "trainer.default_local_dir"} <= set(leaves)


# ---- every leaf ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("program", [PPO, SFT], ids=lambda p: p.name)
def test_every_setting_that_works_arrives_where_it_is_declared(program):
    leaves = [leaf for leaf in schema_of(program.root).leaves.values() if not leaf.planned]
    # With a rank there the settings beside it become the model's own: tests/config/test_megatron_lora.py.
    leaves = [leaf for leaf in leaves if not leaf.key.endswith(".lora.rank")]
    cfg = resolve(Merge(program, [[DefaultsEntry(leaf.key, changed(leaf)) for leaf in leaves]]))
    for leaf in leaves:
        assert at(cfg, leaf.key) == convert(changed(leaf), leaf.type) != leaf.default, leaf.key


@pytest.mark.parametrize("program", [PPO, SFT], ids=lambda p: p.name)
def test_every_setting_of_a_missing_feature_is_refused_by_name_and_its_default_is_not(program, told):
    leaves = [leaf for leaf in schema_of(program.root).every.values() if leaf.planned]
    with pytest.raises(NotBuiltError) as caught:
        resolve(Merge(program, [[DefaultsEntry(leaf.key, changed(leaf)) for leaf in leaves]]))
    said = [str(problem) for problem in caught.value.problems]
    for leaf in leaves:
        # A follower that says what it would be anyway is fine, and so is what the default sampler follows.
        if leaf.follows is None and "hf" not in leaf.engines:
            what = "not built for this sampler" if leaf.engines else "not built yet"
            assert any(line.startswith(f"{leaf.key}: {what}: {leaf.planned}") for line in said)
    resolve(Merge(program, [[DefaultsEntry(leaf.key, leaf.default) for leaf in leaves]]))
    assert told() == {}


@pytest.mark.parametrize("program", [PPO, SFT], ids=lambda p: p.name)
def test_every_setting_without_effect_says_so_once(program, told):
    leaves = [leaf for leaf in schema_of(program.root).every.values() if leaf.no_effect and not leaf.planned]
    resolve(Merge(program, [[DefaultsEntry(leaf.key, changed(leaf)) for leaf in leaves]]))
    assert told() == {leaf.key: f"has no effect: {leaf.no_effect}" for leaf in leaves} and leaves


def test_a_file_may_repeat_the_default_of_a_setting_without_effect_unremarked(tmp_path, told):
    (tmp_path / "mine.yaml").write_text("trainer: {use_v1: true}\n")
    ppo("-cp", str(tmp_path), "-cn", "mine")
    assert told() == {}
    ppo("trainer.use_v1=true")
    assert list(told()) == ["trainer.use_v1"]


def test_a_follower_of_a_missing_feature_may_repeat_what_it_follows_and_nothing_else():
    key = f"{R}.profiler.finish_hook_cmd"
    ppo("global_profiler.finish_hook_cmd=null", f"{key}=null")
    with pytest.raises(NotBuiltError, match="a command after profiling"):
        ppo("global_profiler.finish_hook_cmd=null", f"{key}=/hook.sh")


def test_what_works_instead_is_said_for_features_that_exist_in_the_tree():
    features = {leaf.planned for leaf in schema_of(PPOTrainerConfig).every.values()} | set(LATER.values())
    assert set(INSTEAD) <= features
    with pytest.raises(NotBuiltError, match=r"Leave it out: training starts exactly from the base"):
        ppo("actor_rollout_ref.model.lora.lora_B_init_method=normal")
    with pytest.raises(NotBuiltError, match=r"the Prometheus endpoint.*server\.url names answer /metrics themselves"):
        ppo(f"{R}.prometheus.enable=true")


def test_a_value_of_another_type_is_refused_by_the_features_name_and_by_its_type_where_a_sampler_follows_it():
    with pytest.raises(NotBuiltError, match=r"the Muon optimizer.*override_optimizer_config takes momentum"):
        ppo(f"{A}.optim.muon_num_ns_steps=many")
    for engine in ("hf", "vllm"):
        with pytest.raises(ConfigError, match="expert_parallel_size: wrong type"):
            ppo(f"{R}.name={engine}", f"{R}.expert_parallel_size=many")


# ---- mistakes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "says"),
    [
        (f"{R}.temprature=1", f"{R}.temprature: unknown setting. Got 1. Did you mean '{R}.temperature'?"),
        ("rollout.n=4", f"Did you mean '{R}.n'"),
        ("trainer.lr=1", f"'{A}.optim.lr'"),
        ("+trainr.total_epochs=1", "Did you mean 'trainer.total_epochs'?"),
        ("xyzzy=1", "--help lists every setting."),
        ("trainer.seed.x=1", "trainer.seed.x: unknown setting"),
        ("trainer=fast", "trainer: is a section, not a setting. Got 'fast'."),
        ("critic=null", "critic: is a section, not a setting."),
        ("trainer.nnodes=two", "trainer.nnodes: wrong type. Got 'two'. Allowed: a whole number."),
        ("trainer.nnodes=1.5", "trainer.nnodes: wrong type. Got 1.5. Allowed: a whole number."),
        ("trainer.nnodes=null", "trainer.nnodes: wrong type. Allowed: a whole number."),
        ("trainer.val_only=perhaps", "trainer.val_only: wrong type. Got 'perhaps'. Allowed: true or false."),
        (f"{A}.optim.lr=fast", f"{A}.optim.lr: wrong type. Got 'fast'. Allowed: a number."),
        (f"{A}.optim.betas=[a,b]", "Allowed: a list."),
        ("trainer.logger={a: 1}", "trainer.logger: wrong type. Got {'a': 1}. Allowed: a list."),
        ("actor_rollout_ref.model.override_config=1", "Allowed: a mapping."),
        ("trainer.resume_mode=sometimes", "no such choice. Got 'sometimes'. Allowed: auto, disable, resume_path."),
        (f"{A}.checkpoint.save_contents=[model,weights]", "no such choice. Got 'weights'. Allowed: model, optimizer"),
        (
            "actor_rollout_ref.model.lora.dropout=0.5",
            "model.lora.dropout: not built yet: dropout of adapters. Got 0.5.",
        ),
    ],
)
def test_each_mistake_says_what_where_and_what_is_allowed(override, says):
    with pytest.raises(ConfigError) as caught:
        ppo(override)
    assert says in str(caught.value)


def test_all_mistakes_are_reported_together():
    with pytest.raises(ConfigError) as caught:
        ppo("trainer.nodes=1", "trainer.seed=x", "trainer.resume_mode=y", "actor_rollout_ref.model.lora.dropout=1")
    assert not isinstance(caught.value, NotBuiltError)
    assert len(str(caught.value).splitlines()) == 5


def test_a_mistake_in_a_followed_setting_is_reported_once():
    with pytest.raises(ConfigError) as caught:
        ppo(f"{R}.n=many")
    assert len(str(caught.value).splitlines()) == 1 and caught.value.key == f"{R}.n"


# ---- printing, saving, checking ------------------------------------------------------------------------------------


OVERRIDES = {
    "ppo_trainer": [
        "trainer.project_name=1e-6",
        "trainer.experiment_name='a: b # c'",
        f"{A}.lr=1e-6",
        "+actor_rollout_ref.model.override_config={a: {b: [1, null, 'x']}, t: '${not} a key'}".replace(
            "${not}", "\\${not}"
        ),
        "actor_rollout_ref.model.custom_chat_template='{% for m in messages %}{{ m }}\n{% endfor %}'",
        "data.train_files=[~/a,~/b]",
        "trainer.n_gpus_per_node=2",
    ],
    "sft_trainer": ["data.prompt_key=q", "optim.betas=[0.9,0.95]", "trainer.experiment_name=yes"],
}


@pytest.mark.parametrize("name", OVERRIDES)
def test_a_saved_configuration_loads_back_to_the_same(name, tmp_path, told):
    cfg = read_config(name, OVERRIDES[name])
    told_before = dict(told())
    save_config(cfg, tmp_path / "new" / "run.yaml")
    again = read_config(name, ["--config-path", str(tmp_path / "new"), "--config-name", "run"])
    assert again == cfg and to_dict(again) == to_dict(cfg)
    assert told() == told_before


def test_cfg_job_prints_yaml_that_loads_back_and_leaves_without_looking_at_the_machine(capsys, tmp_path):
    with pytest.raises(SystemExit) as left:
        load_config("ppo_trainer", ["--cfg", "job", "trainer.nnodes=64", "data.train_files=/no/such/file"])
    assert left.value.code == 0
    (tmp_path / "printed.yaml").write_text(capsys.readouterr().out)
    cfg = ppo("-cp", str(tmp_path), "-cn", "printed")
    assert (cfg.trainer.nnodes, cfg.data.train_files) == (64, "/no/such/file")
    assert (tmp_path / "printed.yaml").read_text().startswith(to_yaml(cfg) + "# 64 processes on Ray\n")


def test_only_the_job_can_be_printed():
    with pytest.raises(ConfigError, match=r"--cfg: nothing of that name.*Allowed: job"):
        load_config("ppo_trainer", ["--cfg", "hydra"])


def test_help_lists_what_works_and_leaves(capsys):
    with pytest.raises(SystemExit) as left:
        load_config("ppo_trainer", ["--help"])
    text = capsys.readouterr().out
    assert left.value.code == 0 and f"{R}.n=1  responses per prompt" in text
    assert "layer_name_map" not in text and "(auto, disable, resume_path)" in text


def test_loading_checks_the_settings_against_each_other_and_the_machine(shared, tmp_path):
    data = tmp_path / "train.jsonl"
    data.write_text("{}\n")
    good = [f"data.train_files={data}", f"actor_rollout_ref.model.path={shared}/models/tinystories-260k"]
    good += ["data.train_batch_size=8", f"{A}.ppo_mini_batch_size=8"]
    assert load_config("ppo_trainer", good).data.train_files == str(data)
    with pytest.raises(ConfigError, match=r"rollout\.n"):
        load_config("ppo_trainer", [*good, "algorithm.adv_estimator=grpo"])
    with pytest.raises(ConfigError, match=r"no/such"):
        load_config(
            "sft_trainer", ["data.train_files=/no/such.parquet", f"model.path={shared}/models/tinystories-260k"]
        )


def test_importing_the_configuration_loads_neither_torch_nor_hydra():
    code = "import sys, verl.config; print([m for m in ('torch', 'hydra', 'omegaconf', 'ray') if m in sys.modules])"
    assert python("-c", code).stdout.strip() == "[]"


def test_the_script_prints_a_program_and_reports_a_mistake_in_one_line(project_root):
    script = str(project_root / "scripts/print_cfg.py")
    assert "  total_epochs: 4\n" in python(script, "sft_trainer").stdout
    failed = python(script, "trainer.nodes=2", check=False)
    assert failed.returncode == 1 and failed.stderr.startswith("error: trainer.nodes: unknown setting")


def test_a_section_from_a_mapping_refuses_what_nothing_follows_and_takes_its_default():
    assert from_mapping(ActorConfig, {"veomni": {"param_offload": False}}) == ActorConfig()
    with pytest.raises(NotBuiltError, match=r"qat.enable: not built yet: quantization-aware training"):
        from_mapping(ActorConfig, {"qat": {"enable": True}})
