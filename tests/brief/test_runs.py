"""Commands of the guides train a tiny model in one process, with the built-in sampler whatever they print.

Those that print another sampler or more processes are run as they are printed in `tests/trainer/on_ray/test_starts.py`.

A row whose feature is not built is refused by name here as well, and runs from the day on which it is.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.brief.machine import guides_machine
from tests.brief.small import in_one_process
from tests.brief.states import REFUSED, of_attempt
from tests.brief.table import rows
from tests.harness.models import tiny_model_dir
from tests.harness.rows import talks, write_prompts
from tests.harness.runs import records
from tests.harness.scorers import LETTERS
from verl.metrics import reset_notices
from verl.trainer import dpo_trainer, main_ppo, rm_trainer, sft_trainer

pytestmark = pytest.mark.slow  # each takes a second or two, and there are many
COMMANDS = [
    pytest.param(attempt, id=f"{row.id}-{number}")
    for row in rows()
    for number, attempt in enumerate(row.config, start=1)
    if attempt.runs
]
PROGRAMS = {
    "ppo_trainer": main_ppo, "sft_trainer": sft_trainer, "dpo_trainer": dpo_trainer, "rm_trainer": rm_trainer,
}  # fmt: skip


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model, prompts, chats, pairs and a scorer, shared by all runs."""
    folder = tmp_path_factory.mktemp("home")
    tiny_model_dir(folder / "model")
    write_prompts(folder / "train.parquet", 4)
    write_prompts(folder / "chats.parquet", talks(4))
    pairs = [{"prompt": [{"role": "user", "content": f"{i}+1="}], "chosen": str(i + 1), "rejected": str(i)}
             for i in range(4)]  # fmt: skip
    write_prompts(folder / "pairs.parquet", pairs)
    (folder / "scorer.py").write_text(LETTERS)
    return folder


@pytest.mark.parametrize("attempt", COMMANDS)
def test_a_command_of_the_guides_trains_a_tiny_model_in_one_process(attempt, home, tmp_path, monkeypatch, capsys):
    with guides_machine(tmp_path / "guides"):
        refused = of_attempt(attempt).state == REFUSED
    reset_notices()
    folder = tmp_path / "run"
    folder.mkdir()
    for name in ("model", "train.parquet", "chats.parquet", "pairs.parquet", "scorer.py"):
        (folder / name).symlink_to(home / name)
    if attempt.yaml:
        (folder / "config").mkdir()
        (folder / "config" / "mine.yaml").write_text(attempt.yaml)
    monkeypatch.chdir(folder)
    monkeypatch.delenv("VERL_FILE_LOGGER_ROOT", raising=False)
    status = PROGRAMS[attempt.program].main(in_one_process(attempt))
    assert status == (2 if refused else 0)
    if refused:
        assert "not built" in capsys.readouterr().err
    else:
        logged = records(folder / "guide" / "run.jsonl")
        assert logged[-1]["step"] == 1
        assert any(key.endswith(("pg_loss", "train/loss")) for key in logged[-1]["data"])
