"""The parts of the quickstart: model, reward, spoilt demonstrations, and commands that the library accepts."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path

import pandas as pd
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.harness.programs import python
from tests.harness.rows import talks, write_prompts
from verl.config import load_config
from verl.errors import DataError


def part(project_root: Path, name: str):
    """One file of ``examples/quickstart`` as a module."""
    spec = importlib.util.spec_from_file_location(
        f"quickstart_{name}", project_root / "examples/quickstart" / f"{name}.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def base(project_root, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("quickstart") / "base"
    script = project_root / "examples/quickstart/model.py"
    python(str(script), str(folder))
    return folder


def test_the_model_is_a_qwen2_of_one_million_parameters_that_splits_four_ways(base):
    model = AutoModelForCausalLM.from_pretrained(base)
    config = model.config
    assert config.model_type == "qwen2" and 0.9e6 < model.num_parameters() < 1.1e6
    assert config.hidden_size // config.num_attention_heads == 32
    assert config.num_attention_heads % 4 == 0 and config.num_key_value_heads % 4 == 0


def test_every_digit_is_one_token_and_the_template_ends_the_assistants_turn(base):
    tokenizer = AutoTokenizer.from_pretrained(base)
    assert [tokenizer.decode([i]) for i in tokenizer("1234567890").input_ids] == list("1234567890")
    asked = [{"role": "user", "content": "12+30="}]
    prompt = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
    whole = tokenizer.apply_chat_template([*asked, {"role": "assistant", "content": "42"}], tokenize=False)
    assert prompt == "<|user|>12+30=<|assistant|>" and whole == prompt + "42<|end|>"
    assert tokenizer.decode(tokenizer(whole).input_ids) == whole and tokenizer.eos_token == "<|end|>"


def test_two_builds_from_one_seed_are_equal(base, project_root):
    module = part(project_root, "model")
    again = module.build_model(module.train_tokenizer(0), 0).state_dict()
    for name, value in AutoModelForCausalLM.from_pretrained(base).state_dict().items():
        assert value.equal(again[name]), name


def test_the_reward_is_one_for_exactly_the_sum(project_root):
    score = part(project_root, "reward").compute_score
    assert [score("arithmetic", text, "42") for text in ("42", " 42 ", "42=", "142", "")] == [1.0, 1.0, 0.0, 0.0, 0.0]


def test_most_demonstrations_are_wrong_under_the_reward(project_root, tmp_path):
    pd.DataFrame(talks(500)).to_parquet(tmp_path / "sft.parquet")
    script = project_root / "examples/quickstart/demonstrations.py"
    arguments = [str(tmp_path / "sft.parquet"), str(tmp_path / "out.parquet")]
    python(str(script), *arguments)
    score = part(project_root, "reward").compute_score
    made = pd.read_parquet(tmp_path / "out.parquet")["messages"]
    right = [score("arithmetic", m[1]["content"], str(i + 1)) for i, m in enumerate(made)]
    assert 0.33 < sum(right) / len(right) < 0.47


def test_the_library_accepts_the_commands_of_the_quickstart(project_root, base, tmp_path):
    run = part(project_root, "run")
    commands = [command for _, command in run.command_lines(tmp_path, seed=3)]
    warm = tmp_path / "sft" / f"global_step_{run.SFT_STEPS}" / "model" / "huggingface"
    for name in ("train", "test", "demonstrations"):
        write_prompts(tmp_path / "data" / f"{name}.parquet")
    for folder in (tmp_path / "base", warm):
        shutil.copytree(base, folder)
    (sft,) = [c for c in commands if "verl.trainer.sft_trainer" in c]
    (grpo,) = [c for c in commands if "verl.trainer.main_ppo" in c]
    assert load_config("sft_trainer", sft[2:]).trainer.seed == 3
    config = load_config("ppo_trainer", grpo[2:])
    assert config.algorithm.adv_estimator == "grpo" and config.actor_rollout_ref.rollout.n == 8
    assert config.data.train_files == f"{tmp_path}/data/train.parquet"
    assert config.actor_rollout_ref.model.path == str(warm)


def test_accuracies_are_the_first_and_the_last_held_out_value(project_root, tmp_path):
    steps = [{"val-core/arithmetic/reward/mean@1": 0.5}, {"x": 1.0}, {"val-core/arithmetic/reward/mean@1": 0.75}]
    path = tmp_path / "grpo.jsonl"
    path.write_text("".join(json.dumps({"step": i, "data": data}) + "\n" for i, data in enumerate(steps)))
    accuracies = part(project_root, "run").accuracies
    assert accuracies(path) == (0.5, 0.75)
    path.write_text(json.dumps({"step": 1, "data": {"x": 1.0}}) + "\n")
    with pytest.raises(DataError, match="no held-out accuracy"):
        accuracies(path)
