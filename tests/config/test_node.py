import copy
import dataclasses
import pickle

import pytest

from verl.config import (
    ActorConfig,
    OptimizerConfig,
    PPOTrainerConfig,
    SFTTrainerConfig,
    leaves,
    record_reads,
    replace,
    to_dict,
    unread,
)
from verl.config.loading.configuration import read_config
from verl.config.loading.groups import NAMES
from verl.config.schema.node import rows, schema_of


def test_attribute_item_and_get_reach_the_same_value():
    cfg = PPOTrainerConfig()
    assert cfg.trainer.total_epochs == cfg["trainer"]["total_epochs"] == cfg.get("trainer").get("total_epochs") == 30


def test_get_gives_the_fallback_for_an_unknown_or_a_null_setting():
    cfg = PPOTrainerConfig()
    assert cfg.data.get("no_such_key", 5) == 5
    assert cfg.data.get("seed", 7) == 7
    assert "no_such_key" not in cfg.data and "seed" in cfg.data
    with pytest.raises(KeyError):
        cfg.data["no_such_key"]


def test_a_section_iterates_like_a_mapping():
    kl = PPOTrainerConfig().algorithm.kl_ctrl
    assert dict(kl.items()) == {"type": "fixed", "kl_coef": 0.001, "horizon": 10000, "target_kl": 0.1}
    assert list(kl) == kl.keys() and len(kl) == 4 and kl.values()[0] == "fixed"


def test_settings_cannot_be_assigned():
    with pytest.raises(dataclasses.FrozenInstanceError):
        PPOTrainerConfig().trainer.total_epochs = 3


def test_two_trees_share_no_mutable_default():
    a, b = PPOTrainerConfig(), PPOTrainerConfig()
    a.trainer.logger.append("x")
    assert b.trainer.logger == ["console", "file"]


def test_the_critic_has_its_own_learning_rate():
    cfg = PPOTrainerConfig()
    assert cfg.actor_rollout_ref.actor.optim.lr == 1e-6 and cfg.critic.optim.lr == 1e-5
    assert SFTTrainerConfig().optim.lr == 1e-3


def test_replace_reaches_into_sections_and_leaves_the_original_alone():
    cfg = PPOTrainerConfig()
    made = replace(cfg, **{"critic.optim.lr": 0.5, "critic.optim.weight_decay": 0.0, "trainer.seed": 9})
    assert (made.critic.optim.lr, made.critic.optim.weight_decay, made.trainer.seed) == (0.5, 0.0, 9)
    assert cfg.critic.optim.lr == 1e-5 and made.actor_rollout_ref is cfg.actor_rollout_ref


def test_reads_are_recorded_under_the_full_key():
    cfg = read_config("ppo_trainer", [])
    with record_reads() as outer:
        _ = cfg.critic.optim.lr
        with record_reads() as inner:
            _ = cfg["actor_rollout_ref"]["rollout"].get("n")
        _ = cfg.trainer
    assert inner == {"actor_rollout_ref.rollout.n"}
    assert outer == {"critic.optim.lr", "actor_rollout_ref.rollout.n"}


def test_turning_a_tree_into_dictionaries_reads_nothing():
    cfg = read_config("ppo_trainer", [])
    with record_reads() as reads:
        assert to_dict(cfg)["critic"]["optim"]["betas"] == [0.9, 0.999]
    assert reads == set()


def test_what_was_changed_and_never_read_is_listed():
    defaults = read_config("ppo_trainer", [])
    cfg = read_config("ppo_trainer", ["trainer.save_freq=5", "trainer.test_freq=5"])
    with record_reads() as reads:
        _ = cfg.trainer.save_freq
    assert unread(cfg, defaults, reads) == ["trainer.test_freq"]


@pytest.mark.parametrize("again", [lambda cfg: pickle.loads(pickle.dumps(cfg)), copy.deepcopy])
def test_a_copy_in_another_process_is_equal_and_still_records(again):
    cfg = read_config("ppo_trainer", ["actor_rollout_ref.model.override_config={a: {b: 1}}"])
    made = again(cfg)
    assert made == cfg and made is not cfg
    with record_reads() as reads:
        assert made.actor_rollout_ref.model.override_config == {"a": {"b": 1}}
    assert reads == {"actor_rollout_ref.model.override_config"}


def test_a_changed_copy_still_records():
    cfg = replace(read_config("ppo_trainer", []), **{"critic.optim.lr": 0.1})
    with record_reads() as reads:
        _ = cfg.critic.optim.lr
    assert reads == {"critic.optim.lr"}


@pytest.mark.parametrize("root", [PPOTrainerConfig, SFTTrainerConfig])
def test_every_leaf_has_a_type_that_its_default_fits(root):
    from verl.config.schema.node import convert

    for leaf in schema_of(root).leaves.values():
        got = convert(leaf.default, leaf.type)
        assert got == leaf.default and type(got) is type(leaf.default), leaf.key


@pytest.mark.parametrize("root", [PPOTrainerConfig, SFTTrainerConfig])
def test_every_default_is_one_of_the_choices(root):
    for leaf in schema_of(root).leaves.values():
        values = leaf.default if isinstance(leaf.default, list) else [leaf.default]
        assert leaf.choices is None or leaf.default is None or set(values) <= set(leaf.choices), leaf.key


@pytest.mark.parametrize("root", [PPOTrainerConfig, SFTTrainerConfig])
def test_no_setting_follows_itself_in_a_circle(root):
    found = schema_of(root).leaves
    for leaf in found.values():
        seen = [leaf.key]
        while leaf.follows is not None:
            leaf = found[leaf.follows]
            assert leaf.key not in seen, seen
            seen.append(leaf.key)


def test_a_followed_key_that_is_not_in_the_tree_is_a_known_one():
    own = dict(leaves(SFTTrainerConfig))
    known = {*own, *schema_of(PPOTrainerConfig).leaves}
    for key, declared in own.items():
        follows = declared.metadata["follows"]
        assert follows is None or follows.startswith(".") or follows in known, key


def test_every_leaf_says_what_it_means():
    for key, declared in leaves(PPOTrainerConfig):
        assert declared.metadata["meaning"], key


def test_single_sections_can_be_made_alone():
    assert ActorConfig(ppo_epochs=2).ppo_epochs == 2
    assert OptimizerConfig(lr=0.1).lr == 0.1


def test_every_row_of_upstreams_settings_belongs_to_a_section_class_and_is_not_declared():
    roots = {program.root for program, _ in NAMES.values()}
    classes = [cls for root in roots for cls in [root, *schema_of(root).sections.values()]]
    ancestors = {base.__name__: base for cls in classes for base in cls.__mro__}
    for section, own in rows().items():
        assert section in ancestors, f"{section} is no section"
        declared = {key for key, _ in leaves(ancestors[section])}
        names = [row.name for row in own]
        assert len(set(names)) == len(names) and not declared & set(names), section
        assert all((row.feature is None) != (row.no_effect is None) for row in own), section


def test_most_of_what_is_declared_works_and_what_does_not_is_data():
    declared = schema_of(PPOTrainerConfig).leaves.values()
    works = [leaf for leaf in declared if leaf.engines or (leaf.planned is None and leaf.no_effect is None)]
    assert all(leaf.engines for leaf in declared if leaf.planned is not None), "settings that nothing follows are data"
    assert len(declared) <= 805 and len(works) / len(declared) >= 0.91
