"""Training on judged answers, and with a teacher, under torchrun: two ranks give the numbers of one process."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.models import tiny_model_dir
from tests.harness.programs import python
from tests.harness.ranks import TIMEOUT
from tests.harness.rows import write_prompts
from tests.harness.runs import logged

pytestmark = pytest.mark.slow
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]

KTO = ("dpo.loss_type=kto", "data.train_files=train_judged.jsonl", "data.val_files=val_judged.jsonl")
TAUGHT = (
    *("data.train_files=train_answers.jsonl", "data.val_files=val_answers.jsonl", "distillation.enabled=true"),
    *("data.prompt_key=prompt", "data.response_key=response", "distillation.distillation_loss.loss_mode=jsd"),
    "distillation.teacher_models.teacher.model_path=teacher",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve pairs to train on, and five to validate on: with four at a time, the last batch has one pair."""
    folder = tmp_path_factory.mktemp("pairs")
    tiny_model_dir(folder / "model")
    for name, count in (("train", 12), ("val", 5)):
        rows = [
            {"prompt": f"{i}+1=", "chosen": f"{i + 1} ok", "rejected": "no idea " * (i % 3 + 1)} for i in range(count)
        ]
        write_prompts(folder / f"{name}.jsonl", rows)
        judged = [{"prompt": f"{i}+1=", "completion": f"{i + 1} ok", "label": i % 3 > 0} for i in range(count + 1)]
        write_prompts(folder / f"{name}_judged.jsonl", judged)
        answers = [{"prompt": row["prompt"], "response": row["rejected"]} for row in rows]
        write_prompts(folder / f"{name}_answers.jsonl", answers)
    tiny_model_dir(folder / "teacher", seed=1)
    return folder


def train(folder: Path, program: str, name: str, launcher: list[str], *changes: str) -> list[dict]:
    words = [
        *(*launcher, "-m", f"verl.trainer.{program}"),
        "data.train_files=train.jsonl",
        "data.val_files=val.jsonl",
        "data.train_batch_size=4",
        "data.max_length=64",
        "model.path=model",
        "optim.lr=1e-3",
        "trainer.device=cpu",
        "trainer.total_training_steps=3",
        "trainer.test_freq=3",
        f"trainer.default_local_dir={name}",
        f"trainer.experiment_name={name}",
        "trainer.logger=[file]",
    ]
    python(*words, *changes, cwd=folder, timeout=TIMEOUT, OMP_NUM_THREADS="1")
    return logged(folder / "logs", name)


@pytest.mark.parametrize(
    "program, changes",
    [
        ("dpo_trainer", ()),
        ("dpo_trainer", ("dpo.precompute_ref_log_probs=true",)),
        ("rm_trainer", ()),
        ("dpo_trainer", KTO),
        ("sft_trainer", TAUGHT),
    ],
    ids=["dpo", "dpo with stored references", "rm", "kto", "sft with a teacher"],
)
def test_two_ranks_give_the_numbers_of_one_process(folder, program, changes):
    name = f"{program}{len(changes)}"
    alone = train(folder, program, f"{name}_alone", [], *changes)
    both = train(folder, program, f"{name}_both", TORCHRUN, *changes)
    assert len(alone) == len(both) == 3
    compared = 0
    for mine, other in zip(both, alone):
        for key in [
            key for key in other if key.startswith("val/") or key in ("train/loss", "train/kl", "train/grad_norm")
        ]:
            assert mine[key] == pytest.approx(other[key], rel=1e-4, abs=1e-6), key
            compared += 1
    assert compared > 6 and any(key.startswith("val/") for key in alone[-1])
