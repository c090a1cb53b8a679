import pytest

from verl.config.loading.configuration import read_config
from verl.config.loading.files import Override, parse_command_line, parse_override
from verl.errors import ConfigError, NotBuiltError


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a.b=1", 1),
        ("a.b=1e-6", 1e-6),
        ("+a.b=c", "c"),
        ("++a.b=true", True),
        ("a.b=null", None),
        ("a.b=", ""),
        ("a.b=[1,x]", [1, "x"]),
        ("a.b={x: 1, y: {z: [2]}}", {"x": 1, "y": {"z": [2]}}),
        ("a.b='x, y'", "x, y"),
        ('a.b="it\'s"', "it's"),
        ("a.b=~/data/x.parquet", "~/data/x.parquet"),
        ("a.b=[~/x, ~/y z]", ["~/x", "~/y z"]),
        ("a.b=x=y", "x=y"),
        ("a.b=https://h/p?q=1&r#s", "https://h/p?q=1&r#s"),
        ("a.b=naïve (v2)", "naïve (v2)"),
        ("a.b=${c.d}", "${c.d}"),
        ("a.b=$HOME/x", "$HOME/x"),
    ],
)
def test_a_value_means_what_it_means_to_hydra_and_a_refused_text_is_a_text(text, value):
    assert parse_override(text) == Override("a.b", value)


def test_a_tilde_before_the_key_deletes():
    assert parse_override("~a.b").delete and parse_override("~a.b=3").delete


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a.b=[1,2", "close every bracket"),
        ("a.b:3", "Allowed: key=value"),
        ("train", "Allowed: key=value"),
        ("trainer.logger=console,wandb", r"'trainer.logger=\[console,wandb\]'"),
        ("a.b=range(1,5)", "a sweep"),
    ],
)
def test_an_override_that_cannot_be_read_says_how_to_write_it(text, says):
    with pytest.raises(ConfigError, match=says):
        parse_override(text)


@pytest.mark.parametrize(
    "argv",
    [
        ["--config-path", "conf", "--config-name", "mine", "a=1"],
        ["--config-path=conf", "a=1", "--config-name=mine"],
        ["-cp", "conf", "-cn", "mine", "a=1"],
        ["-cp='conf'", "-cn='mine'", "a=1"],
    ],
)
def test_flags_stand_anywhere_in_every_form(argv):
    found = parse_command_line(argv)
    assert (found.path, found.name, found.overrides) == ("conf", "mine", [Override("a", 1)])


def test_all_mistakes_of_a_command_line_are_reported_at_once():
    with pytest.raises(ConfigError) as caught:
        parse_command_line(["--confg-name", "x", "a.b=1", "--cfg"])
    assert "--confg-name: unknown flag" in str(caught.value) and "'--config-name'" in str(caught.value)
    assert "Got 'x'" in str(caught.value) and "--cfg: the flag needs a value" in str(caught.value)


@pytest.mark.parametrize("flag", ["--multirun", "-m"])
def test_sweeps_are_refused_by_name(flag):
    with pytest.raises(NotBuiltError, match="Start one run per value"):
        parse_command_line([flag, "a=1"])


def test_the_last_of_two_equal_keys_wins():
    assert read_config("ppo_trainer", ["trainer.nnodes=2", "trainer.nnodes=3"]).trainer.nnodes == 3


def test_deleting_resets_to_the_default_and_a_later_value_counts_again():
    argv = ["trainer.nnodes=2", "trainer.save_freq=5", "~trainer.nnodes", "~trainer.save_freq", "trainer.save_freq=7"]
    cfg = read_config("ppo_trainer", argv)
    assert (cfg.trainer.nnodes, cfg.trainer.save_freq) == (1, 7)


def test_deleting_a_section_resets_everything_in_it(tmp_path):
    (tmp_path / "mine.yaml").write_text("critic: {optim: {lr: 0.1, betas: [0.5, 0.6]}, ppo_epochs: 3}\n")
    cfg = read_config("ppo_trainer", ["-cp", str(tmp_path), "-cn", "mine", "~critic.optim"])
    assert (cfg.critic.optim.lr, cfg.critic.optim.betas, cfg.critic.ppo_epochs) == (1e-5, [0.9, 0.999], 3)


def test_deleting_an_unknown_key_is_an_error():
    with pytest.raises(ConfigError, match=r"trainer\.nodes: unknown setting.*'trainer\.nnodes'"):
        read_config("ppo_trainer", ["~trainer.nodes"])


def test_one_entry_of_a_mapping_can_be_set_and_deleted():
    key = "actor_rollout_ref.model.override_config"
    argv = [f"{key}={{a: 1, b: {{c: 2}}}}", f"+{key}.b.d=3", f"~{key}.a", f"++{key}.attn_implementation=eager"]
    cfg = read_config("ppo_trainer", argv)
    assert cfg.actor_rollout_ref.model.override_config == {
        "b": {"c": 2, "d": 3},
        "attn_implementation": "eager",
    }


def test_a_mapping_that_may_be_null_takes_entries_too():
    key = "actor_rollout_ref.actor.optim.override_optimizer_config"
    cfg = read_config("ppo_trainer", [f"+{key}.fused=true"])
    assert cfg.actor_rollout_ref.actor.optim.override_optimizer_config == {"fused": True}


def test_a_section_takes_a_mapping_on_the_command_line():
    cfg = read_config("ppo_trainer", ["critic.optim={lr: 0.1, weight_decay: 0}"])
    assert (cfg.critic.optim.lr, cfg.critic.optim.weight_decay) == (0.1, 0.0)


@pytest.mark.parametrize("engine", ["megatron", "fsdp2"])
def test_an_engine_choice_sets_the_strategies(engine):
    cfg = read_config("ppo_trainer", [f"model_engine={engine}"])
    assert {cfg.actor_rollout_ref.actor.strategy, cfg.actor_rollout_ref.ref.strategy, cfg.critic.strategy} == {engine}


def test_the_engine_choice_dp_changes_nothing_and_a_strategy_beside_a_choice_wins():
    assert read_config("ppo_trainer", ["model_engine=dp"]) == read_config("ppo_trainer", [])
    cfg = read_config("ppo_trainer", ["critic.strategy=fsdp2", "model_engine=megatron"])
    assert (cfg.critic.strategy, cfg.actor_rollout_ref.actor.strategy) == ("fsdp2", "megatron")


def test_an_unknown_engine_choice_names_the_known_ones():
    with pytest.raises(ConfigError, match=r"model_engine: unknown engine.*Did you mean 'megatron'"):
        read_config("ppo_trainer", ["model_engine=megatorn"])


def test_supervised_runs_choose_their_engine_by_group():
    cfg = read_config("sft_trainer", ["engine=megatron", "optim=megatron", "engine.param_offload=true"])
    assert cfg.engine.strategy == "megatron" and cfg.engine.param_offload is True
