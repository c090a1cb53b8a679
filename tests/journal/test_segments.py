"""A journal in segments: read as one, bounded, with all that a resumed run needs, and refused where one is wrong."""

from __future__ import annotations

import shutil
import stat
import tracemalloc
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.harness.programs import python
from verl.errors import DataError, ReplayError
from verl.journal import file, gantt, ledger_reader
from verl.journal.file import NAME, Follower, Journal, Position, entries_in, entry_line, segments_of
from verl.journal.ledger import Ledger
from verl.journal.schedule import ScheduleRecord, Script
from verl.journal.spans import read_spans
from verl.metrics import notices, reset_notices

SECOND = "journal.0002.jsonl"


@dataclass
class Steps:
    """A process of a run that writes everything that a journal holds.

    Args:
        folder: of the run.
        step, at: as those of `Journal`.
    """

    folder: Path
    step: int = 0
    at: Position | None = None

    def __post_init__(self) -> None:
        self.journal = Journal(self.folder, self.step, NAME if self.step else None, self.at)
        self.ledger, self.record = Ledger(self.journal), ScheduleRecord(self.journal)
        self.journal.begin([self.ledger, self.record], settings={"seed": 1}, content={}, processes={}, beside=False)
        self.ledger.resume(self.step, [(f"p{self.step + 1}", 0)] if self.step else [])

    def write(self, step: int) -> Position:
        """A step, which asks for the samples of the next one, and the place of its checkpoint."""
        keys, ahead = [(f"p{step}", 0), (f"p{step}", 1)], (f"p{step + 1}", 0)
        self.record.weights(step)
        self.ledger.requested(step, 0, keys[1:] if step > 1 else keys)
        self.ledger.noted("scored", step, keys, score=[step / 7, step / 3])
        self.record.add("take", groups=[step])
        self.ledger.noted("batch", step, keys)
        self.ledger.requested(step + 1, 0, [ahead])
        self.ledger.trained(step, keys[:1], {"unscorable": keys[1:]})
        times = {"thread": "main", "begin": float(step), "end": step + 0.75}
        self.journal.write(*({"event": "span", "step": step, "stage": stage, **times} for stage in ("step", "gen")))
        position = self.journal.position(self.record.count)
        self.ledger.end(step)
        return position


@pytest.fixture(autouse=True)
def fresh_notices():
    reset_notices()
    yield
    reset_notices()


@pytest.fixture
def small(monkeypatch):
    """A segment per step in a journal without a bound."""
    monkeypatch.setattr(file, "SEGMENT_BYTES", 1)


def many(folder: Path, steps: int = 4) -> list[Position]:
    """A run with a segment for each of its steps, the last of which has only its beginning."""
    run, positions = Steps(folder), []
    for step in range(1, steps + 1):
        positions.append(run.write(step))
        run.journal.rotate(step)
    run.journal.close()
    return positions


def events(folder: Path) -> list:
    return [entry for entry in entries_in(folder / NAME) if entry["event"] != "run"]


def shown(main, capsys, *words: str) -> str:
    assert main([*words]) == 0
    return capsys.readouterr().out


def test_a_journal_in_many_segments_reads_as_one(tmp_path, capsys, small):
    many(tmp_path / "many")
    one = Steps(tmp_path / "one")
    for step in range(1, 5):
        one.write(step)
    segments = segments_of(tmp_path / "many" / NAME)
    assert sorted(segments) == [1, 2, 3, 4, 5] and segments[5].name == "journal.0005.jsonl"
    assert {stat.S_IMODE(place.stat().st_mode) for place in segments.values()} == {0o600}
    assert events(tmp_path / "many") == events(tmp_path / "one")
    scripts = [Script.read(tmp_path / name) for name in ("many", "one")]
    assert scripts[0].decisions == scripts[1].decisions and scripts[0].about == scripts[1].about
    assert read_spans(tmp_path / "many") == read_spans(tmp_path / "one")
    for main, *words in (
        (ledger_reader.main,), (ledger_reader.main, "--step", "2"), (ledger_reader.main, "--uid", "p3"),
        (ledger_reader.main, "--dropped"), (gantt.main,), (gantt.main, "--steps", "2-3"),
    ):  # fmt: skip
        texts = {shown(main, capsys, str(tmp_path / name), *words) for name in ("many", "one")}
        assert len(texts) == 1, words
    pictures = [gantt.draw_gantt(read_spans(tmp_path / name), "one title") for name in ("many", "one")]
    assert pictures[0] == pictures[1] and notices() == {}
    of_segment = shown(ledger_reader.main, capsys, str(segments[3]))
    assert of_segment == shown(ledger_reader.main, capsys, str(tmp_path / "one")), "a segment names its journal"


def test_the_segments_of_each_run_in_a_folder_are_numbered_from_two(tmp_path, small):
    many(tmp_path, 2)
    positions = many(tmp_path, 3)
    assert [place.name for place in segments_of(tmp_path / "journal-2.jsonl").values()] == [
        "journal-2.jsonl", "journal-2.0002.jsonl", "journal-2.0003.jsonl", "journal-2.0004.jsonl"
    ]  # fmt: skip
    assert list(segments_of(tmp_path / NAME)) == [1, 2, 3]
    assert ledger_reader.History.of(ledger_reader.ledger_in(tmp_path)).trained == 3, "of the newest run"
    (tmp_path / "journal-2.0002.jsonl").unlink()
    assert Journal(tmp_path, 3, "journal-2.jsonl", positions[2]).path.name == "journal-3.jsonl"


def test_a_segment_ends_with_the_step_that_fills_it_to_the_byte(tmp_path, monkeypatch):
    run = Steps(tmp_path)
    run.write(1)
    size = run.journal.path.stat().st_size
    for limit, count in ((size + 1, 1), (size, 2)):
        monkeypatch.setattr(file, "SEGMENT_BYTES", limit)
        run.journal.rotate(1)
        assert len(segments_of(run.journal.path)) == count
    run.journal.rotate(1)
    assert len(segments_of(run.journal.path)) == 2, "a new segment is not full"


def test_a_journal_is_read_while_its_run_begins_further_segments(tmp_path, small):
    run = Steps(tmp_path)
    run.write(1)
    run.journal.rotate(1)
    run.write(2)
    reading = file._stream(run.journal.path)
    lines = [next(reading)[1] for _ in range(3)]
    run.journal.rotate(2)
    run.write(3)
    lines += [line for _, line in reading]
    kept = segments_of(run.journal.path).values()
    there = [line for place in kept for line in place.read_bytes().splitlines(keepends=True) if b'"next"' not in line]
    assert lines == there


KILLED = """if True:
    import os, signal, sys
    from pathlib import Path
    from tests.journal.test_segments import Steps
    from verl.journal import file

    LIMIT = int(sys.argv[2])

    def scenario(folder, last):
        done = 0

        def hit(*_):
            nonlocal done
            done += 1
            if done == last:
                os.kill(os.getpid(), signal.SIGKILL)

        def before(owner, name):
            original = getattr(owner, name)
            setattr(owner, name, lambda *args, **more: (hit(), original(*args, **more))[1])

        run = Steps(folder)
        before(os, "fsync")
        before(file, "FileIO")
        before(file, "_write")
        for name in ("replace", "unlink"):
            before(Path, name)
        for step in (1, 2, 3, 4, 5):
            position = run.write(step)
            (folder / "written").write_text(f"{step} {position.entries} {position.check} {position.decisions}")
            run.journal.rotate(step, position, LIMIT)

    killed = -9
    number = 0
    while killed == -9:
        number += 1
        folder = Path(sys.argv[1], str(number))
        folder.mkdir()
        child = os.fork()
        if not child:
            scenario(folder, number)
            os._exit(0)
        killed = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print(number - 1, killed)
"""


@pytest.mark.parametrize("limit", [1 << 14, 1 << 12], ids=["rotated", "with segments dropped"])
def test_a_kill_before_any_operation_of_a_rotation_loses_no_entry(tmp_path, limit):
    """SIGKILL before each open, write, fsync, rename and removal of five steps, and a resume after each."""
    count, status = map(int, python("-c", KILLED, str(tmp_path), str(limit)).stdout.split())
    assert status == 0 and count > 60
    for number in range(1, count + 1):
        folder = tmp_path / str(number)
        if not (folder / "written").exists():
            continue
        reset_notices()
        step, entries, check, decisions = (folder / "written").read_text().split()
        assert {"event": "end", "step": int(step)} in list(entries_in(folder / NAME))
        again = Steps(folder, int(step), Position(int(entries), check, int(decisions)))
        assert f"{NAME}" not in notices(), f"killed before operation {number}: {notices()}"
        for later in (int(step) + 1, int(step) + 2):
            again.write(later)
            again.journal.rotate(later, limit=limit)
        again.ledger.check([(f"p{int(step) + 3}", 0)])
        account = ledger_reader.History.of(folder / NAME)
        assert (account.trained, account.last_step, account.faults) == (int(step) + 2, int(step) + 2, [])
        assert not list(folder.glob("*.new")), "what a kill left is used up by the next rotation"


@pytest.mark.parametrize(
    ("fault", "message", "named"),
    [
        ("missing", "a segment of the journal is missing", 3),
        ("the last one is missing", "a segment of the journal is missing", 5),
        ("cut short", "does not follow from the one before it", 4),
        ("cut amid a line", "does not follow from the one before it", 4),
        ("empty", "the first line of a segment is damaged", 3),
        ("its first line is flipped", "the first line of a segment is damaged", 3),
        ("its name of the next one is flipped", "the line that names the next segment is damaged", 3),
        ("of another run", "does not follow from the one before it", 3),
        ("flipped", "line 4 is not an entry of a journal", 3),
    ],
)
def test_a_wrong_segment_is_named_and_left_as_it_is_by_a_resumed_run(tmp_path, small, capsys, fault, message, named):
    """The third of five segments, which the checkpoint of step 4 is behind."""
    folder = tmp_path / "run"
    positions = many(folder)
    segments = segments_of(folder / NAME)
    third, lines = segments[3], segments[3].read_bytes().splitlines(keepends=True)
    other = Steps(tmp_path / "other")
    other.ledger.requested(9, 9, [("x", 0)])
    for step in (1, 2, 3):
        other.write(step)
        other.journal.rotate(step)
    flipped = {n: [*lines[:n], lines[n].replace(b":", b";", 1), *lines[n + 1 :]] for n in (0, 3)}
    flipped[-1] = [*lines[:-1], lines[-1].replace(b'"segment":4', b'"segment":5')]
    content = {
        "cut short": lines[:-2], "cut amid a line": [*lines[:-2], lines[-2][:20]], "empty": [],
        "its first line is flipped": flipped[0], "its name of the next one is flipped": flipped[-1],
        "flipped": flipped[3], "of another run": [segments_of(other.journal.path)[3].read_bytes()],
    }.get(fault, lines)  # fmt: skip
    third.write_bytes(b"".join(content))
    if "missing" in fault:
        segments[named].unlink()
    before = {place: place.read_bytes() for place in segments.values() if place.exists()}
    for main in (ledger_reader.main, gantt.main):
        assert main([str(folder)]) == 2
        said = capsys.readouterr().err
        assert message in said and segments[named].name in said
    again = Steps(folder, 4, positions[3])
    assert "does not reach the checkpoint of step 4" in notices()[NAME]
    again.write(5)
    again.ledger.check([("p6", 0)])
    after = {place: place.read_bytes() for place in before}
    assert all(after[place].startswith(before[place]) for place in before), "no line is changed"
    newest = ledger_reader.History.of(ledger_reader.ledger_in(folder))
    assert (newest.sampled, newest.trained, newest.faults) == (3, 1, [])


def test_a_segment_of_a_later_release_is_refused(tmp_path, small, capsys):
    positions = many(tmp_path, 2)
    second = tmp_path / SECOND
    first, *lines = second.read_bytes().splitlines(keepends=True)
    second.write_bytes(b"".join([entry_line({**file.parse_entry(first), "format": 4}), *lines]))
    assert ledger_reader.main([str(tmp_path)]) == 2
    assert f"a later release wrote {second}, in the format 4" in capsys.readouterr().err
    with pytest.raises(DataError, match="a later release wrote"):
        Steps(tmp_path, 2, positions[1])


def bounded(folder: Path, steps: int, limit: int, saved: range = range(1, 1000)) -> tuple[list[Position], list[int]]:
    """A run with checkpoints after some steps; the places of all steps, and the bytes of all segments."""
    run, positions, sizes, newest = Steps(folder), [], [], None
    for step in range(1, steps + 1):
        positions.append(run.write(step))
        newest = positions[-1] if step in saved else newest
        run.journal.rotate(step, newest, limit)
        sizes.append(sum(place.stat().st_size for place in segments_of(run.journal.path).values()))
    run.journal.close()
    return positions, sizes


def test_a_bounded_journal_says_after_which_step_it_begins(tmp_path, capsys):
    limit, steps = 1 << 15, 60
    positions, sizes = bounded(tmp_path / "run", steps, limit)
    unbounded = Steps(tmp_path / "unbounded")
    for step in range(1, steps + 1):
        unbounded.write(step)
    assert max(sizes) <= limit < unbounded.journal.path.stat().st_size and sizes[-1] > limit * 3 / 4
    assert notices() == {}
    segments = segments_of(tmp_path / "run" / NAME)
    oldest = min(segment for segment in segments if segment > 1)
    assert oldest > 2 and segments[1].stat().st_size < 100, "the first file only names the oldest one"
    assert stat.S_IMODE(segments[1].stat().st_mode) == 0o600
    begin = file._head_of(segments[oldest])["step"]
    account, total = (shown(ledger_reader.main, capsys, str(tmp_path / name)) for name in ("run", "unbounded"))
    assert account == total, "the totals are those of the run"
    assert f"has the steps after {begin} and the totals until there" in notices()[f"{NAME}, first steps"]
    for step in (begin + 2, steps):
        rows = [
            shown(ledger_reader.main, capsys, str(tmp_path / name), "--step", str(step))
            for name in ("run", "unbounded")
        ]
        assert rows[0].split() == rows[1].split()
    assert ledger_reader.main([str(tmp_path / "run"), "--step", str(begin)]) == 2
    assert f"Allowed: {begin + 1} to {steps}" in capsys.readouterr().err
    spans = read_spans(tmp_path / "run")
    assert spans == [one for one in read_spans(tmp_path / "unbounded") if one.step > begin]
    script, complete = Script.read(tmp_path / "run"), Script.read(tmp_path / "unbounded")
    with pytest.raises(ReplayError, match=rf"speaks of the steps after {begin}.*trainer.journal_max_bytes"):
        script.begin(0)
    with pytest.raises(ReplayError, match="the decisions before were dropped"):
        script.begin(positions[begin - 2].decisions)
    script.begin(positions[begin].decisions)
    assert script.decisions[script.at :] == complete.decisions[script.at :] and len(script.decisions) == 2 * steps
    assert script.about["settings"] == {"seed": 1}


def test_a_run_resumes_with_all_totals_unless_its_place_is_dropped(tmp_path):
    positions, _ = bounded(tmp_path, 60, 1 << 15)
    shutil.copytree(tmp_path, tmp_path / "early")
    again = Steps(tmp_path, 59, positions[58])
    assert NAME not in notices() and again.record.count == positions[58].decisions == 2 * 59
    again.write(60)
    again.ledger.check([("p61", 0)])
    assert again.ledger.account.trained == 60
    once_more = Steps(tmp_path, 60, again.journal.position(again.record.count))
    assert once_more.ledger.account.trained == 60
    reset_notices()
    early = Steps(tmp_path / "early", 3, positions[2])
    assert "does not reach the checkpoint of step 3" in notices()[NAME]
    early.write(4)
    early.ledger.check([("p5", 0)])
    assert ledger_reader.History.of(early.journal.path).trained == 1


def test_what_a_resumed_run_needs_is_kept_beyond_the_bound(tmp_path):
    limit = 1 << 14
    positions, sizes = bounded(tmp_path, 60, limit, saved=range(1, 100, 49))
    assert max(sizes) > 2 * limit and max(sizes[55:]) <= limit, "dropped once a checkpoint is there"
    assert "exceeds the bound: a resumed run needs" in notices()["trainer.journal_max_bytes"]
    reset_notices()
    again = Steps(tmp_path, 50, positions[49])
    assert NAME not in notices() and again.ledger.account.trained == 50


def test_a_replaced_history_stays_replaced_after_a_drop(tmp_path):
    """Killed after step 9, resumed from step 3: what holds of the segments in between is nothing."""
    limit = 1 << 14
    positions, _ = bounded(tmp_path, 9, 1 << 20)
    again, newest = Steps(tmp_path, 3, positions[2]), positions[2]
    for step in range(4, 13):
        newest = again.write(step)
        again.journal.rotate(step, newest, limit)
        account = ledger_reader.History.of(tmp_path / NAME)
        assert (account.sampled, account.trained, account.faults) == (2 * step + 1, step, [])
        assert Script.read(tmp_path).decisions[-1]["t"] == 2 * step - 1
    assert len(segments_of(tmp_path / NAME)) < 12


def test_a_full_disk_leaves_the_segment_in_use_and_ends_the_run(tmp_path):
    code = """if True:
        import resource, sys
        from pathlib import Path
        from tests.journal.test_segments import Steps
        from verl.errors import DataError
        from verl.journal import file
        run = Steps(Path(sys.argv[1]))
        run.write(1)
        file.SEGMENT_BYTES = 1
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
        run.journal.rotate(1)
        try:
            run.write(2)
        except DataError as error:
            print(error)
    """
    ended = python("-c", code, str(tmp_path))
    assert (
        "trainer.journal_max_bytes" in ended.stderr and "cannot be rotated: [Errno 27] File too large" in ended.stderr
    )
    assert ended.stdout.count("the journal of the run cannot be written: File too large") == 1
    assert "continues from its last checkpoint" in ended.stdout
    assert list(segments_of(tmp_path / NAME)) == [1]
    assert ledger_reader.History.of(tmp_path / NAME).trained == 1


def test_a_journal_of_a_release_with_one_file_goes_on_in_segments(tmp_path, small):
    """The checkpoint's place is in a file of format 2, whose entries ``run`` have no state."""
    run = Steps(tmp_path)
    position = run.write(1)
    first, *lines = run.journal.path.read_bytes().splitlines(keepends=True)
    run.journal.path.write_bytes(b"".join([entry_line({**file.parse_entry(first), "format": 2}), *lines]))
    again = Steps(tmp_path, 1, position)
    assert notices() == {}
    again.journal.rotate(1)
    again.write(2)
    account = ledger_reader.History.of(tmp_path / NAME)
    assert (account.trained, account.faults, len(segments_of(tmp_path / NAME))) == (2, [], 2)


def test_the_memory_of_a_reader_does_not_grow_with_the_journal(tmp_path, monkeypatch):
    """40 MB in segments of 2 MB are read with less than 2 MB."""
    monkeypatch.setattr(file, "SEGMENT_BYTES", 1 << 21)
    run = Steps(tmp_path)
    run.write(1)
    for step in range(2, 2002):
        run.journal.write(
            {"event": "note", "step": step, "ids": [], "text": "x" * 20000}, {"event": "end", "step": step}
        )
        run.journal.rotate(step)
    assert len(segments_of(run.journal.path)) > 15
    tracemalloc.start()
    try:
        assert sum(entry["event"] == "note" for entry in entries_in(run.journal.path)) == 2000
        assert tracemalloc.get_traced_memory()[1] < 1 << 21
    finally:
        tracemalloc.stop()


def test_segments_that_another_journal_left_are_not_read_as_ones_of_a_new_one(tmp_path, small):
    first = Steps(tmp_path)
    for step in (1, 2):
        position = first.write(step)
        first.journal.rotate(step, position)
    first.journal.close()
    assert (tmp_path / SECOND).exists()
    (tmp_path / NAME).unlink()
    second = Steps(tmp_path)
    second.write(1)
    second.journal.close()
    assert second.journal.path.name == "journal-2.jsonl"
    assert len(list(entries_in(second.journal.path))) > 5


def test_a_file_system_that_cannot_sync_a_folder_still_rotates(tmp_path, small, monkeypatch):
    real = file.os.open

    def refuse_folders(path, flags, *mode, **more):
        if Path(path) == tmp_path:
            raise OSError(22, "Invalid argument")
        return real(path, flags, *mode, **more)

    run = Steps(tmp_path)
    position = run.write(1)
    monkeypatch.setattr(file.os, "open", refuse_folders)
    run.journal.rotate(1, position)
    run.write(2)
    monkeypatch.undo()
    run.journal.close()
    assert (tmp_path / SECOND).exists() and not notices()
    assert [entry["step"] for entry in entries_in(run.journal.path) if entry["event"] == "trained"] == [1, 2]


def test_a_follower_reads_each_entry_of_a_growing_journal_once(tmp_path, small):
    run, follower, taken = Steps(tmp_path), Follower(tmp_path / NAME), []
    for step in range(1, 5):
        run.write(step)
        begins, entries = follower.fresh()
        taken = [] if begins else taken
        assert begins == (step == 1)
        taken += entries
        assert [*follower.fresh()[1]] == []
        run.journal.rotate(step)
    taken += follower.fresh()[1]
    assert taken == list(entries_in(tmp_path / NAME))


def test_a_follower_begins_again_where_a_resumed_run_replaced_entries(tmp_path, small):
    positions, follower = many(tmp_path), Follower(tmp_path / NAME)
    assert len(list(follower.fresh()[1])) == len(list(entries_in(tmp_path / NAME)))
    again = Steps(tmp_path, 2, positions[1])
    again.write(3)
    begins, entries = follower.fresh()
    assert begins and list(entries) == list(entries_in(tmp_path / NAME))
    again.write(4)
    begins, entries = follower.fresh()
    assert not begins and 4 in {entry.get("step") for entry in entries}


def test_a_follower_waits_for_the_end_of_a_line(tmp_path):
    Steps(tmp_path).write(1)
    follower = Follower(tmp_path / NAME)
    list(follower.fresh()[1])
    line = entry_line({"event": "end", "step": 1})
    with (tmp_path / NAME).open("ab") as journal:
        journal.write(line[:9])
        journal.flush()
        assert list(follower.fresh()[1]) == []
        journal.write(line[9:])
    assert [entry["event"] for entry in follower.fresh()[1]] == ["end"]
