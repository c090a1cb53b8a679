"""Fine-tuning by its command lowers the loss of conversations that it has not seen."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from tests.support import tiny_model_dir
from verl.trainer import sft_trainer


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("VERL_FILE_LOGGER_ROOT", str(tmp_path / "logs"))
    tiny_model_dir("model")
    draw = random.Random(0)
    letters = [[draw.choice("abcdefgh") for _ in range(3)] for _ in range(112)]
    for name, part in (("train", letters[:96]), ("val", letters[96:])):
        rows = [{"messages": [say("user", "".join(word)), say("assistant", "said " + word[0] * 3)]} for word in part]
        Path(f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def say(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def test_the_loss_on_held_out_conversations_falls(here):
    """Nine tokens, six of them the same in every answer: knowing those alone leaves 3 log 8 / 9 = 0.69 per token."""
    words = [
        "data.train_files=train.jsonl", "data.val_files=val.jsonl", "data.train_batch_size=16", "data.max_length=64",
        "model.path=model", "optim.lr=1e-2", "trainer.total_training_steps=30", "trainer.test_freq=10",
        "trainer.default_local_dir=sft", "trainer.experiment_name=sft", "trainer.logger=[file]",
    ]  # fmt: skip
    assert sft_trainer.main(words) == 0
    (log,) = Path("logs").rglob("sft.jsonl")
    steps = [json.loads(line)["data"] for line in log.read_text().splitlines()]
    losses = [step["val/loss"] for step in steps if "val/loss" in step]
    assert steps[0]["train/loss"] > 5  # log 259 = 5.6: a new model knows nothing
    assert len(losses) == 3 and losses[-1] < losses[0] and losses[-1] < 0.9
