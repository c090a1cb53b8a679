"""``model.lora.*``, as Megatron's users spell adapters, becomes the settings of the model or is refused by name."""

import pytest

from verl import metrics
from verl.config.loading.configuration import read_config, to_yaml
from verl.errors import ConfigError, NotBuiltError

M = "actor_rollout_ref.model"
CANONICAL = ["linear_q", "linear_k", "linear_v", "linear_proj", "linear_fc1_gate", "linear_fc1_up", "linear_fc2"]
ALL = ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"]


def resolved(*words, program="ppo_trainer", model=M):
    metrics.reset_notices()
    node = read_config(program, [word if "=" not in word else f"{model}.{word}" for word in words])
    for part in model.split("."):
        node = node[part]
    return node


@pytest.mark.parametrize(
    "program, model", [("ppo_trainer", M), ("ppo_trainer", "critic.model"), ("sft_trainer", "model")]
)
def test_the_sections_fields_become_the_models_own(program, model, tmp_path):
    found = resolved("lora.rank=8", program=program, model=model)
    assert (found.lora_rank, found.lora_alpha, found.target_modules) == (8, 32, "all-linear")
    assert found.exclude_modules is None and found.lora_adapter_path is None
    said = metrics.notices()[f"{model}.lora.rank"]
    assert "lora_rank=8, lora_alpha=32, target_modules=all-linear" in said and "two factors of its own" in said
    found = resolved("lora.rank=8", "lora.alpha=4", f"lora.adapter_path={tmp_path}", program=program, model=model)
    assert (found.lora_alpha, found.lora_adapter_path) == (4, str(tmp_path))


@pytest.mark.parametrize(
    "names, becomes",
    [
        (ALL, "all-linear"),
        (CANONICAL, "all-linear"),
        (["linear_qkv"], ["q_proj", "k_proj", "v_proj"]),
        (["linear_v", "linear_qkv"], ["v_proj", "q_proj", "k_proj"]),
        (["linear_fc1", "linear_fc2"], ["gate_proj", "up_proj", "down_proj"]),
        (["linear_fc1_up", "linear_proj"], ["up_proj", "o_proj"]),
        (["linear_q_down_proj", "linear_q_up_proj", "linear_kv_up_proj"], ["q_a_proj", "q_b_proj", "kv_b_proj"]),
        (["q_proj", "linear_proj"], ["q_proj", "o_proj"]),
    ],
)  # fmt: skip
def test_names_of_megatron_core_become_those_of_hugging_face(names, becomes):
    found = resolved("lora.rank=8", "lora.exclude_modules=[linear_fc1]", f"lora.target_modules=[{','.join(names)}]")
    assert found.target_modules == becomes and found.exclude_modules == ["gate_proj", "up_proj"]


@pytest.mark.parametrize(
    "words, says",
    [
        (["lora.type=dora"], "lora.type: adapters with a trained magnitude (DoRA) are not built. Got 'dora'."),
        (["lora.type=vlm_lora"], "vision-language models are not built. Got 'vlm_lora'."),
        (["lora.type=lore"], "lora.type: no such choice. Got 'lore'."),
        (["lora.dropout=0.1"], "lora.dropout: not built yet: dropout of adapters. Got 0.1."),
        (["lora.dtype=bfloat16"], "adapters of another dtype than the model's. Got 'bfloat16'."),
        (["lora.fully_sharded_loras=true"], "engine_kwargs.vllm.fully_sharded_loras=true"),
        (["lora.lora_A_init_method=normal"], "drawn as peft draws it. Got 'normal'. Allowed: kaiming."),
        (["lora.lora_B_init_method=normal"], "second factors of adapters that do not start at zero"),
        (["lora.target_modules=[linear_qvk]"], "has this name. Got 'linear_qvk'."),
        (["lora.target_modules=[linear_qvk]"], "Did you mean 'linear_qkv'"),
        (["lora.exclude_modules=['*.layers.0.*.linear_qkv']"], "it counts layers as Megatron-Core does"),
        (["lora.rnk=8"], f"{M}.lora.rnk: unknown setting. Got 8. Did you mean '{M}.lora.rank'?"),
        (["lora_rank=4"], f"two values for one setting: {M}.lora.rank=8 and {M}.lora_rank=4"),
        (["lora.alpha=8", "lora_alpha=4"], f"two values for one setting: {M}.lora.alpha=8 and {M}.lora_alpha=4"),
        (["lora.target_modules=[linear_qkv]", "target_modules=[q_proj]"], "lora.target_modules=['linear_qkv'] and"),
    ],
)  # fmt: skip
def test_what_cannot_be_carried_over_is_refused_by_name_with_the_reason(words, says):
    with pytest.raises(ConfigError) as caught:
        resolved("lora.rank=8", *words)
    assert says in str(caught.value)


def test_every_refusal_of_the_section_stands_in_one_message():
    with pytest.raises(NotBuiltError) as caught:
        resolved("lora.rank=8", "lora.type=dora", "lora.lora_A_init_method=uniform", "lora.dropout=0.1")
    assert len(caught.value.problems) == 3


def test_two_spellings_that_say_the_same_stand_beside_each_other():
    names = "[q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj]"
    found = resolved("lora.rank=8", "lora_rank=8", f"lora.target_modules=[{','.join(ALL)}]", f"target_modules={names}")
    assert found.lora_rank == 8 and len(found.target_modules) == 7
    assert resolved("lora.rank=8", "lora_alpha=64").lora_alpha == 64, "only one of the two is said"
    assert resolved("lora.rank=8", "lora_rank=0", "lora.alpha=32", "lora_alpha=16").lora_alpha == 32, "defaults"


def test_without_a_rank_the_rest_has_no_effect_and_says_so():
    found = resolved("lora_rank=4", "lora.rank=0", "lora.alpha=64", "lora.type=dora")
    assert (found.lora_rank, found.lora_alpha) == (4, 16)
    said = metrics.notices()[f"{M}.lora.type"]
    assert said == f"has no effect without {M}.lora.rank; nor have {M}.lora.alpha"


def test_what_was_resolved_loads_back_to_the_same(tmp_path):
    words = [f"{M}.lora.rank=8", f"{M}.lora.target_modules=[linear_qkv]", f"{M}.lora.exclude_modules=[linear_k]"]
    (tmp_path / "run.yaml").write_text(to_yaml(first := read_config("ppo_trainer", words)))
    again = read_config("ppo_trainer", ["--config-path", str(tmp_path), "--config-name", "run"])
    assert again == first and first.actor_rollout_ref.model.exclude_modules == ["k_proj"]
