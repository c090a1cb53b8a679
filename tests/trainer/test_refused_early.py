"""What a run cannot have is one message, before a model is loaded, and names settings as the program has them."""

from __future__ import annotations

import functools
import re

import pytest

from tests.harness.models import tiny_model_dir
from tests.harness.rows import talks, write_prompts
from verl.config import PPOTrainerConfig, load_config, replace
from verl.config.schema.node import full_keys, place
from verl.data import tokenizer_of
from verl.distributed import Ranks
from verl.engines.sequence_parallel import sequence_peers
from verl.errors import ConfigError, ModelError
from verl.metrics import notices
from verl.trainer import main_ppo, sft_trainer
from verl.workers.part import layout, make_engine


@pytest.fixture
def words(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_prompts("rows.parquet", 2)
    write_prompts("talks.parquet", talks(2))
    path = tiny_model_dir(tmp_path / "model")
    return ["data.train_files=rows.parquet", "data.val_files=rows.parquet", "trainer.device=cpu"], path


def test_megatron_without_cuda_is_one_sentence(words, capfd):
    common, path = words
    rl = [
        *common,
        f"actor_rollout_ref.model.path={path}",
        "algorithm.adv_estimator=grpo",
        "actor_rollout_ref.rollout.n=2",
    ]
    for main, key, own in (
        (main_ppo.main, "actor_rollout_ref.actor", rl),
        (sft_trainer.main, "engine", ["data.train_files=talks.parquet", "trainer.device=cpu", f"model.path={path}"]),
    ):
        assert main([*own, f"{key}.strategy=megatron"]) == 2
        said = capfd.readouterr().err
        assert f"error: {key}.strategy: Megatron-Core calls CUDA, and this run is on cpu" in said
        assert "Traceback" not in said


def test_no_model_at_all_shows_no_default_that_nobody_typed(words, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    common, _ = words
    for program, key in (("ppo_trainer", "actor_rollout_ref.model.path"), ("sft_trainer", "model.path")):
        with pytest.raises(ConfigError, match=f"{key}: no model is named. Set it to a folder") as caught:
            load_config(program, common)
        assert "deepseek" not in str(caught.value)


def test_an_engine_names_settings_by_their_place_in_the_program(words):
    _, path = words
    cfg = load_config("generation", ["data.path=rows.parquet", "data.output_path=out.parquet", f"model.path={path}"])
    whole = PPOTrainerConfig()
    place(whole)
    for key, section in (("critic.fsdp", whole.critic.fsdp), ("actor_rollout_ref.ref.fsdp_config",
                                                              whole.actor_rollout_ref.ref.fsdp_config)):  # fmt: skip
        engine = replace(section, ulysses_sequence_parallel_size=2)
        rest = layout("plain", cfg.model, engine, whole.critic.megatron, share_prompts=False)
        with pytest.raises(ConfigError, match=f"^{key}.ulysses_sequence_parallel_size: one process cannot share"):
            make_engine("plain", model=cfg.model, kind="causal_lm", device="cpu", seed=0, **rest)


@pytest.mark.parametrize("key", ["critic.fsdp", "actor_rollout_ref.actor.fsdp_config"])
def test_what_an_engine_says_of_a_setting_without_effect_has_its_full_key(words, key):
    _, path = words
    whole = PPOTrainerConfig()
    place(whole)
    engine = functools.reduce(getattr, key.split("."), whole)
    model = replace(whole.actor_rollout_ref.model, path=str(path), enable_activation_offload=True)
    changed = replace(engine, param_offload=True, fsdp_size=2)
    make_engine("plain", engine=changed, model=model, kind="causal_lm", optim=whole.critic.optim, device="cpu", seed=0)
    assert {
        f"{key}.param_offload",
        f"{key}.fsdp_size",
        "actor_rollout_ref.model.enable_activation_offload",
    } <= set(notices())


def test_errors_from_below_a_section_get_the_full_key(words):
    _, path = words
    whole = PPOTrainerConfig()
    place(whole)
    rl = replace(whole.actor_rollout_ref.model, path=str(path))
    sft = load_config("sft_trainer", ["data.train_files=talks.parquet", f"model.path={path}"]).model
    for model, key in ((rl, "actor_rollout_ref.model"), (sft, "model")):
        for change, name in (
            ({"override_config": {"no_such": 1}}, "override_config.no_such"),
            ({"external_lib": "no_such_lib"}, "external_lib"),
            ({"lora_rank": -1}, "lora_rank"),
            ({"tiled_mlp.enabled": True, "tiled_mlp.num_shards": 0}, "tiled_mlp.num_shards"),
        ):
            with pytest.raises(ConfigError, match=rf"^{re.escape(f'{key}.{name}')}: "):
                make_engine(
                    "plain", engine=whole.critic.fsdp, model=replace(model, **change), kind="causal_lm", device="cpu"
                )
        for change, name in (({"custom_chat_template": "none.jinja"}, "custom_chat_template"), ({"path": "."}, "path"),
                             ({"tokenizer_path": "./none"}, "tokenizer_path")):  # fmt: skip
            with pytest.raises(ModelError, match=rf"^{re.escape(f'{key}.{name}')}: "):
                tokenizer_of(replace(model, **change))


def test_ulysses_that_does_not_divide_the_ranks_has_its_full_key():
    whole = PPOTrainerConfig()
    place(whole)
    engine = replace(whole.critic.fsdp, ulysses_sequence_parallel_size=4)
    with (
        pytest.raises(ConfigError, match=r"^critic\.fsdp\.ulysses_sequence_parallel_size: 6 processes") as caught,
        full_keys(engine),
    ):
        sequence_peers(Ranks(0, 6), engine.ulysses_sequence_parallel_size)
    assert caught.value.allowed == [1, 2, 3, 6]


def test_the_batch_generator_takes_the_keys_that_samplers_name(words):
    _, path = words
    given = ["data.path=rows.parquet", "data.output_path=out.parquet", f"actor_rollout_ref.model.path={path}"]
    cfg = load_config("generation", [*given, "actor_rollout_ref.rollout.max_num_seqs=3"])
    assert (cfg.model.path, cfg.rollout.max_num_seqs) == (str(path), 3)
