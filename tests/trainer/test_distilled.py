"""Fine-tuning with a teacher by its command: the divergence falls, and neither cuts nor a stop change the numbers."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.harness.configs import refused
from tests.harness.models import tiny_model_dir
from tests.harness.rows import turns, write_prompts
from tests.harness.runs import logged
from verl.config import load_config
from verl.trainer import sft_trainer

LOSS, TEACHERS = "distillation.distillation_loss", "distillation.teacher_models"
WORDS = [
    "data.train_files=train.jsonl", "data.val_files=val.jsonl", "data.train_batch_size=16", "data.max_length=64",
    "model.path=model", "optim.lr=1e-2", "trainer.logger=[file]", "distillation.enabled=true",
]  # fmt: skip


@pytest.fixture
def here(workplace: Path) -> Path:
    """A student, and a teacher that differs in its weights and its depth."""
    tiny_model_dir("model")
    tiny_model_dir("teacher", seed=1, layers=1)
    draw = random.Random(0)
    for name, count in (("train", 48), ("val", 10)):
        words = ["".join(draw.choice("abcdefgh") for _ in range(draw.randint(2, 9))) for _ in range(count)]
        write_prompts(f"{name}.jsonl", [{"messages": turns(word, "said " + word)} for word in words])
    return workplace


def train(name: str, *changes: str) -> list[dict]:
    words = [*WORDS, f"{TEACHERS}.teacher.model_path=teacher", f"trainer.experiment_name={name}",
             "trainer.total_training_steps=4", f"trainer.default_local_dir={name}"]  # fmt: skip
    assert sft_trainer.main([*words, *changes]) == 0
    return logged("logs", name)


def weights(name: str, step: int) -> dict[str, torch.Tensor]:
    return load_file(f"{name}/global_step_{step}/model/huggingface/model.safetensors")


@pytest.mark.parametrize("mode", ["forward_kl", "reverse_kl", "jsd", "forward_kl_topk", "reverse_kl_topk", "jsd_topk"])
def test_every_divergence_falls_on_answers_that_are_not_in_the_file(here, mode):
    changes = (f"{LOSS}.loss_mode={mode}", f"{LOSS}.alpha=1", "trainer.test_freq=2", "trainer.val_before_train=true")
    before, *steps = train(mode, *changes, "trainer.total_training_steps=10")
    held_out = [step["val/distillation/loss"] for step in steps if "val/distillation/loss" in step]
    assert len(held_out) == 5 and held_out[-1] < 0.5 * before["val/distillation/loss"]
    assert all(step["train/loss"] == pytest.approx(step["train/distillation/loss"], rel=1e-6) for step in steps)


def test_the_loss_is_the_weighted_sum_of_cross_entropy_and_divergence(here):
    steps = train("mixed", f"{LOSS}.alpha=0.25")
    for step in steps:
        mixed = 0.75 * step["train/nll"] + 0.25 * step["train/distillation/loss"]
        assert step["train/loss"] == pytest.approx(mixed, rel=1e-6)


def test_all_tokens_as_candidates_give_the_numbers_of_the_full_divergence(here):
    full, listed = train("full", f"{LOSS}.loss_mode=jsd"), train("k", f"{LOSS}.loss_mode=jsd_topk", f"{LOSS}.topk=9999")
    for a, b in zip(full, listed):
        assert b["train/distillation/loss"] == pytest.approx(a["train/distillation/loss"], abs=2e-6)


def test_micro_batches_and_padding_change_nothing_but_rounding(here):
    common = (f"{LOSS}.loss_mode=jsd", f"{LOSS}.temperature=2")
    runs = [
        train("through", *common),
        train("small", *common, "data.use_dynamic_bsz=false", "data.micro_batch_size_per_gpu=3"),
        train("padded", *common, "model.use_remove_padding=false"),
    ]
    for steps in zip(*runs, strict=True):
        for name in ("train/loss", "train/distillation/loss", "train/grad_norm"):
            assert [step[name] for step in steps[1:]] == pytest.approx([steps[0][name]] * 2, rel=1e-4), name


def test_a_resumed_run_ends_with_the_bits_of_one_that_never_stopped(here):
    saves, length = ("trainer.save_freq=2", f"{LOSS}.loss_mode=jsd"), "optim.total_training_steps=4"
    train("straight", *saves)
    train("stopped", *saves, "trainer.total_training_steps=2", length)
    train("stopped", *saves, length)
    ours, theirs = weights("stopped", 4), weights("straight", 4)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_student_with_an_adapter_learns_from_the_teacher(here):
    steps = train("lora", "model.lora_rank=4", f"{LOSS}.alpha=1", "trainer.total_training_steps=8")
    assert steps[-1]["train/distillation/loss"] < steps[0]["train/distillation/loss"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], f"{TEACHERS}.teacher.model_path=FOLDER"),
        ([f"{TEACHERS}.teacher.model_path=/no/such"], "no such model folder"),
        ([f"{TEACHERS}.a.model_path=teacher", f"{TEACHERS}.b.model_path=teacher"], "one teacher scores the answers"),
        ([f"{TEACHERS}.teacher.path=teacher"], "model_path"),
        ([f"{TEACHERS}.teacher.model_path=teacher", f"{LOSS}.alpha=0"], f"{LOSS}.alpha"),
        ([f"{TEACHERS}.teacher.model_path=teacher", f"{LOSS}.loss_mode=k3"], f"{LOSS}.loss_mode"),
        ([f"{TEACHERS}.teacher.model_path=teacher", f"{LOSS}.beta=1"], "forward_kl and reverse_kl are the limits"),
        ([f"{TEACHERS}.teacher.model_path=teacher", "model.use_fused_kernels=true"], "model.use_fused_kernels"),
        ([f"{TEACHERS}.teacher.model_path=wide"], "head has 259 rows and this teacher's 300"),
        ([f"{TEACHERS}.teacher.model_path=other"], "other tokens than its student"),
    ],
)
def test_a_teacher_that_cannot_be_is_refused_with_its_key(here, words, says):
    tiny_model_dir("wide", vocab=300)
    text = (tiny_model_dir("other") / "tokenizer.json").read_text()
    Path("other/tokenizer.json").write_text(text.replace("<|im_end|>", "<|the_end|>"))
    assert says in refused(load_config, "sft_trainer", [*WORDS, *words])
