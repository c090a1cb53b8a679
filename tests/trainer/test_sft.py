"""Fine-tuning by its command lowers the loss of conversations that it has not seen."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.harness.models import tiny_model_dir
from tests.harness.rows import turns, write_prompts
from tests.harness.runs import logged, records
from verl.config import SFTTrainerConfig
from verl.config.schema.sft import SFTDataConfig
from verl.errors import ConfigError
from verl.json_text import read_json
from verl.metrics import notices, reset_notices
from verl.trainer import sft_trainer, sft_trainer_ray
from verl.trainer.supervised import SupervisedTrainer


@pytest.fixture
def here(workplace: Path) -> Path:
    tiny_model_dir("model")
    draw = random.Random(0)
    letters = [[draw.choice("abcdefgh") for _ in range(3)] for _ in range(112)]
    for name, part in (("train", letters[:96]), ("val", letters[96:])):
        rows = [{"messages": turns("".join(word), "said " + word[0] * 3)} for word in part]
        write_prompts(f"{name}.jsonl", rows)
    return workplace


def test_the_loss_on_held_out_conversations_falls(here):
    """Nine tokens, six of them the same in every answer: knowing those alone leaves 3 log 8 / 9 = 0.69 per token."""
    words = [
        "data.train_files=train.jsonl", "data.val_files=val.jsonl", "data.train_batch_size=16", "data.max_length=64",
        "model.path=model", "optim.lr=1e-2", "trainer.total_training_steps=30", "trainer.test_freq=10",
        "trainer.default_local_dir=sft", "trainer.experiment_name=sft", "trainer.logger=[file]",
    ]  # fmt: skip
    assert sft_trainer.main(words) == 0
    steps = logged("logs", "sft")
    losses = [step["val/loss"] for step in steps if "val/loss" in step]
    assert steps[0]["train/loss"] > 5  # log 259 = 5.6: a new model knows nothing
    assert len(losses) == 3 and losses[-1] < losses[0] and losses[-1] < 0.9


def test_each_epoch_ends_with_a_validation_and_a_checkpoint(here):
    """Of 96 conversations 16 at a time an epoch has six steps; the second ends early, at the run's last step."""
    words = [
        "data.train_files=train.jsonl", "data.val_files=val.jsonl", "data.train_batch_size=16", "data.max_length=64",
        "model.path=model", "trainer.total_training_steps=8", "trainer.test_freq=after_each_epoch",
        "trainer.save_freq=after_each_epoch", "checkpoint.save_contents=[model]", "trainer.default_local_dir=sft",
        "trainer.experiment_name=epochs", "trainer.logger=[file]",
    ]  # fmt: skip
    assert sft_trainer.main(words) == 0
    (log,) = Path("logs").rglob("epochs.jsonl")
    lines = records(log)
    assert [line["step"] for line in lines if "val/loss" in line["data"]] == [6, 8]
    assert sorted(path.name for path in Path("sft").glob("global_step_*")) == ["global_step_6", "global_step_8"]


def test_the_checkpoint_with_the_best_validation_outlives_newer_ones(here):
    words = [
        "data.train_files=train.jsonl", "data.val_files=val.jsonl", "data.train_batch_size=16", "data.max_length=64",
        "model.path=model", "optim.lr=1e-2", "trainer.total_training_steps=4", "trainer.test_freq=1",
        "trainer.save_freq=1", "trainer.best_metric=val/loss", "trainer.best_mode=max", "trainer.max_ckpt_to_keep=1",
        "checkpoint.save_contents=[model]", "trainer.default_local_dir=best", "trainer.logger=[file]",
        "trainer.experiment_name=best",
    ]  # fmt: skip
    assert sft_trainer.main(words) == 0
    losses = [step["val/loss"] for step in logged("logs", "best")]
    best = 1 + losses.index(max(losses))
    assert best < 4, "the loss falls, and the largest is looked for"
    assert {path.name for path in Path("best").glob("global_step_*")} == {f"global_step_{best}", "global_step_4"}
    assert read_json(Path("best/best_checkpoint.json").read_text())["global_step"] == best


def test_a_loss_whose_outputs_validation_cannot_read_is_refused(here):
    class Entropy:
        outputs = ("entropy",)

        def __call__(self, outputs, batch, norm):
            return outputs["entropy"].mean(), {}

    rows = [{"input_ids": [1, 2]}] * 256
    with pytest.raises(ConfigError, match=r"Entropy.outputs: validation reads log_probs.*the loss's tuple outputs"):
        SupervisedTrainer(SFTTrainerConfig(), None, rows, rows, list, Entropy())


def test_validation_before_the_first_step_is_step_0_and_changes_nothing(here):
    words = [
        "data.train_files=train.jsonl", "data.val_files=val.jsonl", "data.train_batch_size=16", "data.max_length=64",
        "model.path=model", "trainer.total_training_steps=2", "trainer.logger=[file]", "trainer.resume_mode=disable",
    ]  # fmt: skip
    for name, first in (("without", "false"), ("with", "true")):
        assert sft_trainer.main([*words, f"trainer.experiment_name={name}", f"trainer.val_before_train={first}"]) == 0
    without, (before, *after) = logged("logs", "without"), logged("logs", "with")
    assert list(before) == ["val/loss"] and before["val/loss"] > 5  # log 259 = 5.6
    assert [step["train/loss"] for step in after] == [step["train/loss"] for step in without]


@pytest.mark.parametrize(
    "device, given, length, together, tokens",
    [
        ("cpu", None, 9000, 1, None),  # the engine chooses
        ("cpu", 700, 600, 1, 700),
        ("cuda", None, 1024, 1, 8192),
        ("cuda", None, 9000, 1, 9000),
        ("cuda", None, 9000, 2, 18000),
        ("cuda", 20000, 9000, 1, 20000),
    ],
)
def test_without_a_token_budget_a_pass_is_small_on_a_cpu_and_large_on_a_gpu(
    monkeypatch, device, given, length, together, tokens
):
    monkeypatch.setattr("verl.device.resolve_device", lambda name: device)
    config = SFTTrainerConfig(data=SFTDataConfig(max_length=length, max_token_len_per_gpu=given))
    trainer = SupervisedTrainer.__new__(SupervisedTrainer)
    trainer.config, trainer.together = config, together
    assert trainer.limits.max_tokens == tokens and trainer.limits.micro_batch_size is None


def test_upstreams_program_starts_the_processes_that_its_sizes_name(here, monkeypatch, capsys):
    started: list[list[str]] = []
    monkeypatch.setattr("os.execv", lambda program, words: started.append(words))
    monkeypatch.setattr(sft_trainer, "main", lambda words: 7)
    reset_notices()
    run = ["data.train_files=train.jsonl", "data.train_batch_size=16", "model.path=model"]
    sft_trainer_ray.main([*run, "trainer.nnodes=1", "trainer.n_gpus_per_node=2"])
    assert started[0][1:4] == ["-m", "torch.distributed.run", "--standalone"] and "--nproc_per_node=2" in started[0]
    assert started[0][-len(run) :] == run and notices() == {}
    assert sft_trainer_ray.main([*run, "trainer.n_gpus_per_node=1"]) == 7 and len(started) == 1
    assert sft_trainer_ray.main([*run, "trainer.nnodes=2"]) == 2
    assert "starts processes on one machine. Got 2. Start torchrun on each machine" in capsys.readouterr().err
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert sft_trainer_ray.main([*run, "trainer.nnodes=2"]) == 7
