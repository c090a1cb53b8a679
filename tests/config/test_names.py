"""Every setting that is one of a few names refuses any other before anything is allocated, and lists them."""

from __future__ import annotations

import typing

import pytest

from tests.harness.configs import PPO, ROWS, changed, describe
from verl.config import load_config
from verl.config.loading.groups import NAMES
from verl.config.rules.optimizers import classes
from verl.config.schema.node import schema_of
from verl.errors import ConfigError, NotBuiltError

A, R, RM = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "reward.reward_model"
REF = "actor_rollout_ref.ref"
PROGRAMS = ("ppo_trainer", "sft_trainer", "dpo_trainer", "rm_trainer", "generation", "evaluation")
FREE = (
    # Names that only the person knows: of columns, functions, metrics, modules, projects, addresses, runs.
    "_key", ".name", "_name", "external_lib", "custom_backend_module", "url", "server.model", "api_key_env",
    "wandb_proxy", "ray_init.address", "py_executable", "filter_groups.metric", "best_metric",
    # Text, regular expressions over the model's modules, and numbers that may be written as text.
    "custom_chat_template", "target_modules", "exclude_modules", "_threshold",
)  # fmt: skip
NAMED = ("rollout.name", "reward_manager.name", "reward_model.rollout.name")
"""Of the free ending ``.name``, those that are one of a few."""
WITH = {
    "critic.": ["critic.enable=true"],
    f"{RM}.": [f"{RM}.enable=true", f"{RM}.model_path=model"],
    "scheduling_policy": [f"{R}.name=vllm"],
    "load_format": [f"{R}.name=vllm"],
    "server.api": [f"{R}.name=server", f"{R}.server.url=http://localhost:1"],
}
"""What makes a setting count, by the beginning or the end of its key."""
OTHERS_DUTY = ("generation:rollout.multi_turn.format", "generation:rollout.agent.default_agent_loop",
               "generation:rollout.checkpoint_engine.backend", "dpo_trainer:data.pad_mode",
               "dpo_trainer:engine.torchtitan.dtype", "rm_trainer:engine.torchtitan.dtype")  # fmt: skip
"""A notice says behind the work that this program has no use for them, or it refuses the engine that has."""


def names_of(program: str):
    """Settings of a program that hold text and may be a name out of a few."""
    for key, leaf in schema_of(NAMES[program][0].root).leaves.items():
        kinds = typing.get_args(leaf.type) or (leaf.type,)
        passive = (leaf.planned and not leaf.engines) or (leaf.no_effect and not leaf.engines) or leaf.path
        if str not in kinds or passive or f"{program}:{key}" in OTHERS_DUTY:
            continue
        if leaf.choices is None and key.endswith(FREE) and not key.endswith(NAMED):
            continue
        yield key


def conditions(program: str, key: str) -> list[str]:
    found = [word for part, words in WITH.items() if key.startswith(part) or key.endswith(part) for word in words]
    for backend in ("megatron", "torchtitan"):
        if key.endswith(f"{backend}.dtype"):
            found.append(f"{key.removesuffix(f'.{backend}.dtype')}.strategy={backend}")
    if f"{A}.strategy" in key or key in (f"{REF}.megatron.dtype", f"{REF}.torchtitan.dtype"):
        found.append(f"{A}.use_kl_loss=true")
    return [word.replace("actor_rollout_ref.", "") for word in found] if program == "generation" else found


@pytest.fixture
def load(workplace):
    describe()
    data = [*ROWS, "trainer.device=cpu"]
    usual = {
        "ppo_trainer": [*changed(PPO, f"{R}.n=2"), "trainer.device=cpu"],
        "generation": ["data.path=rows.parquet", "data.output_path=out.parquet", "model.path=model"],
        "evaluation": ["data.path=rows.parquet"],
    }
    return lambda program, *words: load_config(program, [*usual.get(program, [*data, "model.path=model"]), *words])


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_name_that_does_not_exist_is_refused_with_those_that_do(load, program):
    taken = {}
    for key in names_of(program):
        try:
            load(program, *conditions(program, key), f"{key}=nonsense")
        except NotBuiltError as error:
            taken[key] = f"is said to come later: {error}"
        except ConfigError as error:
            said = str(error)
            if "nonsense" not in said or not ("Allowed:" in said or "no such module" in said):
                taken[key] = said
        else:
            taken[key] = "is accepted"
    assert taken == {}


TRAINED = {"ppo_trainer": (f"{A}.fsdp_config", f"{A}.optim"), "sft_trainer": ("engine", "optim")}


@pytest.mark.parametrize("program", TRAINED)
def test_products_may_be_in_float16_and_trained_weights_may_not(load, program):
    section = TRAINED[program][0]
    load(program, f"{section}.dtype=float16")
    with pytest.raises(
        ConfigError, match=rf"{section}.model_dtype: weights .* in float16 .* set {section}.dtype=float16"
    ):
        load(program, f"{section}.model_dtype=torch.float16")
    if program == "ppo_trainer":
        frozen = "actor_rollout_ref.ref.fsdp_config"
        load(program, f"{A}.use_kl_loss=true", f"{frozen}.dtype=float16", f"{frozen}.model_dtype=half")
        load(program, f"{R}.dtype=float16")
        with pytest.raises(ConfigError, match=r"critic.fsdp.model_dtype: weights"):
            load(program, "critic.enable=true", "critic.fsdp.model_dtype=half")


@pytest.mark.parametrize("program", TRAINED)
def test_a_base_in_four_bits_lies_under_an_adapter_in_one_process(load, program, monkeypatch):
    model, engine = ("actor_rollout_ref.model", A) if program == "ppo_trainer" else ("model", "engine")
    base = f"{model}.lora_base_quantization=nf4"
    load(program, base, f"{model}.lora_rank=4")
    with pytest.raises(ConfigError, match=r"lora_base_quantization: weights in 4 bits are not trained.*lora_rank=16"):
        load(program, base)
    with pytest.raises(ConfigError, match=r"lora_base_quantization: no such choice. Got 'fp4'. Allowed: nf4"):
        load(program, f"{model}.lora_base_quantization=fp4")
    with pytest.raises(NotBuiltError, match=r"not built yet for megatron"):
        load(program, base, f"{model}.lora_rank=4", f"{engine}.strategy=megatron")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(NotBuiltError, match=r"not built yet for fsdp2 on 2 process"):
        load(program, base, f"{model}.lora_rank=4", f"{engine}.strategy=fsdp2", "trainer.n_gpus_per_node=2")


@pytest.mark.parametrize("program", TRAINED)
def test_optimizers_that_cannot_train_are_refused_with_the_reason(load, program):
    engine, optim = TRAINED[program][0].removesuffix(".fsdp_config"), TRAINED[program][1]
    for name, why in (("LBFGS", "in one step"), ("SparseAdam", "sparse")):
        with pytest.raises(ConfigError, match=f"{optim}.optimizer: this optimizer cannot train here: .*{why}"):
            load(program, f"{optim}.optimizer={name}")
    load(program, f"{optim}.optimizer=Adafactor")
    load(program, f"{optim}.optimizer=Muon", f"{engine}.strategy=fsdp")
    with pytest.raises(ConfigError, match=r"adjust_lr_fn: unknown value. Got 'none'. Allowed: match_rms_adamw"):
        load(program, f"{optim}.optimizer=Muon", f"+{optim}.override_optimizer_config.adjust_lr_fn=none")
    load(program, f"{optim}.optimizer=Muon", f"{engine}.strategy=megatron")
    load(program, f"{optim}.optimizer=Adafactor", f"{engine}.strategy=fsdp")  # on FSDP2, whose shards know their weight
    with pytest.raises(ConfigError, match=r"looks at a weight as a whole.* with strategy=megatron. Got 'Adafac"):
        load(program, f"{optim}.optimizer=Adafactor", f"{engine}.strategy=megatron")
    load(program, f"{optim}.optimizer=adam", f"{engine}.strategy=megatron")
    eight_bits = [f"{optim}.optimizer_impl=bitsandbytes.optim", f"{optim}.optimizer=AdamW8bit"]
    load(program, *eight_bits)
    with pytest.raises(ConfigError, match=r"optimizer_impl: its kernels take whole weights.*torchao.optim shards"):
        load(program, *eight_bits, f"{engine}.strategy=megatron")
    with pytest.raises(ConfigError, match=r"unknown value. Got 'adam'. Allowed: .*Did you mean 'Adam'"):
        load(program, f"{optim}.optimizer=adam")
    with pytest.raises(ConfigError, match=f"{optim}.optimizer_impl: no such module. Got 'no_such.optim'"):
        load(program, f"{optim}.optimizer_impl=no_such.optim", f"{optim}.optimizer=AdamW8bit")
    assert {"AdamW", "SGD", "Muon"} <= set(classes())


@pytest.mark.parametrize("program", TRAINED)
def test_moments_in_few_bits_are_kept_by_plain_and_fsdp_and_refused_elsewhere(load, program):
    engine, optim = TRAINED[program][0].removesuffix(".fsdp_config"), TRAINED[program][1]
    torchao = f"{optim}.optimizer_impl=torchao.optim"
    load(program, torchao, f"{optim}.optimizer=AdamW8bit")
    load(program, torchao, f"{optim}.optimizer=AdamW4bit", f"{engine}.strategy=fsdp")
    with pytest.raises(NotBuiltError, match=rf"{optim}.optimizer_impl: moments in few bits .* strategy=megatron"):
        load(program, torchao, f"{optim}.optimizer=AdamW8bit", f"{engine}.strategy=megatron")
    with pytest.raises(ConfigError, match=rf"{optim}.optimizer: .*Got 'CPUOffloadOptimizer'. Allowed: Adam4bit"):
        load(program, torchao, f"{optim}.optimizer=CPUOffloadOptimizer")
    with pytest.raises(ConfigError, match=r"override_optimizer_config.eqs: .* Did you mean 'eps'"):
        load(program, torchao, f"{optim}.optimizer=AdamWFp8", f"+{optim}.override_optimizer_config.eqs=1")


@pytest.mark.parametrize("facts", [{"vision_config": {"depth": 2}}, {"model_type": "llava", "audio_config": {"x": 1}}])
@pytest.mark.parametrize("program", ["ppo_trainer", "sft_trainer", "dpo_trainer", "rm_trainer", "generation"])
def test_a_model_that_sees_or_hears_is_refused_by_name(load, program, facts):
    describe(facts)
    with pytest.raises(NotBuiltError, match=r"model.path: models that take (images|sounds) are not built yet"):
        load(program)
    describe({**facts, "model_type": "gemma3"})
    load(program)


@pytest.mark.parametrize(("words", "says"), [
    (["quantization=torchao"], "sampler hf has no such format. Got 'torchao'. Allowed: fp8, int8. It rounds by itself"),
    (["name=vllm", "quantization=int8"], "the sampler vllm has no such format. Got 'int8'.*Int8WeightOnlyConfig"),
    (["name=sglang", "quantization=torchao"], "the sampler sglang has no such format"),
    (["name=vllm", "quantization=torchao"], "quantization_config_file: torchao's configuration comes in a file"),
    (["name=vllm", "quantization=fp8", "quantization_config_file=ao.json"], "no other format has one"),
    (["quantization=int8", "quantization_tolerance=0"], "quantization_tolerance: .*above 0"),
    (["quantization=int8", "logprobs_mode=raw_logprobs", "temperature=0.5"], "quantization_tolerance compares raw"),
])  # fmt: skip
def test_a_format_of_rounded_weights_that_a_sampler_does_not_have_is_refused_with_one_that_it_has(load, words, says):
    with pytest.raises(ConfigError, match=says):
        load("ppo_trainer", *(f"{R}.{word}" for word in words))


@pytest.mark.parametrize(
    "where", ["rollout.quantization=nvfp4", "actor.qat.enable=true", "actor.fsdp_config.qat.enable=true"]
)
def test_nvfp4_is_refused_under_every_name_that_it_has(load, where):
    with pytest.raises(ConfigError, match=rf"actor_rollout_ref.{where.partition('=')[0]}: "):
        load("ppo_trainer", f"actor_rollout_ref.{where}", f"{R}.name=vllm")
