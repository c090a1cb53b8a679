import pytest

from verl.config.loading.configuration import read_config
from verl.errors import ConfigError


@pytest.fixture
def write(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def put(name, text):
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        return file

    return put


def read(*argv, name="ppo_trainer"):
    return read_config(name, list(argv))


def test_a_name_alone_is_looked_up_in_the_working_directory(write):
    write("mine.yaml", "trainer: {seed: 5}\n")
    assert read("--config-name", "mine").trainer.seed == read("-cn", "mine.yaml").trainer.seed == 5


def test_a_folder_alone_means_the_programs_own_file_name(write):
    write("conf/ppo_trainer.yaml", "trainer: {seed: 6}\n")
    assert read("--config-path", "conf").trainer.seed == 6
    assert read("--config-name", "ppo_trainer").trainer.seed == 1


def test_an_absolute_folder_and_a_file_url_work(write, tmp_path):
    write("conf/mine.yaml", "trainer: {seed: 7}\n")
    assert read("-cp", str(tmp_path / "conf"), "-cn", "mine").trainer.seed == 7
    assert read("-cp", f"file://{tmp_path}/conf", "-cn", "mine").trainer.seed == 7


def test_a_variable_in_the_folder_expands(write, tmp_path, monkeypatch):
    write("conf/mine.yaml", "trainer: {seed: 8}\n")
    monkeypatch.setenv("CONFIGS", str(tmp_path / "conf"))
    assert read("-cp", "$CONFIGS", "-cn", "mine").trainer.seed == 8


def test_a_name_of_upstream_needs_no_file_even_with_its_folder(write):
    cfg = read("--config-path=./config", "--config-name=ppo_megatron_trainer.yaml")
    assert cfg.critic.strategy == "megatron"


def test_a_file_that_is_not_there_names_the_places_and_the_nearest_file(write, tmp_path):
    write("conf/grpo_math.yaml", "")
    with pytest.raises(ConfigError) as caught:
        read("-cp", "conf", "-cn", "grpo_maths")
    assert str(tmp_path / "conf" / "grpo_maths.yaml") in str(caught.value)
    assert "Did you mean 'grpo_math'" in str(caught.value)


@pytest.mark.parametrize("text", ["", "# only a comment\n", "trainer:\n", "hydra:\n  run: {dir: x}\n"])
def test_a_file_that_sets_nothing_changes_nothing(write, text):
    write("mine.yaml", text)
    assert read("-cn", "mine") == read()


def test_a_broken_file_is_named_with_its_line(write):
    write("mine.yaml", "trainer:\n  seed: 1\n bad: [\n")
    with pytest.raises(ConfigError, match=r"mine\.yaml: not readable as YAML, line 3: expected <block end>"):
        read("-cn", "mine")
    write("mine.yaml", "trainer: {seed: 1}\ndata: {}\ntrainer: {seed: 2}\n")
    with pytest.raises(ConfigError, match="line 3: found duplicate key trainer"):
        read("-cn", "mine")


def test_a_file_that_is_a_list_is_refused(write):
    write("mine.yaml", "- trainer\n")
    with pytest.raises(ConfigError, match="holds 'key: value' lines"):
        read("-cn", "mine")


def test_an_error_in_a_file_names_the_file(write):
    write("mine.yaml", "trainer: {seed: often, total_epoch: 3}\n")
    with pytest.raises(ConfigError) as caught:
        read("-cn", "mine")
    lines = str(caught.value).splitlines()
    assert lines[0] == "2 settings cannot stand:" and all("mine.yaml" in line for line in lines[1:])


def test_defaults_that_name_our_base_and_the_file_itself_work(write):
    write("mine.yaml", "defaults: [ppo_trainer, _self_]\ntrainer: {seed: 3}\n")
    assert read("-cn", "mine", "trainer.nnodes=2").trainer.seed == 3


def test_a_file_may_carry_the_name_of_the_base_it_builds_on(write):
    write("conf/ppo_trainer.yaml", "defaults: [ppo_trainer, _self_]\ntrainer: {seed: 4}\n")
    assert read("-cp", "conf").trainer.seed == 4


def test_the_position_of_the_file_in_its_own_list_decides_who_wins(write):
    write("other.yaml", "trainer: {seed: 1, nnodes: 2, save_freq: 3}\n")
    write("last.yaml", "defaults: [ppo_trainer, other, _self_]\ntrainer: {nnodes: 5}\n")
    write("unsaid.yaml", "defaults: [ppo_trainer, other]\ntrainer: {nnodes: 5}\n")
    write("first.yaml", "defaults: [_self_, other]\ntrainer: {nnodes: 5}\n")
    assert [read("-cn", name).trainer.nnodes for name in ("last", "unsaid", "first")] == [5, 5, 2]
    assert read("-cn", "last").trainer.save_freq == 3


def test_files_build_on_files_in_other_folders_by_a_search_path(write, tmp_path):
    write("shared/base.yaml", "trainer: {seed: 11, nnodes: 2}\n")
    write(
        "conf/mine.yaml",
        f"hydra:\n  searchpath: ['file://{tmp_path}/shared', 'pkg://verl.trainer.config']\n"
        "defaults: [ppo_trainer, base, _self_]\ntrainer: {seed: 12}\n",
    )
    cfg = read("-cp", "conf", "-cn", "mine")
    assert (cfg.trainer.seed, cfg.trainer.nnodes) == (12, 2)


def test_a_group_file_lands_under_its_group_or_where_it_says(write):
    write("critic/small.yaml", "optim: {lr: 0.5}\n")
    write("recipe/fast.yaml", "# @package _global_\ntrainer: {seed: 21}\n")
    write("lr/high.yaml", "lr: 0.25\n")
    write(
        "mine.yaml",
        "defaults:\n  - ppo_trainer\n  - critic: small\n  - override recipe: fast\n"
        "  - lr@actor_rollout_ref.actor.optim: high\n  - optional data: null\n  - _self_\n",
    )
    cfg = read("-cn", "mine")
    assert (cfg.critic.optim.lr, cfg.trainer.seed, cfg.actor_rollout_ref.actor.optim.lr) == (0.5, 21, 0.25)


def test_the_groups_of_upstreams_own_defaults_list_mean_our_defaults(write):
    write(
        "mine.yaml",
        "defaults:\n  - model_engine: dp\n  - actor@actor_rollout_ref.actor: ${model_engine}_actor\n"
        "  - data@data: legacy_data\n  - ref@actor_rollout_ref.ref: dp_ref\n"
        "  - rollout@actor_rollout_ref.rollout: rollout\n  - model@actor_rollout_ref.model: hf_model\n"
        "  - critic@critic: dp_critic\n  - reward@reward: reward\n"
        "  - algorithm@algorithm.rollout_correction: rollout_correction\n  - _self_\n",
    )
    assert read("-cn", "mine") == read()


def test_an_engine_group_in_a_file_sets_the_strategies(write):
    write("mine.yaml", "defaults: [ppo_trainer, {override model_engine: megatron}, _self_]\ncritic: {strategy: fsdp}\n")
    write("whole.yaml", "model_engine: megatron\ncritic: {strategy: fsdp}\n")
    write("one.yaml", "defaults: [ppo_trainer, {actor@actor_rollout_ref.actor: megatron_actor}]\n")
    for name in ("mine", "whole"):
        cfg = read("-cn", name)
        assert (cfg.actor_rollout_ref.actor.strategy, cfg.critic.strategy) == ("megatron", "fsdp")
    assert read("-cn", "one").actor_rollout_ref.actor.strategy == "megatron"
    assert read("-cn", "one").critic.strategy == "auto"


def test_an_unknown_default_is_an_error_with_the_nearest_name(write):
    write("mine.yaml", "defaults: [ppo_trainr, _self_]\n")
    with pytest.raises(ConfigError, match=r"Did you mean 'ppo_trainer'"):
        read("-cn", "mine")
    write("mine.yaml", "defaults: [{colour: red}]\n")
    with pytest.raises(ConfigError, match=r"no such configuration file; looked for .*colour/red\.yaml"):
        read("-cn", "mine")


def test_files_that_build_on_each_other_in_a_circle_are_refused(write):
    write("a.yaml", "defaults: [b]\n")
    write("b.yaml", "defaults: [a]\n")
    with pytest.raises(ConfigError, match="lead back to itself"):
        read("-cn", "a")


def test_the_base_of_another_program_is_refused(write):
    write("mine.yaml", "defaults: [sft_trainer_engine, _self_]\n")
    with pytest.raises(ConfigError, match="belongs to another program"):
        read("-cn", "mine")


def test_a_helper_value_that_interpolations_read_is_no_unknown_key(write):
    write("mine.yaml", "my_lr: 3e-4\nactor_rollout_ref: {actor: {optim: {lr: '${my_lr}'}}}\n")
    assert read("-cn", "mine").actor_rollout_ref.actor.optim.lr == 3e-4
    write("mine.yaml", "my_lr: 3e-4\n")
    with pytest.raises(ConfigError, match="my_lr: unknown setting"):
        read("-cn", "mine")


def test_the_class_notes_of_upstreams_files_are_passed_over_and_a_users_own_is_refused(write):
    write("mine.yaml", "critic: {_target_: verl.workers.config.FSDPCriticConfig, optim: {lr: 0.5}}\n")
    assert read("-cn", "mine").critic.optim.lr == 0.5
    write("mine.yaml", "critic: {_target_: my_pkg.MyCritic}\n")
    with pytest.raises(ConfigError, match=r"critic\._target_: a section's class cannot be replaced"):
        read("-cn", "mine")


def test_a_mandatory_value_left_open_is_asked_for_unless_the_command_line_gives_it(write):
    write("mine.yaml", "actor_rollout_ref:\n  rollout:\n    name: ???\n")
    with pytest.raises(ConfigError, match=r"rollout\.name: has to be given a value"):
        read("-cn", "mine")
    assert read("-cn", "mine", "actor_rollout_ref.rollout.name=hf").actor_rollout_ref.rollout.name == "hf"


def test_a_mandatory_value_of_a_model_that_is_off_stays_open(write):
    write("mine.yaml", 'reward: {reward_model: {enable: false, rollout: {name: "???"}}}\n')
    assert read("-cn", "mine").reward.reward_model.rollout.name == "hf"
    with pytest.raises(ConfigError, match=r"reward_model\.rollout\.name: has to be given a value"):
        read("-cn", "mine", "reward.reward_model.enable=true", "reward.reward_model.model_path=rm")


@pytest.mark.parametrize("order", ["strategy: {0}, fsdp_config: {1}", "fsdp_config: {1}, strategy: {0}"])
def test_the_engine_that_a_section_of_fsdp_names_in_a_file_says_nothing_beside_the_roles_own(write, order):
    policy = order.format("fsdp2", '{strategy: "${actor_rollout_ref.actor.strategy}"}')
    follower = order.format('"${actor_rollout_ref.actor.strategy}"', "{strategy: fsdp}")
    text = f"{{actor: {{{policy}}}, ref: {{{follower}}}}}"
    write("mine.yaml", f"actor_rollout_ref: {text}\ncritic: {{strategy: fsdp2, fsdp: {{strategy: fsdp}}}}\n")
    cfg = read("-cn", "mine")
    assert cfg.actor_rollout_ref.actor.strategy == cfg.actor_rollout_ref.ref.strategy == cfg.critic.strategy == "fsdp2"


def test_a_section_of_fsdp_that_names_another_engine_contradicts_the_role(write):
    write("mine.yaml", "critic: {strategy: fsdp2, fsdp: {strategy: fsdp_turbo}}\n")
    with pytest.raises(ConfigError, match=r"critic\.strategy"):
        read("-cn", "mine")


def test_null_in_a_file_of_an_older_release_means_the_default(write):
    write("mine.yaml", "actor_rollout_ref: {actor: {data_loader_seed: null, optim: {min_lr_ratio: null}}}\n")
    assert read("-cn", "mine") == read()
    write("other.yaml", "optim: {min_lr_ratio: null}\n")
    assert read("-cn", "other", name="sft_trainer") == read(name="sft_trainer")


def test_two_names_of_one_thing_may_refer_to_each_other(write):
    write("mine.yaml", 'critic: {grad_clip: "${critic.optim.clip_grad}", optim: {clip_grad: 0.5}}\n')
    cfg = read("-cn", "mine")
    assert cfg.critic.grad_clip == cfg.critic.optim.clip_grad == 0.5


def test_mappings_of_file_and_command_line_are_merged(write):
    write("mine.yaml", "actor_rollout_ref: {model: {override_config: {a: 1, b: {c: 2}}}}\n")
    cfg = read("-cn", "mine", "actor_rollout_ref.model.override_config.b.c=3")
    assert cfg.actor_rollout_ref.model.override_config == {"a": 1, "b": {"c": 3}}
