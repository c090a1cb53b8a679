"""The checkpoint with the best validation is named in a file, and retention leaves it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.checkpoint.builders import assert_holds, save
from verl.checkpoint import BestCheckpoint, CheckpointWriter, check_metric
from verl.checkpoint.best import FILE
from verl.errors import CheckpointError, ConfigError
from verl.json_text import read_json
from verl.metrics import notices, reset_notices

NAME = "val-core/sums/acc/mean@1"


def settings(root: Path, mode: str = "max", name: str | None = NAME) -> SimpleNamespace:
    return SimpleNamespace(default_local_dir=str(root), best_metric=name, best_mode=mode)


def saved(root: Path, values: dict[int, float], mode: str = "max") -> list[int]:
    """The steps that are left after saves that were validated with these values, one checkpoint kept."""
    best = BestCheckpoint.of(settings(root, mode))
    with CheckpointWriter(root, keep={"actor": 1}, best=best) as writer:
        for step, value in values.items():
            assert best is not None
            best.offer(step, {NAME: value})
            save(writer, step)
    return sorted(int(folder.name.split("_")[-1]) for folder in root.glob("global_step_*"))


def named(root: Path) -> int:
    return read_json((root / FILE).read_text())["global_step"]


def test_the_best_one_stays_next_to_the_newest(tmp_path):
    assert saved(tmp_path, {1: 0.2, 2: 0.9, 3: 0.5, 4: 0.7}) == [2, 4] and named(tmp_path) == 2
    assert_holds(tmp_path / "global_step_2", 2)


def test_a_restart_compares_with_what_was_saved_before(tmp_path):
    assert saved(tmp_path, {1: 0.9, 2: 0.5}) == [1, 2]
    assert saved(tmp_path, {3: 0.6}) == [1, 3]
    assert saved(tmp_path, {4: 0.95}) == [4] and named(tmp_path) == 4


def test_a_smaller_value_is_better_where_the_mode_says_min(tmp_path):
    assert saved(tmp_path, {1: 2.0, 2: 1.0, 3: 1.5}, "min") == [2, 3] and named(tmp_path) == 2


def test_of_equal_values_the_earlier_step_stays(tmp_path):
    assert saved(tmp_path, {1: 0.5, 2: 0.5}) == [1, 2] and named(tmp_path) == 1


def test_a_value_of_a_checkpoint_that_never_came_is_forgotten(tmp_path):
    """The run is killed between the comparison and the rename, and the next one validates differently."""
    saved(tmp_path, {1: 0.7})
    best = BestCheckpoint.of(settings(tmp_path))
    best.offer(2, {NAME: 0.9})
    assert BestCheckpoint.of(settings(tmp_path)).holds(tmp_path / "global_step_1")
    assert saved(tmp_path, {3: 0.6}) == [1, 3] and named(tmp_path) == 1


def test_whatever_moment_a_kill_takes_the_named_step_is_in_place(tmp_path):
    """At every point of three saves; the second of them is better, and retention then deletes the first."""
    best = BestCheckpoint.of(settings(tmp_path))
    assert best is not None
    seen: list[tuple[str, int | None, bool]] = []

    def look(point: str) -> None:
        step = read_json((tmp_path / FILE).read_text())["global_step"]
        seen.append((point, step, step is None or (tmp_path / f"global_step_{step}" / "manifest.json").is_file()))

    with CheckpointWriter(tmp_path, keep={"actor": 1}, best=best, point=look) as writer:
        for step, value in {1: 0.5, 2: 0.9, 3: 0.7}.items():
            best.offer(step, {NAME: value})
            save(writer, step)
    assert all(there for _, _, there in seen), seen
    assert list(dict.fromkeys(step for _, step, _ in seen)) == [None, 1, 2]


class Killed(BaseException):
    """In place of a signal."""


def test_a_resume_names_the_checkpoint_that_a_kill_left_unnamed(tmp_path, monkeypatch):
    saved(tmp_path, {1: 0.5})
    best = BestCheckpoint.of(settings(tmp_path))

    def kill() -> None:
        raise Killed

    assert best is not None
    monkeypatch.setattr(best, "published", kill)
    writer = CheckpointWriter(tmp_path, best=best)
    best.offer(2, {NAME: 0.9})
    with pytest.raises(Killed):
        save(writer, 2)
    writer.lock.release()
    assert named(tmp_path) == 1 and (tmp_path / "global_step_2").is_dir()
    CheckpointWriter(tmp_path, best=BestCheckpoint.of(settings(tmp_path))).close()
    assert named(tmp_path) == 2


@pytest.mark.parametrize("point", ["replaced", "published"])
def test_a_step_that_is_saved_again_never_has_the_value_of_another_save(tmp_path, point):
    """The run is killed before or after the new folder of step 1 is in place."""
    saved(tmp_path, {1: 0.4})
    best = BestCheckpoint.of(settings(tmp_path))
    passed: list[tuple[str, dict[str, float]]] = []

    def look(name: str) -> None:
        passed.append((name, read_json((tmp_path / FILE).read_text())["values"]))
        if name == point:
            raise Killed

    assert best is not None
    writer = CheckpointWriter(tmp_path, best=best, point=look)
    best.offer(1, {NAME: 0.9})
    with pytest.raises(Killed):
        save(writer, 1)
    writer.lock.release()
    assert passed[-1] == (point, {}), "neither 0.4 nor 0.9 is known to be of the folder"
    with CheckpointWriter(tmp_path, best=BestCheckpoint.of(settings(tmp_path))):
        assert (tmp_path / "global_step_1/manifest.json").is_file()


def test_a_step_that_is_saved_again_gets_its_new_value(tmp_path):
    saved(tmp_path, {1: 0.9, 2: 0.5})
    assert saved(tmp_path, {1: 0.3}) == [1, 2] and named(tmp_path) == 2


def test_nan_and_a_step_without_validation_are_not_compared(tmp_path):
    reset_notices()
    assert saved(tmp_path, {1: 0.1, 2: float("nan"), 3: float("inf")}) == [1, 3]
    assert "is nan at step 2, which is never the best" in notices()["trainer.best_metric"]
    BestCheckpoint.of(settings(tmp_path)).offer(4, {"other": 1.0})
    assert named(tmp_path) == 1


def test_a_step_that_is_saved_again_without_a_value_has_none(tmp_path):
    saved(tmp_path, {1: 0.5, 2: 0.9})
    best = BestCheckpoint.of(settings(tmp_path))
    best.offer(2, {NAME: float("nan")})
    assert 2 not in best.values and best.step is None, "step 1 was deleted as the older one"


def test_a_full_disk_under_the_file_is_a_notice(tmp_path):
    reset_notices()
    (tmp_path / FILE).mkdir()
    best = BestCheckpoint.of(settings(tmp_path))
    best.offer(1, {NAME: 0.5})
    assert "could not be written" in notices()["trainer.best_metric"] and best.values == {1: 0.5}


def test_another_metric_starts_again_with_a_notice(tmp_path):
    saved(tmp_path, {1: 0.9})
    reset_notices()
    assert BestCheckpoint.of(settings(tmp_path, "min")).step is None
    assert f"compared {NAME} (max); it starts again" in notices()["trainer.best_metric"]


@pytest.mark.parametrize("text", ["{", "[]", '{"values": 3}', '{"values": {"a": 1}, "metric": "m", "mode": "max"}'])
def test_a_file_that_is_damaged_is_an_error_that_names_it(tmp_path, text):
    (tmp_path / FILE).write_text(text)
    with pytest.raises(CheckpointError, match=f"best_metric: this file cannot be read.*{FILE}.*Delete it"):
        BestCheckpoint.of(settings(tmp_path))


def test_a_metric_that_no_validation_measures_is_refused(tmp_path):
    measured = {NAME: 0.5, "val-aux/num_turns/mean": 2.0}
    check_metric(settings(tmp_path), measured)
    check_metric(settings(tmp_path, name=None), measured)
    with pytest.raises(ConfigError, match=r"no such metric.*Did you mean 'val-core/sums/acc/mean@1'"):
        check_metric(settings(tmp_path, name="val-core/sums/acc/mean@4"), measured)
