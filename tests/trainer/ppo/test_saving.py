"""What happens around a checkpoint: a copy elsewhere, a class of the user's that is told, a machine that ends."""

from __future__ import annotations

import shutil
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.harness.runs import train
from verl.errors import CheckpointError, ConfigError, DataError, RolloutError
from verl.journal.account import Account
from verl.journal.ledger_reader import fill
from verl.json_text import read_json
from verl.metrics import notices, reset_notices
from verl.storage.remote import FsspecFolder
from verl.trainer import expiry
from verl.trainer.ppo.callbacks import Callback, CheckpointCallback, SaveCheckpoint, build_checkpoint_callback

told: list[tuple[int, str, bool]] = []


class Told(CheckpointCallback):
    """Sees that the checkpoint is complete, by its manifest."""

    def on_save(self, trainer, global_step, checkpoint_dir, async_save=False, **more):
        assert trainer.config is self.config and (Path(checkpoint_dir) / "manifest.json").is_file()
        told.append((global_step, Path(checkpoint_dir).name, async_save))


class Failing(Told):
    def on_save(self, **told):
        raise ValueError("no registry")


class Mute:
    def __init__(self, config):
        pass


SAVES = ("trainer.save_freq=1", "trainer.resume_mode=auto", "trainer.default_local_dir=run")


def test_a_run_whose_folder_is_lost_goes_on_from_the_copy_as_if_nothing_had_happened(shared_here):
    through = train("trainer.total_training_steps=3")
    copied = (
        *SAVES,
        f"trainer.default_hdfs_dir=file://{shared_here}/remote",
        f"trainer.checkpoint_callback_class={__name__}.Told",
    )
    told.clear()
    train(*copied, "trainer.total_training_steps=2")
    assert told == [(1, "global_step_1", False), (2, "global_step_2", False)]
    shutil.rmtree("run")
    again = train(*copied, "trainer.total_training_steps=3", "trainer.del_local_ckpt_after_load=true")
    assert again.metrics[0]["actor/pg_loss"] == through.metrics[2]["actor/pg_loss"]
    assert again.batches[0].tensors["responses"].tolist() == through.batches[2].tensors["responses"].tolist()
    assert told[2:] == [(3, "global_step_3", False)] and len(again.metrics) == 1
    assert [folder.name for folder in Path("run").glob("global_step_*")] == ["global_step_3"]
    assert len(list(Path("remote").glob("global_step_*/manifest.json"))) == 3


def test_the_checkpoint_with_the_best_validation_stays_in_the_folder(shared_here):
    words = (
        *SAVES[:2], "trainer.default_local_dir=best", "trainer.total_training_steps=4", "trainer.test_freq=1",
        "trainer.max_actor_ckpt_to_keep=1", "data.val_files=train.parquet", "trainer.experiment_name=best",
    )  # fmt: skip
    with pytest.raises(ConfigError, match=r"no such metric. Got 'val-core/reward'. Allowed: .*val-core/test"):
        train(*words, "trainer.best_metric=val-core/reward")
    name = "val-core/test/addition/reward/mean@1"
    seen = train(*words, f"trainer.best_metric={name}")
    values = {step: metrics[name] for step, metrics in enumerate(seen.metrics, start=1)}
    best = max((1, 2, 3, 4), key=lambda step: (values[step], -step))
    entry = read_json(Path("best/best_checkpoint.json").read_text())
    assert entry["global_step"] == best and entry["values"][str(best)] == values[best]
    assert {folder.name for folder in Path("best").glob("global_step_*")} == {f"global_step_{best}", "global_step_4"}


def test_a_class_that_fails_ends_the_run_and_the_checkpoint_stays(shared_here):
    saves = (*SAVES[:2], "trainer.default_local_dir=failing")
    with pytest.raises(CheckpointError, match=r"checkpoint_callback_class: on_save failed.*no registry.*is complete"):
        train(*saves, f"trainer.checkpoint_callback_class={__name__}:Failing")
    assert Path("failing/global_step_1/manifest.json").is_file()


def test_an_error_after_a_save_leaves_the_metrics_and_the_account_of_the_step_that_is_saved(shared_here):
    class Fails(Callback):
        def on_step_end(self, trainer, batch):
            if trainer.ctx.step == 2:
                raise RolloutError("the sampler is gone")

    words = (*SAVES[:2], "trainer.default_local_dir=ended", "trainer.experiment_name=ended")
    words = (*words, "trainer.total_training_steps=3", "trainer.copy_check_freq=1")
    reset_notices()
    with pytest.raises(RolloutError, match="the sampler is gone"):
        train(*words, watch=Fails())
    assert "no rank holds a copy" in notices()["trainer.copy_check_freq"]
    assert len(train(*words).batches) == 1, "step 2 is not repeated"
    (log,) = Path("logs").rglob("ended.jsonl")
    assert [read_json(line)["step"] for line in log.read_text().splitlines()] == [1, 2, 3]
    account = Account()
    fill(account, Path("ended/journal.jsonl"))
    assert account.trained == 3 * 4 * 4 and not account.faults


def test_the_last_checkpoint_is_told_though_its_copy_fails(shared_here, monkeypatch):
    put = FsspecFolder.put

    def refuses(self, local, path):
        if path.startswith("global_step"):
            raise DataError("the disk is full")
        put(self, local, path)

    monkeypatch.setattr(FsspecFolder, "put", refuses)
    told.clear()
    with pytest.raises(CheckpointError, match=r"could not be copied.*the disk is full"):
        train(
            *SAVES[:2],
            "trainer.default_local_dir=uncopied",
            "actor_rollout_ref.actor.checkpoint.async_save=true",
            f"trainer.default_hdfs_dir=file://{shared_here}/full",
            f"trainer.checkpoint_callback_class={__name__}.Told",
        )
    assert told == [(1, "global_step_1", True)]


@pytest.mark.parametrize(
    ("named", "says"),
    [
        ("json.loads", "this is no class of checkpoint callbacks"),
        (f"{__name__}:Mute", "this is no class of checkpoint callbacks"),
        (f"{__name__}:Fale", f"module '{__name__}' has no 'Fale'"),
    ],
)
def test_a_wrong_class_is_refused_before_the_run(named, says):
    config = SimpleNamespace(trainer=SimpleNamespace(checkpoint_callback_class=named))
    with pytest.raises(ConfigError, match=rf"trainer\.checkpoint_callback_class: {says}"):
        build_checkpoint_callback(config)


def saved(monkeypatch, ends: str | None, spare: int = 0, every: int = 100) -> list[int]:
    """Steps of 100 seconds and saves of 80, from the time 0 on, six of them: which of them are saved."""
    for name in expiry.EXPIRY:
        monkeypatch.delenv(name, raising=False)
    if ends is not None:
        monkeypatch.setenv(expiry.EXPIRY[1], ends)
    now, steps = [0.0], []

    def save() -> None:
        now[0] += 80.0
        steps.append(ctx.step)

    ctx = SimpleNamespace(step=0, run=SimpleNamespace(total_steps=100), timed=lambda name: nullcontext())
    settings = SimpleNamespace(trainer=SimpleNamespace(save_freq=every, esi_redundant_time=spare))
    trainer, callback = SimpleNamespace(ctx=ctx, config=settings, save_checkpoint=save), SaveCheckpoint(lambda: now[0])
    for ctx.step in range(1, 7):
        callback.on_step_begin(trainer)
        now[0] += 100.0
        callback.on_step_end(trainer, None)
    return steps


def test_a_step_is_saved_before_the_machine_is_taken_away(monkeypatch):
    """A further step and a save take 160 seconds, so that of a machine of 500 seconds the fourth step is the last one
    that can be saved in time; 100 seconds to spare make it the third, whose save then counts for the fourth."""
    assert saved(monkeypatch, None) == []
    assert saved(monkeypatch, "500") == [4, 5, 6]
    assert saved(monkeypatch, "500", spare=100)[0] == 3
    assert saved(monkeypatch, "5000") == []
    assert saved(monkeypatch, "500", every=-1) == []
    for value in ("tomorrow", "nan"):
        reset_notices()
        assert saved(monkeypatch, value) == []
        assert repr(value) in notices()[expiry.EXPIRY[1]]
