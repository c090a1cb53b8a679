"""What a run cannot have is one message, before a model is loaded, and names settings as the program has them."""

from __future__ import annotations

import pytest

from tests.support import tiny_model_dir, write_prompts
from verl.config import PPOTrainerConfig, load_config, replace
from verl.errors import ConfigError
from verl.trainer import main_ppo, sft_trainer
from verl.workers.part import layout, make_engine


@pytest.fixture
def words(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_prompts("rows.parquet", 2)
    talk = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]
    write_prompts("talks.parquet", [{"messages": talk}] * 2)
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
    from verl.config.node import place

    place(whole)
    for key, section in (("critic.fsdp", whole.critic.fsdp), ("actor_rollout_ref.ref.fsdp_config",
                                                              whole.actor_rollout_ref.ref.fsdp_config)):  # fmt: skip
        engine = replace(section, ulysses_sequence_parallel_size=2)
        rest = layout("plain", cfg.model, engine, whole.critic.megatron, share_prompts=False)
        with pytest.raises(ConfigError, match=f"^{key}.ulysses_sequence_parallel_size: one process cannot share"):
            make_engine("plain", model=cfg.model, kind="causal_lm", device="cpu", seed=0, **rest)
