"""DPO and reward models by their commands: their held-out metrics, resumed runs, and references in every form."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.harness.models import tiny_model_dir
from tests.harness.reward_models import reward_worker
from tests.harness.rows import write_prompts
from tests.harness.runs import logged
from verl.trainer import dpo_trainer, rm_trainer
from verl.trainer.pairs import DPOTrainer, split_at_answers


@pytest.fixture
def here(workplace: Path) -> Path:
    tiny_model_dir("model")
    draw = random.Random(0)
    for name, count in (("train", 48), ("val", 16)):
        rows = []
        for _ in range(count):
            a, b = draw.randint(0, 9), draw.randint(0, 9)
            rows.append({"prompt": f"{a}+{b}=", "chosen": f"{a + b} ok", "rejected": f"no idea {b}"})
        write_prompts(f"{name}.jsonl", rows)
    return workplace


def train(program, name: str, *changes: str) -> list[dict]:
    arguments = [
        "data.train_files=train.jsonl",
        "data.val_files=val.jsonl",
        "data.train_batch_size=12",
        "data.max_length=64",
        "model.path=model",
        "optim.lr=5e-3",
        "trainer.total_training_steps=8",
        "trainer.test_freq=4",
        "trainer.save_freq=4",
        f"trainer.default_local_dir={name}",
        f"trainer.experiment_name={name}",
        "trainer.logger=[file]",
    ]
    assert program.main([*arguments, *changes]) == 0
    return logged("logs", name)


def weights(name: str, step: int) -> dict[str, torch.Tensor]:
    return load_file(f"{name}/global_step_{step}/model/huggingface/model.safetensors")


def test_dpo_prefers_the_chosen_answers_of_prompts_that_it_has_not_seen(here):
    steps = train(dpo_trainer, "dpo")
    assert steps[0]["train/loss"] == pytest.approx(0.693147, abs=1e-4), "at first policy and reference are one"
    assert steps[-1]["val/rewards/accuracies"] == 1.0 and steps[-1]["val/loss"] < 0.5 * steps[0]["train/loss"]
    assert steps[-1]["val/rewards/margins"] > 0


@pytest.mark.parametrize("kind", ["simpo", "orpo", "cpo"])
def test_a_loss_without_a_reference_loads_none_and_prefers_the_chosen_answers(here, kind, monkeypatch):
    monkeypatch.setattr(DPOTrainer, "_make_reference", None)
    steps = train(dpo_trainer, kind, f"dpo.loss_type={kind}", "dpo.beta=2.0")
    assert steps[-1]["val/rewards/accuracies"] == 1.0 and steps[-1]["val/loss"] < steps[0]["train/loss"]
    assert ("train/nll" in steps[0]) == (kind != "simpo")


def test_a_reward_model_tells_chosen_from_rejected_and_its_folder_serves_as_one(here):
    steps = train(rm_trainer, "rm")
    assert steps[-1]["val/accuracy"] == 1.0 and steps[-1]["val/loss"] < 0.3
    from verl.protocol import DataProto

    worker = reward_worker("rm/global_step_8/model/huggingface")
    from transformers import AutoTokenizer

    encode = AutoTokenizer.from_pretrained("model").encode
    texts = [f"<|im_start|>user\n3+4=<|im_end|>\n<|im_start|>assistant\n{a}<|im_end|>" for a in ("7 ok", "no idea 4")]
    scores = []
    for text in texts:
        ids = torch.tensor([encode(text, add_special_tokens=False)])
        ones = torch.ones_like(ids)
        rows = {"input_ids": ids, "attention_mask": ones, "position_ids": ones.cumsum(-1) - 1}
        batch = DataProto.from_dict(tensors={**rows, "responses": ids[:, 9:], "response_mask": ones[:, 9:]})
        scores.append(worker.compute_rm_score(batch).tensors["rm_scores"].sum().item())
    assert scores[0] > scores[1] + 1


@pytest.mark.parametrize("program", [dpo_trainer, rm_trainer], ids=["dpo", "rm"])
def test_a_resumed_run_ends_with_the_bits_of_one_that_never_stopped(here, program):
    train(program, "straight")
    train(program, "stopped", "trainer.total_training_steps=4", "optim.total_training_steps=8")
    train(program, "stopped", "optim.total_training_steps=8")
    ours, theirs = weights("stopped", 8), weights("straight", 8)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_micro_batches_and_stored_references_change_nothing_but_rounding(here):
    whole = train(dpo_trainer, "whole")
    small = train(dpo_trainer, "small", "data.use_dynamic_bsz=false", "data.micro_batch_size_per_gpu=2")
    stored = train(dpo_trainer, "stored", "dpo.precompute_ref_log_probs=true")
    for name in ("train/loss", "train/grad_norm"):
        for a, b, c in zip(whole, small, stored):
            assert b[name] == pytest.approx(a[name], rel=1e-3, abs=1e-6) and c[name] == pytest.approx(
                a[name], rel=1e-3, abs=1e-6
            )
    again = train(dpo_trainer, "stored", "dpo.precompute_ref_log_probs=true", "trainer.total_training_steps=9")
    assert len(again) == len(stored) + 1


@pytest.mark.parametrize("program", [dpo_trainer, rm_trainer], ids=["dpo", "rm"])
def test_packed_rows_and_shared_prompts_give_the_numbers_of_padded_rows(here, program):
    short = ("trainer.total_training_steps=2", "trainer.test_freq=2", "trainer.save_freq=-1", "optim.lr=1e-6")
    packed = train(program, "packed", *short, "data.max_token_len_per_gpu=140")
    padded = train(program, "padded", *short, "model.use_remove_padding=false")
    assert all(step["train/padding_waste"] == 0 and step["train/prompt_sharing"] > 0.3 for step in packed)
    assert all(step["train/padding_waste"] > 0 and step["train/prompt_sharing"] == 0 for step in padded)
    for ours, theirs in zip(packed, padded, strict=True):
        for name in (name for name in theirs if name.startswith("val/") or name in ("train/loss", "train/grad_norm")):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-4, abs=1e-5), name


def test_rows_are_split_behind_what_a_pair_has_in_common_and_in_front_of_its_answers():
    """Pair 0: answers 4 4 and 5 after 1 2 3. Pair 1: the prompts differ from their second token on."""
    rows = {
        "input_ids": torch.tensor([[1, 2, 3, 4, 4], [1, 2, 3, 5, 0], [7, 8, 9, 0, 0], [7, 6, 9, 9, 0]]),
        "attention_mask": torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 1, 0], [1, 1, 1, 0, 0], [1, 1, 1, 1, 0]]),
        "loss_mask": torch.tensor([[0, 0, 0, 1, 1], [0, 0, 0, 1, 0], [0, 0, 1, 0, 0], [0, 0, 1, 1, 0]]),
    }
    found = split_at_answers(rows).tensors
    assert found["input_ids"].tolist() == [
        [1, 2, 3, 4, 4, 0],
        [1, 2, 3, 5, 0, 0],
        [0, 0, 7, 8, 9, 0],
        [0, 0, 7, 6, 9, 9],
    ]
    assert found["response_mask"].tolist() == [[1, 1, 0], [1, 0, 0], [0, 1, 0], [0, 1, 1]]
    assert found["attention_mask"].tolist() == [
        [1] * 5 + [0],
        [1] * 4 + [0] * 2,
        [0, 0, 1, 1, 1, 0],
        [0, 0, 1, 1, 1, 1],
    ]
    assert found["position_ids"][2].tolist() == [0, 0, 0, 1, 2, 2]


def test_beside_lora_the_reference_is_the_model_without_its_adapter(here):
    steps = train(dpo_trainer, "lora", "model.lora_rank=4", "trainer.total_training_steps=4")
    assert steps[0]["train/loss"] == pytest.approx(0.693147, abs=1e-4)
    assert steps[-1]["train/rewards/margins"] > 0 and steps[-1]["train/loss"] < 0.69


@pytest.mark.parametrize(
    "changes, words",
    [
        (["dpo.beta=0"], "dpo.beta"),
        (["dpo.loss_type=ktoo"], "dpo.loss_type"),
        (["dpo.loss_type=ipo", "dpo.label_smoothing=0.1"], "only sigmoid and cpo have it"),
        (["dpo.simpo_gamma=1.0"], "only the loss of SimPO has it"),
        (["dpo.loss_type=orpo", "dpo.precompute_ref_log_probs=true"], "dpo.loss_type: there is no reference policy"),
        (["dpo.reference_free=true", "dpo.precompute_ref_log_probs=true"], "there is no reference policy to load"),
        (["data.max_token_len_per_gpu=100"], "data.max_token_len_per_gpu=128"),
    ],
)
def test_wrong_settings_are_one_message(here, capsys, changes, words):
    assert dpo_trainer.main(["data.train_files=train.jsonl", "model.path=model", "data.max_length=64", *changes]) == 2
    assert words in capsys.readouterr().err
