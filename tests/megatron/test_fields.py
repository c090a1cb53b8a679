"""Every field of Megatron-Core's configurations has its place: handed on, refused by name, or without effect."""

import dataclasses

import pytest
import torch

from verl import metrics
from verl.config.rules import megatron_fields as fields
from verl.config.schema.role import MegatronEngineConfig
from verl.engines.megatron.layers import transformer_config
from verl.engines.megatron.parallel import MegatronSizes, has_transformer_engine, import_megatron
from verl.errors import ConfigError

MODEL = {
    "num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_query_groups": 2, "ffn_hidden_size": 64,
    "kv_channels": 8, "layernorm_epsilon": 1e-6, "num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 16,
}  # fmt: skip
DENSE = {name: value for name, value in MODEL.items() if "moe" not in name}
VALUES = {
    "hidden_dropout": 0.25, "attention_dropout": 0.25, "recompute_granularity": "full", "recompute_method": "uniform",
    "recompute_num_layers": 2, "recompute_modules": ["mlp"], "moe_router_dtype": "fp64", "moe_z_loss_coeff": 0.5,
}  # fmt: skip
"""Values of fields that are no switches; a switch is turned."""
BESIDE = {
    "recompute_method": {"recompute_granularity": "full", "recompute_num_layers": 1},
    "recompute_num_layers": {"recompute_granularity": "full", "recompute_method": "uniform"},
    "recompute_granularity": {"recompute_method": "uniform", "recompute_num_layers": 1},
    "recompute_modules": {"recompute_granularity": "selective"},
    "distribute_saved_activations": {"recompute_granularity": "full", "recompute_method": "uniform",
                                     "recompute_num_layers": 1},
}  # fmt: skip
"""What Megatron-Core wants to be given with a field."""
BECOMES = {"moe_layer_recompute": ("recompute_modules", lambda modules: "moe" in modules)}


def config_of(model=MODEL, **given):
    metrics.reset_notices()
    sizes = MegatronSizes(tensor=2, pipeline=1, data=1, sequence="num_moe_experts" in model)
    section = MegatronEngineConfig(override_mcore_model_config=given)
    return transformer_config(model, sizes, section, torch.float32)


def names(of):
    return {field.name for field in dataclasses.fields(of)}


def test_every_field_of_megatron_core_stands_in_one_table():
    known = import_megatron("transformer.transformer_config")
    own = names(known.TransformerConfig) | names(known.MLATransformerConfig)
    tables = [fields.DECIDED, fields.IDLE, fields.OF_THE_MODEL, fields.HANDED_ON, fields.KERNELS]
    counts = {name: sum(name in table for table in tables) for name in own.union(*tables)}
    assert {name for name, count in counts.items() if count != 1} == set()
    assert own >= fields.OF_THE_MODEL | fields.HANDED_ON | fields.KERNELS
    wrapper = names(import_megatron("distributed").DistributedDataParallelConfig)
    assert fields.WRAPPER_IDLE.keys() | fields.WRAPPER_DECIDED.keys() == wrapper
    assert not fields.WRAPPER_IDLE.keys() & fields.WRAPPER_DECIDED.keys()


@pytest.mark.parametrize("name", sorted(fields.HANDED_ON - {*fields.STAGES}))
def test_a_field_that_is_handed_on_reaches_the_configuration(name):
    value = VALUES.get(name, not getattr(config_of(), name))
    model = MODEL if "moe" in name else DENSE  # experts need sequence parallelism, some fields its absence
    made = config_of(model, **{name: value, **BESIDE.get(name, {})})
    shown, holds = BECOMES.get(name, (name, lambda got: got == value))
    assert holds(getattr(made, shown)) and metrics.notices() == {}


def test_what_the_engine_decides_stands_only_as_it_is():
    section = MegatronEngineConfig()
    for name, (why, agrees) in fields.DECIDED.items():
        given = dataclasses.replace(section, override_mcore_model_config={name: "another"})
        (problem,) = fields.problems("megatron", given)
        assert f"override_mcore_model_config.{name}: this field" in str(problem) and why in str(problem)
        usual = {False, True, None, "none"}
        assert sum(agrees(section, value) for value in usual) < len(usual), f"{name} would take anything"
    for name, (why, _) in fields.WRAPPER_DECIDED.items():
        (problem,) = fields.problems("megatron", dataclasses.replace(section, override_ddp_config={name: "another"}))
        assert f"override_ddp_config.{name}: this field" in str(problem) and why in str(problem)


def test_what_changes_nothing_is_said_with_the_reason_and_not_handed_on():
    usual = config_of()
    made = config_of(**dict.fromkeys(fields.IDLE, "anything"))
    said = metrics.notices()["megatron.override_mcore_model_config"]
    assert all(name in said and why in said for name, why in fields.IDLE.items())
    differs = {name for name in names(type(made)) if getattr(made, name) != getattr(usual, name)}
    assert all(callable(getattr(made, name)) for name in differs), "a function is made anew"
    section = MegatronEngineConfig(override_ddp_config=dict.fromkeys(fields.WRAPPER_IDLE, "anything"))
    assert fields.problems("megatron", section) == []
    said = metrics.notices()["megatron.override_ddp_config"]
    assert all(name in said and why in said for name, why in fields.WRAPPER_IDLE.items())


@pytest.mark.skipif(has_transformer_engine(), reason="Transformer Engine is installed")
def test_what_belongs_to_transformer_engine_is_said_without_it_and_not_handed_on():
    usual, given = config_of(), fields.KERNELS - {"fp8", "fp4"}
    made = config_of(**dict.fromkeys(given, "anything"), moe_token_dispatcher_type="flex")
    said = metrics.notices()["megatron.override_mcore_model_config"]
    assert all(name in said for name in {*given, "moe_token_dispatcher_type"})
    assert all(getattr(made, name) == getattr(usual, name) for name in {*given, "moe_token_dispatcher_type"})
    for name in ("fp8", "fp4"):
        assert getattr(config_of(**{name: False}), name) == getattr(usual, name)
        with pytest.raises(ConfigError, match=f"products in {name.upper()} need Transformer Engine"):
            config_of(**{name: "hybrid"})


def test_a_field_of_the_model_stands_only_as_config_json_has_it():
    for name in fields.OF_THE_MODEL:
        with pytest.raises(ConfigError, match=rf"{name}: the model's own config.json says it, and it says otherwise"):
            config_of(**{name: "another"})
    made = config_of(**MODEL)
    assert {name: getattr(made, name) for name in MODEL} == MODEL and metrics.notices() == {}


def test_a_name_that_megatron_core_does_not_have_gets_the_nearest_one():
    with pytest.raises(ConfigError, match=r"moe_z_los_coeff: Megatron-Core has no such field.*'moe_z_loss_coeff'"):
        config_of(moe_z_los_coeff=0.1)
    section = MegatronEngineConfig(override_ddp_config={"overlap_grad_reduse": True})
    (problem,) = fields.problems("megatron", section)
    assert "Did you mean 'overlap_grad_reduce'" in str(problem)
