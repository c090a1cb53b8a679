"""Sections made by hand, from OmegaConf and under upstream's import paths."""

import dataclasses

import pytest
from omegaconf import OmegaConf

from verl import device
from verl.config import PPOTrainerConfig, replace, to_dict
from verl.config.schema.node import from_mapping
from verl.errors import ConfigError, NotBuiltError
from verl.trainer.config import AlgoConfig, CheckpointConfig, KLControlConfig, RolloutCorrectionConfig
from verl.utils.config import omega_conf_to_dataclass, validate_config
from verl.workers.config import (
    ActorConfig,
    CriticConfig,
    FSDPEngineConfig,
    FSDPOptimizerConfig,
    HFModelConfig,
    OptimizerConfig,
    PolicyLossConfig,
    RolloutConfig,
)


def test_an_actor_section_is_made_by_keyword_arguments_as_users_tests_do():
    cfg = ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=2, clip_ratio=0.2, clip_ratio_c=3.0)
    assert (cfg.strategy, cfg["clip_ratio"], cfg.get("clip_ratio_c")) == ("fsdp", 0.2, 3.0)
    assert cfg.get("clip_ratio_low", 0.1) == 0.1 and "use_kl_loss" in cfg
    assert cfg.policy_loss.loss_mode == cfg.policy_loss.get("loss_mode") == "vanilla"


@pytest.mark.parametrize(
    "cls, values",
    [
        (CriticConfig, {"strategy": "fsdp", "rollout_n": 1, "ppo_mini_batch_size": 4, "cliprange_value": 0.5}),
        (RolloutConfig, {"name": "hf", "n": 4, "temperature": 0.7}),
        (HFModelConfig, {"path": "/models/a", "lora_rank": 0}),
        (FSDPEngineConfig, {"param_offload": True, "model_dtype": "bf16"}),
        (FSDPOptimizerConfig, {"lr": 1e-4, "betas": [0.9, 0.95]}),
        (AlgoConfig, {"gamma": 0.9, "kl_ctrl": KLControlConfig(kl_coef=0.2)}),
        (CheckpointConfig, {"save_contents": ["model"]}),
        (PolicyLossConfig, {"loss_mode": "my.losses:mine"}),
    ],
)
def test_every_section_of_the_facades_is_made_by_keyword_arguments(cls, values):
    made = cls(**values)
    assert {name: made[name] for name in values} == values
    assert all(made[name] == field for name, field in cls().items() if name not in values)


def test_a_keyword_that_is_no_setting_is_an_error():
    with pytest.raises(TypeError, match="clip_ration"):
        ActorConfig(clip_ration=0.2)


def test_a_mapping_given_for_a_section_becomes_that_section():
    cfg = ActorConfig(policy_loss={"loss_mode": "my.losses:mine"}, optim=OmegaConf.create({"lr": 1e-4}))
    assert cfg.policy_loss == PolicyLossConfig(loss_mode="my.losses:mine")
    assert cfg.optim.lr == 1e-4 and cfg.optim.weight_decay == 0.01


def test_global_batch_info_is_empty_and_no_setting():
    cfg = ActorConfig()
    assert {**cfg.global_batch_info} == {} and "global_batch_info" not in cfg
    with pytest.raises(dataclasses.FrozenInstanceError):
        cfg.global_batch_info = {"dp_size": 2}
    assert "global_batch_info" not in to_dict(cfg)


def test_an_omegaconf_section_becomes_the_typed_section():
    tree = OmegaConf.create({"a": {"ppo_epochs": "${b}", "optim": {"lr": "1e-5", "betas": [0.9, 0.95]}}, "b": 3})
    made = omega_conf_to_dataclass(tree.a, ActorConfig)
    assert isinstance(made, ActorConfig) and made.ppo_epochs == 3
    assert made.optim == OptimizerConfig(lr=1e-5, betas=[0.9, 0.95])
    assert omega_conf_to_dataclass(OmegaConf.to_container(tree.a, resolve=True), ActorConfig) == made


def test_the_class_may_be_named_by_the_mapping_itself():
    tree = OmegaConf.create({"_target_": "verl.workers.config.FSDPOptimizerConfig", "lr": 0.1})
    assert omega_conf_to_dataclass(tree) == OptimizerConfig(lr=0.1)
    assert omega_conf_to_dataclass(tree, OptimizerConfig) == OptimizerConfig(lr=0.1)
    with pytest.raises(TypeError, match="dataclass_type is needed"):
        omega_conf_to_dataclass({"lr": 0.1})


def test_what_is_a_section_already_comes_back_as_it_is():
    cfg = ActorConfig()
    assert omega_conf_to_dataclass(cfg) is cfg and omega_conf_to_dataclass(cfg, ActorConfig) is cfg
    assert omega_conf_to_dataclass({}, ActorConfig) == omega_conf_to_dataclass(None, ActorConfig) == cfg


def test_a_dataclass_of_the_users_own_gets_the_keys_as_arguments():
    @dataclasses.dataclass
    class Mine:
        a: int
        b: str = "x"

    assert omega_conf_to_dataclass(OmegaConf.create({"a": 2, "_target_": "mine.Mine"}), Mine) == Mine(2, "x")


@pytest.mark.parametrize(
    "mapping, parts",
    [
        ({"ppo_epoch": 2}, ["ppo_epoch: unknown setting of ActorConfig", "Did you mean 'ppo_epochs'"]),
        ({"ppo_epochs": "two"}, ["ppo_epochs: wrong type", "a whole number"]),
        ({"optim": 3}, ["optim: is a section of ActorConfig"]),
    ],
)
def test_a_mapping_that_does_not_fit_is_an_error_with_its_key(mapping, parts):
    with pytest.raises(ConfigError) as caught:
        from_mapping(ActorConfig, mapping)
    assert [part for part in parts if part not in str(caught.value)] == []


def test_a_followed_setting_follows_inside_a_section_too():
    assert from_mapping(ActorConfig, {"optim": {"clip_grad": 0.5}}).grad_clip == 0.5
    tree = {"actor_rollout_ref": {"rollout": {"n": 8}}, "data": {"max_prompt_length": 9}}
    made = from_mapping(PPOTrainerConfig, tree)
    assert made.actor_rollout_ref.actor.rollout_n == 8 and made.actor_rollout_ref.rollout.prompt_length == 9


def test_a_mapping_inside_a_leaf_stays_a_mapping():
    tree = OmegaConf.create({"override_config": {"attn": {"kind": "sdpa"}}})
    assert from_mapping(HFModelConfig, tree).override_config == {"attn": {"kind": "sdpa"}}


def test_validate_config_takes_the_typed_tree_and_a_mapping(tmp_path, monkeypatch):
    monkeypatch.setattr(device, "accelerator", lambda: None)
    (tmp_path / "train.parquet").write_text("")
    changes = {"data.train_files": f"{tmp_path}/train.parquet", "actor_rollout_ref.model.path": "Qwen/Qwen3-8B",
               "critic.model.path": "Qwen/Qwen3-8B"}  # fmt: skip
    cfg = replace(PPOTrainerConfig(), **changes)
    validate_config(cfg, use_reference_policy=False, use_critic=True)
    tree = OmegaConf.create(to_dict(cfg) | {"ray_kwargs": {}})
    validate_config(tree, False, True)
    tree.critic.fsdp.strategy, tree.actor_rollout_ref.actor.lr = "fsdp2", 1e-5  # spellings of upstream's tree
    validate_config(tree, False, True)
    with pytest.raises(NotBuiltError, match="trtllm"):
        validate_config(replace(cfg, **{"actor_rollout_ref.rollout.name": "trtllm"}), False, True)


PRESETS = {
    "disabled": (None, 2.0, None, None, False, "ppo_clip"),
    "decoupled_token_is": ("token", 2.0, None, None, False, "ppo_clip"),
    "decoupled_seq_is": ("sequence", 2.0, None, None, False, "ppo_clip"),
    "decoupled_token_icepop": ("token", "0.5_5.0", None, None, False, "ppo_clip"),
    "decoupled_seq_is_rs": ("sequence", 2.0, "seq_sum_k1", "0.5_2.0", False, "ppo_clip"),
    "decoupled_geo_rs": (None, 2.0, "seq_mean_k1", "0.999_1.001", False, "ppo_clip"),
    "decoupled_geo_rs_seq_tis": ("sequence", 2.0, "seq_mean_k1", "0.999_1.001", False, "ppo_clip"),
    "decoupled_geo_rs_token_tis": ("token", 2.0, "seq_mean_k1", "0.999_1.001", False, "ppo_clip"),
    "decoupled_k3_rs": (None, 2.0, "seq_mean_k3", 0.01, False, "ppo_clip"),
    "decoupled_k3_rs_seq_tis": ("sequence", 2.0, "seq_mean_k3", 0.01, False, "ppo_clip"),
    "decoupled_k3_rs_token_tis": ("token", 2.0, "seq_mean_k3", 0.01, False, "ppo_clip"),
    "bypass_ppo_clip": (None, 2.0, None, None, True, "ppo_clip"),
    "bypass_ppo_clip_geo_rs": (None, 2.0, "seq_mean_k1", "0.999_1.001", True, "ppo_clip"),
    "bypass_ppo_clip_k3_rs": (None, 2.0, "seq_mean_k3", 0.01, True, "ppo_clip"),
    "bypass_pg_is": ("sequence", 2.0, None, None, True, "reinforce"),
    "bypass_pg_token_icepop": ("token", "0.5_5.0", None, None, True, "reinforce"),
    "bypass_pg_geo_rs": (None, 2.0, "seq_mean_k1", "0.999_1.001", True, "reinforce"),
    "bypass_pg_geo_rs_seq_tis": ("sequence", 2.0, "seq_mean_k1", "0.999_1.001", True, "reinforce"),
    "bypass_pg_geo_rs_token_tis": ("token", 2.0, "seq_mean_k1", "0.999_1.001", True, "reinforce"),
}
PRESET_FIELDS = ("rollout_is", "rollout_is_threshold", "rollout_rs", "rollout_rs_threshold", "bypass_mode", "loss_type")


@pytest.mark.parametrize("name", PRESETS)
def test_every_usual_rollout_correction_has_its_values(name):
    made = vars(RolloutCorrectionConfig)[name].__get__(None, RolloutCorrectionConfig)()
    assert tuple(made[field] for field in PRESET_FIELDS) == PRESETS[name]


def test_thresholds_of_the_usual_rollout_corrections_can_be_chosen():
    assert RolloutCorrectionConfig.decoupled_token_is(3.0).rollout_is_threshold == 3.0
    made = RolloutCorrectionConfig.decoupled_seq_is_rs(is_threshold=4.0, rs_threshold="0.8_1.2")
    assert (made.rollout_is_threshold, made.rollout_rs_threshold) == (4.0, "0.8_1.2")


def test_the_sections_are_found_in_the_modules_that_guides_name():
    from verl.trainer.config import algorithm
    from verl.workers.config import actor

    assert algorithm.AlgoConfig is AlgoConfig and algorithm.RolloutCorrectionConfig is RolloutCorrectionConfig
    fields = ("rollout_is_threshold", "rollout_is", "rollout_is_threshold_lower", "rollout_is_level", "rollout_is_mode")
    assert [algorithm.AlgoConfig().get(name) for name in fields] == [None, False, None, "token", "truncate"]
    assert algorithm.AlgoConfig().rollout_is_veto_threshold == 1e-4
    assert "tis_imp_ratio_cap" not in actor.ActorConfig()
