"""Which models that see are taken, and what is refused by name before one is loaded."""

from __future__ import annotations

import json

import pytest

from verl.config import PPOTrainerConfig, replace
from verl.config.machine import host, models
from verl.config.rules.checks import problems_of_rows
from verl.config.rules.validate import TABLE
from verl.errors import ConfigError, NotBuiltError


@pytest.fixture
def model(tmp_path):
    def write(**facts):
        (tmp_path / "config.json").write_text(json.dumps(facts))
        return str(tmp_path)

    return write


def told(*arguments, **named):
    return [(type(one), str(one)) for one in models.vision_problems("model.path", *arguments, **named)]


@pytest.mark.parametrize("family", sorted(models.SEEN.keys() - set(models.TEXT_TOO)))
def test_families_that_are_built_load_with_the_engines_over_torch_modules(model, family):
    path = model(model_type=family, vision_config={"depth": 2})
    for strategy in ("auto", "plain", "fsdp", "fsdp2"):
        assert told(path, None, strategy) == []
    for strategy in ("megatron", "torchtitan"):
        [(kind, said)] = told(path, None, strategy)
        assert kind is NotBuiltError and f"strategy={strategy}" in said and "Set strategy=fsdp2" in said


def test_a_hub_name_whose_files_are_on_this_machine_is_judged_by_them(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert told("someone/sees", None) == []
    commit = "0123456789abcdef0123456789abcdef01234567"
    repository = tmp_path / "models--someone--sees"
    for place, text in (
        ("refs/main", commit),
        (f"snapshots/{commit}/config.json", '{"model_type": "kimi_k25", "vision_config": {"depth": 2}}'),
    ):
        (repository / place).parent.mkdir(parents=True)
        (repository / place).write_text(text)
    [(kind, said)] = told("someone/sees", None)
    assert kind is NotBuiltError and "'kimi_k25'" in said and "someone/sees" in said
    assert told("no hub/name/at all", None) == []


@pytest.mark.parametrize("family", ["kimi_k25", "kimi_vl"])
def test_other_families_are_refused_with_those_that_are_built(model, family):
    [(kind, said)] = told(model(model_type=family, vision_config={"depth": 2}), None)
    assert kind is NotBuiltError and f"'{family}'" in said and "qwen2_5_vl" in said
    assert told(model(model_type=family, vision_config={"depth": 2}), "my_package") == []
    assert told(model(model_type="qwen2"), None, "megatron") == []


def test_a_policy_of_text_refuses_the_switch_and_a_sampler_of_text_a_policy_that_sees(model):
    from tests.config.test_brief_values import run

    text, key = model(model_type="qwen2"), "actor_rollout_ref"
    [problem] = models.policy_problems(run(f"{key}.model.path={text} {key}.rollout.enable_vision=true"))
    assert isinstance(problem, ConfigError) and "the policy takes no images" in str(problem)
    sees = model(model_type="qwen3_vl", vision_config={"depth": 2})
    for name in ("hf", "vllm", "server", "sglang"):
        child = f"{key}.rollout.checkpoint_engine.backend=shared_memory"
        assert not models.policy_problems(run(f"{key}.model.path={sees} {key}.rollout.name={name} {child}"))
    [problem] = models.policy_problems(run(f"{key}.model.path={sees} {key}.rollout.name=carrier_pigeon"))
    assert isinstance(problem, NotBuiltError) and "Set rollout.name to hf or vllm or server" in str(problem)
    frozen = f"{key}.actor.freeze_vision_tower=true {key}.model.lora_rank=4"
    [problem] = models.policy_problems(run(f"{key}.model.path={sees} {frozen}"))
    assert isinstance(problem, ConfigError) and "exclude_modules" in str(problem)


@pytest.mark.parametrize("api", ["tgi", "openai"])
def test_a_server_of_text_is_refused_for_a_policy_that_sees(model, api):
    from tests.config.test_brief_values import run

    sees, key = model(model_type="qwen3_vl", vision_config={"depth": 2}), "actor_rollout_ref"
    served = f"{key}.rollout.name=server {key}.rollout.server.url=http://a:1 {key}.rollout.server.api={api}"
    [problem] = models.policy_problems(run(f"{key}.model.path={sees} {served}"))
    assert isinstance(problem, NotBuiltError) and problem.key == f"{key}.rollout.server.api"
    assert "which tokens it makes of them is not known" in str(problem)


@pytest.mark.parametrize(
    "named", ["rollout.name=sglang", "rollout.name=server actor_rollout_ref.rollout.server.api=sglang"]
)
def test_a_running_sglang_server_needs_a_frozen_tower(model, named):
    from tests.config.test_brief_values import run

    sees, key = model(model_type="qwen3_vl", vision_config={"depth": 2}), "actor_rollout_ref"
    served = f"{key}.model.path={sees} {key}.{named} {key}.rollout.server.url=http://a:1"
    [problem] = models.policy_problems(run(served))
    assert isinstance(problem, ConfigError) and problem.key == f"{key}.actor.freeze_vision_tower"
    assert "keeps features of images across new weights" in str(problem)
    assert not models.policy_problems(run(f"{served} {key}.actor.freeze_vision_tower=true"))


@pytest.mark.parametrize("family", models.TILED)
def test_images_that_become_tiles_are_sent_to_no_server(model, family):
    from tests.config.test_brief_values import run

    key = "actor_rollout_ref"
    path = f"{key}.model.path={model(model_type=family, vision_config={'depth': 2})} {key}.rollout.enable_vision=true"
    assert not models.policy_problems(run(path))
    assert not models.policy_problems(run(f"{path} {key}.rollout.name=vllm"))
    [problem] = models.policy_problems(run(f"{path} {key}.rollout.name=sglang"))
    assert isinstance(problem, NotBuiltError) and f"'sglang' with the family {family}" in str(problem)
    assert "Set rollout.name to hf or vllm." in str(problem)
    problems = models.policy_problems(run(f"{path} {key}.rollout.name=vllm trainer.device=cpu"))
    assert len(problems) == (family == "gemma3")
    assert all("see only those in front" in str(one) and "Set rollout.name to hf." in str(one) for one in problems)


@pytest.mark.parametrize(
    ("words", "is_refused"),
    [
        ("actor_rollout_ref.rollout.name=vllm", True),
        ("actor_rollout_ref.rollout.name=hf trainer.val_only=true", True),
        ("actor_rollout_ref.rollout.name=server", True),
        ("actor_rollout_ref.rollout.name=server trainer.val_only=true", False),
        ("actor_rollout_ref.rollout.name=server actor_rollout_ref.rollout.server.api=verl trainer.val_only=true", True),
    ],
)
def test_a_run_with_images_needs_their_tensors_but_for_a_judged_server(model, words, is_refused):
    from tests.config.test_brief_values import run

    path, key = model(model_type="qwen2_5_vl", vision_config={"depth": 2}), "data.return_multi_modal_inputs"
    cfg = run(f"actor_rollout_ref.model.path={path} {words} {key}=false")
    refused = [problem for problem in problems_of_rows(TABLE)(cfg) if problem.key == key]
    assert len(refused) == is_refused
    for problem in refused:
        assert f"({words.split()[0]})" in str(problem) and str(problem).endswith(f"Set {key}=true.")
    text = run(f"actor_rollout_ref.model.path={model(model_type='qwen2')} {words} {key}=false")
    assert key not in [one.key for one in problems_of_rows(TABLE)(text)]


def test_a_family_that_reads_text_alone_too_keeps_its_engines_and_samplers(model):
    from tests.config.test_brief_values import run

    path = model(model_type="gemma3", vision_config={"depth": 2})
    assert told(path, None, "megatron") == []
    for sampler in ("vllm", "sglang"):
        words = f"actor_rollout_ref.model.path={path} actor_rollout_ref.rollout.name={sampler}"
        assert not models.policy_problems(run(words))


def test_a_critic_of_the_policys_model_needs_an_engine_with_towers_too(model):
    path = model(model_type="qwen2_5_vl", vision_config={"depth": 2})
    changes = {"actor_rollout_ref.model.path": path, "critic.model.path": path, "algorithm.adv_estimator": "gae"}
    config = replace(PPOTrainerConfig(), **changes, **{"critic.strategy": "megatron"})
    [problem] = host._towers(config)
    assert isinstance(problem, NotBuiltError) and problem.key == "critic.model.path" and "megatron" in str(problem)
