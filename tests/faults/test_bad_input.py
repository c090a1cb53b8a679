"""Folders, disks and checkpoints that are not what a run needs: one error that names it, and nothing is lost."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

import pytest

from tests.faults.points import SLOW_SECONDS
from tests.harness.forked_runs import Server, assert_same_end, finish, grpo, prepare
from tests.harness.models import tiny_model_dir
from verl.checkpoint import list_checkpoints

pytestmark = pytest.mark.slow


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return prepare(tmp_path)


def newest_step(folder: Path) -> int:
    return list_checkpoints(folder / "run")[0].step


def errors(output: str) -> list[str]:
    return [line for line in output.splitlines() if line.startswith("error:")]


@pytest.mark.parametrize(
    ("action", "reason"),
    [("FULL", "File too large"), ("AWAY", "Not a directory")],
    ids=["no room for a shard", "the folder is gone"],
)
def test_a_disk_that_fails_during_a_save_ends_the_run_with_one_error_and_costs_only_that_save(
    server: Server, whole, folder, action, reason
):
    ended = server.start(folder, grpo(), f"begin:3:{action}").wait()
    if action == "AWAY":
        (folder / "run").unlink()
        (folder / "run.away").rename(folder / "run")
    assert ended.status == 2, ended.output[-2000:]
    (told,) = errors(ended.output)
    assert "could not be saved" in told and reason in told and "trainer.default_local_dir" in told
    assert "Traceback" not in ended.output
    assert newest_step(folder) == 2
    if action == "FULL":
        assert f"The newest intact checkpoint is {folder}/run/global_step_2." in told
        assert list((folder / "run").glob(".writing*")) == []
    finish(server, folder, grpo())  # there is room again
    assert_same_end(whole, folder)


def test_a_disk_that_fails_in_the_background_ends_the_run_with_one_error_at_a_later_step(server: Server, folder):
    ended = server.start(folder, [*grpo(), "actor_rollout_ref.actor.checkpoint.async_save=true"], "begin:3:FULL").wait()
    assert ended.status == 2, ended.output[-2000:]
    (told,) = errors(ended.output)
    assert "step 3 could not be saved" in told and "File too large" in told
    assert newest_step(folder) == 2


def test_a_disk_that_is_full_while_the_ledger_writes_ends_the_run_with_one_error_and_nothing_is_lost(
    server: Server, whole, folder
):
    """After half a line of step 3."""
    ended = server.start(folder, grpo(), "ledger:16:ENOSPC").wait()
    assert ended.status == 2, ended.output[-2000:]
    (told,) = errors(ended.output)
    assert "trainer.default_local_dir: the journal of the run cannot be written: No space left on device" in told
    assert "Make room" in told and "it continues from its last checkpoint" in told
    assert "Traceback" not in ended.output
    assert newest_step(folder) == 2
    finish(server, folder, grpo())
    assert_same_end(whole, folder)


def test_a_folder_that_cannot_be_written_is_an_error_before_anything_is_loaded(server: Server, folder):
    ended = server.start(folder, [*grpo(), "trainer.default_local_dir=/proc/run"]).wait()
    assert ended.status == 2, ended.output[-2000:]
    (told,) = errors(ended.output)
    assert "trainer.default_local_dir" in told and "/proc/run" in told
    assert "Traceback" not in ended.output


def test_a_flipped_bit_in_the_newest_checkpoint_is_named_and_the_one_before_is_used(server: Server, whole, folder):
    ended = server.start(folder, grpo(), "generation:18:KILL").wait()  # in step 4
    assert ended.status == -signal.SIGKILL and newest_step(folder) == 3
    damaged = folder / "run/global_step_3/actor/optimizer.safetensors"
    content = bytearray(damaged.read_bytes())
    content[-3] ^= 4
    damaged.write_bytes(content)

    named = ["trainer.resume_mode=resume_path", "trainer.resume_from_path=run/global_step_3"]
    ended = server.start(folder, grpo() + named).wait()
    assert ended.status == 2
    assert "the checksum of actor/optimizer.safetensors is wrong" in errors(ended.output)[0]

    ended = finish(server, folder, grpo())
    assert "global_step_3: the checksum of actor/optimizer.safetensors is wrong; it is not used" in ended.output
    assert "continues from" in ended.output and "global_step_2" in ended.output
    assert_same_end(whole, folder)


def test_a_checkpoint_that_kills_its_readers_is_passed_over(server: Server, whole, folder):
    ended = server.start(folder, grpo(), "generation:18:KILL").wait()  # in step 4
    assert ended.status == -signal.SIGKILL and newest_step(folder) == 3
    for _ in range(3):
        ended = server.start(folder, grpo(), "load:1:KILL").wait()
        assert ended.status == -signal.SIGKILL and newest_step(folder) == 3
    ended = finish(server, folder, grpo())
    assert "the last 3 processes that read it died" in ended.output
    assert "continues from" in ended.output and "global_step_2" in ended.output
    assert_same_end(whole, folder)


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        ("llama", {}, "the checkpoint holds another architecture. Got 'Qwen2ForCausalLM'. Allowed: LlamaForCausalLM"),
        ("qwen2", {"layers": 2}, "the checkpoint's weights do not fit this model"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused_by_name(server: Server, folder, family, change, message):
    finish(server, folder, grpo(1))
    shutil.rmtree(folder / "model")
    tiny_model_dir(folder / "model", family, **{"hidden": 16, "layers": 1, "heads": 2, "kv_heads": 1, **change})
    ended = server.start(folder, grpo(2)).wait()
    assert ended.status == 2, ended.output[-2000:]
    assert "differs from this one" in ended.output and "actor_rollout_ref.model.path" in ended.output
    ended = server.start(folder, [*grpo(2), "trainer.resume_changed=accept"]).wait()
    assert ended.status == 2, ended.output[-2000:]
    assert message in errors(ended.output)[0]
    assert newest_step(folder) == 1


def test_a_folder_with_upstreams_checkpoints_is_refused_with_what_to_do(server: Server, folder):
    shard = folder / "run/global_step_5/actor/model_world_size_8_rank_0.pt"
    shard.parent.mkdir(parents=True)
    shard.write_bytes(b"")
    ended = server.start(folder, grpo()).wait()
    assert ended.status == 2
    told = errors(ended.output)[0]
    assert "upstream's format" in told and "Merge it to a Hugging Face folder" in told


def test_a_second_run_in_the_same_folder_is_refused_while_the_first_one_lives(server: Server, folder):
    first = server.start(folder, grpo(), "generation:8:PAUSE")
    first.until_paused()
    shutil.copytree(folder, folder / "second", ignore=shutil.ignore_patterns("run", "paused"))
    second = server.start(folder / "second", [*grpo(), f"trainer.default_local_dir={folder}/run"]).wait()
    first.send(signal.SIGKILL)
    first.wait()
    assert second.status == 2
    told = errors(second.output)[0]
    assert "another run writes its checkpoints into this folder" in told and f'"pid": {first.pid}' in told
    third = finish(server, folder, grpo(2))
    assert "its holder ended without releasing it, so it is taken over" in third.output


@pytest.mark.parametrize("settings", [[], ["actor_rollout_ref.actor.checkpoint.async_save=true"]])
def test_a_slow_disk_delays_a_run_and_changes_nothing(server: Server, whole, folder, settings):
    ended = server.start(folder, grpo() + settings, "shard:1:SLOW").wait()
    assert ended.status == 0, ended.output[-2000:]
    slept = (folder / "slow").stat().st_size * SLOW_SECONDS
    assert slept > 1, f"{slept} s"
    assert_same_end(whole, folder)


def test_a_tracker_without_a_disk_is_told_once_and_training_goes_on(server: Server, folder):
    (folder / "logs").write_text("a file where the metrics' folder should be")
    ended = finish(server, folder, [*grpo(3), "trainer.logger=[console,file]"])
    assert ended.output.count("trainer.logger=file: failed and is off from now on") == 1
    assert newest_step(folder) == 3


def test_a_folder_of_samples_that_cannot_be_written_is_one_error_that_names_its_setting(server: Server, folder):
    (folder / "samples").write_text("a file where the folder of samples should be")
    ended = server.start(folder, grpo(3)).wait()
    assert ended.status == 2, ended.output[-2000:]
    (told,) = errors(ended.output)
    assert "trainer.rollout_data_dir" in told and "samples" in told
