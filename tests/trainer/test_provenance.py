"""A checkpoint knows what made it: a run that goes on with something else says so, or is refused."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest

from tests.harness.configs import changed
from tests.harness.models import tiny_model_dir
from tests.harness.rows import turns, write_prompts
from tests.harness.runs import COMMON, prepare
from tests.harness.scorers import scorer
from verl.checkpoint import find_checkpoint, provenance
from verl.checkpoint.provenance import Provenance, is_harmless
from verl.config.loading.configuration import read_config
from verl.config.loading.groups import NAMES
from verl.config.schema.node import schema_of
from verl.metrics import notices, reset_notices
from verl.trainer import main_ppo, sft_trainer

KEY = "trainer.resume_changed"
GRPO = changed(
    COMMON, "data.train_batch_size=2", "data.max_response_length=4", "actor_rollout_ref.rollout.n=2",
    "actor_rollout_ref.actor.ppo_mini_batch_size=2", "trainer.default_local_dir=run", "trainer.save_freq=1",
    "trainer.resume_mode=auto", "trainer.rollout_data_dir=samples",
)  # fmt: skip


@pytest.fixture
def here(workplace):
    prepare(scorer("len(solution_str) / 9"), 4, hidden=16, layers=1, heads=2, kv_heads=1)
    return workplace


@pytest.fixture
def run(here, capsys):
    """A run of some steps; its exit status and its message."""

    def start(steps: int, *changes: str, program=main_ppo, words=GRPO) -> tuple[int, str]:
        reset_notices()
        status = program.main([*words, f"trainer.total_training_steps={steps}", *changes])
        return status, capsys.readouterr().err

    return start


def names(folder: str) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in Path(folder).rglob("*.jsonl"))


def test_every_checkpoint_keeps_the_configuration_of_its_run_for_the_user_alone(run):
    assert run(1)[0] == 0
    folder = Path("run/global_step_1")
    assert folder.joinpath("config.yaml").read_text() == Path("run/config.yaml").read_text()
    assert stat.S_IMODE((folder / "config.yaml").stat().st_mode) == 0o600
    files = json.loads((folder / "manifest.json").read_text())["files"]
    assert {"config.yaml", "provenance.json"} <= set(files)


def test_a_run_that_is_refused_leaves_the_configuration_as_it_was(run):
    assert run(1)[0] == 0
    before = Path("run/config.yaml").read_text()
    assert run(2, "actor_rollout_ref.actor.optim.lr=1e-3")[0] == 2
    assert run(2, "data.max_prompt_length=4")[0] == 2
    assert run(2, "reward.custom_reward_function.name=missing")[0] == 2
    assert Path("run/config.yaml").read_text() == before
    assert names("logs") == ["verl_examples/gsm8k.jsonl"]


def other_scorer() -> None:
    Path("scorer.py").write_text(scorer("len(solution_str) / 8"))


def other_model() -> None:
    tiny_model_dir("model", hidden=16, layers=1, heads=2, kv_heads=1, seed=5)


SERIOUS = {
    "learning rate": (["actor_rollout_ref.actor.optim.lr=1e-3"], None, "actor_rollout_ref.actor.optim.lr"),
    "estimator": (["algorithm.adv_estimator=rloo"], None, "algorithm.adv_estimator"),
    "loss": (["actor_rollout_ref.actor.policy_loss.loss_mode=gspo"], None, "policy_loss.loss_mode"),
    "seed": (["trainer.seed=2"], None, "trainer.seed"),
    "samples per prompt": (["actor_rollout_ref.rollout.n=4"], None, "rollout.n"),
    "base model": ([], other_model, "model.path"),
    "reward": ([], other_scorer, "custom_reward_function.path"),
    "data": ([], lambda: write_prompts("train.parquet", 6), "data.train_files"),
}


def test_what_changes_the_mathematics_has_to_be_accepted_by_name(run):
    assert run(1)[0] == 0
    model, scorer, data = (Path(p).read_bytes() for p in ("model/model.safetensors", "scorer.py", "train.parquet"))
    for words, change, key in SERIOUS.values():
        if change:
            change()
        status, said = run(2, *words)
        assert status == 2 and key in said and "trainer.resume_changed=accept" in said, said
        Path("model/model.safetensors").write_bytes(model)
        Path("scorer.py").write_bytes(scorer)
        Path("train.parquet").write_bytes(data)
    status, said = run(2, "actor_rollout_ref.actor.optim.lr=1e-3", "trainer.resume_changed=accept")
    assert status == 0, said
    assert "actor_rollout_ref.actor.optim.lr: was 1e-06, is 0.001" in notices()[KEY]
    assert run(3, "actor_rollout_ref.actor.optim.lr=1e-3")[0] == 0, "what was accepted is what the next one is held to"


def test_a_module_that_the_reward_file_imports_from_its_folder_counts_as_the_reward(run, monkeypatch):
    monkeypatch.syspath_prepend(".")
    Path("graders/parts").mkdir(parents=True)
    for name, text in {
        "__init__": "from .parts import deep", "parts/__init__": "", "parts/deep": "from .. import near\nUNIT = 9",
        "near": "", "unused": "",
    }.items():  # fmt: skip
        Path(f"graders/{name}.py").write_text(text)
    Path("scorer.py").write_text("import graders.parts\n" + scorer("len(solution_str) / 9"))
    assert run(1)[0] == 0
    Path("graders/unused.py").write_text("# no part of it")
    for name in ("graders/__init__.py", "graders/parts/deep.py", "graders/near.py"):
        before = Path(name).read_text()
        Path(name).write_text(f"{before}\nUNIT = 8")
        status, said = run(2)
        assert status == 2 and f"custom_reward_function.path: {name}: was 'the content" in said, said
        Path(name).write_text(before)
    assert run(2)[0] == 0


def test_what_changes_no_result_is_told_and_goes_on(run):
    assert run(1)[0] == 0
    Path("model").rename("moved")
    more = ["actor_rollout_ref.model.path=moved", "trainer.save_freq=2", "trainer.test_freq=7",
            "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1"]  # fmt: skip
    status, said = run(2, *more)
    assert status == 0, said
    for key in ("model.path: was 'model', is 'moved'", "trainer.save_freq: was 1, is 2", "micro_batch_size_per_gpu"):
        assert key in notices()[KEY]


def test_a_checkpoint_without_a_copy_goes_on_with_a_notice(run):
    assert run(1)[0] == 0
    manifest = json.loads(Path("run/global_step_1/manifest.json").read_text())
    for name in ("config.yaml", "provenance.json"):
        Path("run/global_step_1", name).unlink()
        del manifest["files"][name]
    del manifest["crc32"]
    Path("run/global_step_1/manifest.json").write_text(json.dumps({**manifest, "format": "verl-checkpoint-1"}))
    assert run(2, "actor_rollout_ref.actor.optim.lr=1e-3")[0] == 0
    assert "no copy of its run's configuration" in notices()[KEY]
    assert find_checkpoint("run") == Path("run/global_step_2")


def test_each_run_that_begins_has_metrics_and_samples_of_its_own_and_one_that_goes_on_its_own_again(run):
    assert run(1)[0] == 0
    assert "logs/verl_examples/gsm8k.jsonl (file)" in notices()["trainer.logger"]
    first = Path("logs/verl_examples/gsm8k.jsonl").read_text()
    assert run(1, "trainer.default_local_dir=second", "trainer.seed=3")[0] == 0
    assert "gsm8k-2.jsonl (file)" in notices()["trainer.logger"]
    assert "samples-2" in notices()["trainer.rollout_data_dir"]
    assert run(2)[0] == 0  # the first goes on
    assert names("logs") == ["verl_examples/gsm8k-2.jsonl", "verl_examples/gsm8k.jsonl"]
    assert Path("logs/verl_examples/gsm8k.jsonl").read_text().startswith(first)
    assert [names("samples"), names("samples-2")] == [["1.jsonl", "2.jsonl"], ["1.jsonl"]]


def test_supervised_runs_are_held_to_the_same(run):
    write_prompts("sft.jsonl", [{"messages": turns(f"{i}", "b")} for i in range(8)])
    words = ["data.train_files=sft.jsonl", "data.train_batch_size=4", "data.max_length=64", "model.path=model",
             "trainer.save_freq=1", "trainer.default_local_dir=run", "trainer.logger=[file]"]  # fmt: skip
    settings = {"program": sft_trainer, "words": words}
    assert run(1, **settings)[0] == 0
    before = Path("run/config.yaml").read_text()
    status, said = run(2, "optim.lr=1e-2", **settings)
    assert status == 2 and "optim.lr: was" in said and Path("run/config.yaml").read_text() == before
    assert run(2, "optim.lr=1e-2", "trainer.resume_changed=accept", **settings)[0] == 0
    assert Path("run/global_step_2/config.yaml").read_text() != before


HARMLESS = ("trainer.logger", "trainer.save_freq", "trainer.total_training_steps", "trainer.n_gpus_per_node",
            "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu", "actor_rollout_ref.rollout.gpu_memory_utilization",
            "data.val_files", "critic.ppo_max_token_len_per_gpu", "actor_rollout_ref.hybrid_engine",
            "actor_rollout_ref.rollout.n_gpus_per_node", "actor_rollout_ref.rollout.nnodes",
            "skip.rollout.enable", "skip.rollout.dump_dir")  # fmt: skip
MATHEMATICS = (
    "trainer.seed", "trainer.critic_warmup", "trainer.ref_update_freq", "data.train_files", "data.train_batch_size",
    "actor_rollout_ref.actor.ppo_mini_batch_size", "critic.optim.lr", "actor_rollout_ref.rollout.temperature",
    "actor_rollout_ref.actor.fsdp_config.model_dtype", "reward.timeout", "actor_rollout_ref.model.lora_rank",
    "algorithm.gamma", "skip.rollout.action",
)  # fmt: skip


def test_settings_are_harmless_by_what_they_are():
    known = schema_of(NAMES["ppo_trainer"][0].root).leaves
    assert set(HARMLESS + MATHEMATICS) <= set(known)
    assert [key for key in HARMLESS if not is_harmless(key)] == []
    assert [key for key in MATHEMATICS if is_harmless(key)] == []


@pytest.mark.parametrize(
    "word",
    [
        "actor_rollout_ref.model.override_config.attention_dropout=0.5",
        "reward.custom_reward_function.reward_kwargs.scale=2",
        "data.apply_chat_template_kwargs.enable_thinking=false",
    ],
)
def test_a_key_that_a_mapping_of_the_users_own_gets_or_loses_changes_the_mathematics(here, word):
    without, with_it = (Provenance.of(read_config("ppo_trainer", [*GRPO, *more])) for more in ([], [word]))
    for before, now in ((without, with_it), (with_it, without)):
        (change,) = now.changes(before)
        assert not change.harmless and change.key == word.partition("=")[0].rpartition(".")[0]


OPTIM = "actor_rollout_ref.actor.optim"


@pytest.mark.parametrize(
    ("changes", "asks"),
    [
        ([], False),
        ([f"{OPTIM}.lr_warmup_steps=2"], False),
        ([f"{OPTIM}.lr_warmup_steps_ratio=0.1"], True),
        ([f"{OPTIM}.lr_warmup_steps_ratio=0.1", f"{OPTIM}.lr_warmup_steps=2"], False),
        ([f"{OPTIM}.lr_scheduler_type=cosine"], True),
        ([f"{OPTIM}.lr_scheduler_type=cosine", f"{OPTIM}.total_training_steps=8"], False),
        ([f"{OPTIM}.lr_decay_style=linear"], True),
        ([f"{OPTIM}.lr_decay_style=linear", f"{OPTIM}.lr_decay_steps=8"], False),
    ],
)
def test_a_longer_run_is_harmless_unless_its_schedule_is_stretched(here, changes, asks):
    short, longer = (
        Provenance.of(read_config("ppo_trainer", [*GRPO, *changes, f"trainer.total_training_steps={steps}"]))
        for steps in (4, 8)
    )
    (change,) = longer.changes(short)
    assert change.key == "trainer.total_training_steps" and change.harmless is not asks
    assert ("the schedule depends on the length" in str(change)) is asks


def test_a_folder_of_any_size_is_compared_by_names_sizes_and_ends(here, monkeypatch):
    monkeypatch.setattr(provenance, "MOST_READ", 400)
    monkeypatch.setattr(provenance, "MOST_FILES", 4)
    monkeypatch.setattr(provenance, "LEAST_SAMPLE", 50)
    Path("many").mkdir()
    for number in range(6):
        Path("many", f"{number}.bin").write_bytes(bytes(1000))
    first = digest("many")
    assert digest("many") == first
    for file, place, seen in (("0.bin", 3, True), ("3.bin", 999, True), ("3.bin", 500, False), ("5.bin", 3, False)):
        content = bytearray(1000)
        content[place] = 1
        Path("many", file).write_bytes(content)
        assert (digest("many") != first) is seen, (file, place)
        Path("many", file).write_bytes(bytes(1000))
    Path("many", "5.bin").write_bytes(bytes(1001))
    assert digest("many") != first


def digest(folder: str) -> str:
    return provenance._digest_of_all(folder)
