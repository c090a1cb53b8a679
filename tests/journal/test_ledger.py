"""The ledger of a run: what is written survives, what is repeated is replaced, and what is lost is named."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from tests.harness.programs import python
from verl.errors import DataError
from verl.journal import ledger_reader
from verl.journal.account import ranges
from verl.journal.file import Journal, Position, entries_in, entry_line, parse_entry
from verl.journal.ledger import Ledger

A0, A1, B0, B1 = ("a", 0), ("a", 1), ("b", 0), ("b", 1)


def opened(folder: Path, step: int = 0, at: Position | None = None, waiting=()) -> tuple[Ledger, Journal]:
    journal = Journal(folder, step, "journal.jsonl" if step else None, at)
    book = Ledger(journal)
    journal.begin([book])
    book.resume(step, waiting)
    return book, journal


def run_of_two_steps(folder: Path) -> tuple[Ledger, Journal, Position]:
    """Step 1 trains on a#0, masks a#1, filters prompt b; step 2 has begun with prompt a of the next epoch.

    The position is that of the checkpoint of step 1.
    """
    book, journal = opened(folder)
    book.requested(1, 0, [A0, A1, B0, B1], rows=[7, 7, 9, 9])
    book.noted("sampled", 1, [A0, A1, B0, B1], turns=[1, 1, 1, 3], tokens=[5, 6, 7, 8], finish=["stop"] * 3 + ["abort"],
               newest_version=[0] * 4, oldest_version=[0] * 4)  # fmt: skip
    book.noted("scored", 1, [A0, A1, B0, B1], score=[0.5, float("nan"), 0.0, 0.0])
    book.dropped(1, "filtered_group", [B0, B1])
    book.noted("batch", 1, [A0, A1])
    book.trained(1, [A0], {"unscorable": [A1]})
    position = journal.position()
    book.end(1)
    book.requested(2, 1, [("a2", 0), ("a2", 1)])
    return book, journal, position


def test_a_question_about_a_step_a_prompt_and_a_reason_is_answered_from_the_file_of_a_run_that_goes_on(
    tmp_path, capsys
):
    _, journal, _ = run_of_two_steps(tmp_path)
    history = ledger_reader.History.of(journal.path)
    fates = {f"{one.uid}{one.sample}": history.fate(one) for one in history.samples}
    assert fates["a0"] == "trained in step 1, which made version 1"
    assert fates["a1"] == "dropped in step 1: unscorable, it could not be scored, so it was masked"
    assert fates["b1"].startswith("dropped in step 1: filtered_group, all answers to its prompt came out the same")
    assert fates["a20"] == "being sampled"
    assert [(one.row, one.facts["tokens"], one.facts["score"]) for one in history.samples[:3]] == [
        (7, 5, 0.5), (7, 6, None), (9, 7, 0.0)
    ]  # fmt: skip
    kept = ledger_reader.History.of(journal.path, ledger_reader.asked_for(None, "b", None))
    assert [(one.uid, one.sample) for one in kept.samples] == [("b", 0), ("b", 1)]
    assert len(kept.open) == 2, "of all others only those in flight are held"
    assert ledger_reader.main([str(tmp_path)]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in shown[1:6]] == [
        "sampled", "trained on", "dropped: filtered_group", "dropped: unscorable", "waiting: asked"
    ]  # fmt: skip
    assert [line.split()[2 if ":" in line or "on" in line.split() else 1] for line in shown[1:6]] == list("61212")
    for words, samples in (
        (["--step", "1"], 2),
        (["--uid", "b"], 2),
        (["--dropped"], 3),
        (["--dropped", "unscorable"], 1),
    ):
        assert ledger_reader.main([str(tmp_path), *words]) == 0
        assert capsys.readouterr().out.splitlines()[-1] == f"{samples} samples"
    for words, fault in (
        (["--step", "9"], "1 to 1"),
        (["--uid", "c"], "no such prompt"),
        (["--dropped", "stael"], "stale"),
    ):
        assert ledger_reader.main([str(tmp_path), *words]) == 2
        assert fault in capsys.readouterr().err


def test_the_account_balances_or_names_the_samples_that_are_lost_and_those_that_are_trained_twice(tmp_path):
    book, journal, _ = run_of_two_steps(tmp_path)
    waiting = [("a2", 0), ("a2", 1)]
    book.check(waiting)
    with pytest.raises(DataError, match=r"1 samples were lost: a2#1 \(of step 2, asked\)"):
        book.check(waiting[:1])
    book.trained(2, [A0, ("a2", 0)], {})
    with pytest.raises(DataError, match="a#0 was trained in step 2, and was not in flight then"):
        book.check(waiting[1:])
    assert "a#0 was trained in step 2" in ledger_reader.account_table(ledger_reader.History.of(journal.path))


def test_a_resumed_run_replaces_what_its_repeated_steps_had_written_and_what_its_checkpoint_does_not_hold(tmp_path):
    first, journal, position = run_of_two_steps(tmp_path)
    first.end(2)
    before = journal.path.read_text()
    with journal.path.open("a") as file:
        file.write('{"event":"asked","st')  # a kill amid a line
    again, journal = opened(tmp_path, 1, position)
    assert journal.path.read_text().startswith(before), "no line is changed"
    held = list(entries_in(journal.path))
    assert [one["event"] for one in held] == [
        "run", "asked", "sampled", "scored", "dropped", "batch", "dropped", "trained", "run", "end"
    ]  # fmt: skip
    assert {name: held[-2][name] for name in ("step", "after")} == {"step": 1, "after": 8}
    assert held[-1] == {"event": "end", "step": 1}
    again.requested(2, 1, [("a2", 0), ("a2", 1)])
    again.check([("a2", 0), ("a2", 1)])
    assert again.account.sampled == ledger_reader.History.of(journal.path).sampled == 6
    third, _ = opened(tmp_path, 1, position, [("late", 0)])
    third.check([("late", 0)])  # a checkpoint of a run that kept no ledger then


def test_a_run_that_resumes_from_what_another_process_had_left_behind_has_that_history(tmp_path):
    """Checkpoints 1 and 2; resumed from 1, and then from 2 of the first process."""
    first, journal, one = run_of_two_steps(tmp_path)
    first.trained(2, [("a2", 0)], {"unscorable": [("a2", 1)]})
    two = journal.position()
    other, _ = opened(tmp_path, 1, one)
    other.requested(2, 1, [("other", 0)])
    third, journal = opened(tmp_path, 2, two)
    third.check([])
    assert third.account.trained == 2 and third.account.sampled == 6
    steps = [(entry["event"], entry["step"]) for entry in entries_in(journal.path) if entry["event"] in ("run", "end")]
    assert steps == [("run", 0), ("end", 1), ("run", 2), ("end", 2)]
    assert sum(entry["event"] == "run" for entry in entries_in(journal.path, replaced=True)) == 3


def test_what_was_sampled_ahead_and_is_not_in_the_checkpoint_is_dropped_as_repeated(tmp_path):
    book, journal = opened(tmp_path)
    book.requested(1, 0, [A0])
    book.requested(2, 0, [B0, B1])  # during the update of step 1
    book.trained(1, [A0], {})
    again, journal = opened(tmp_path, 1, journal.position(), [B1])
    assert dict(again.account.dropped) == {"repeated": 1}
    again.requested(2, 0, [B0])
    again.trained(2, [B0, B1], {})
    again.check([])
    attempts = {(s.uid, s.sample, s.facts["attempt"]): s.stage for s in ledger_reader.History.of(journal.path).samples}
    assert attempts[("b", 0, 1)] == "dropped" and attempts[("b", 0, 2)] == "trained"


@pytest.mark.parametrize(
    "fault", ["cut short", "flipped", "of another run", "contradicts itself", "of an earlier release", "gone"]
)
def test_a_journal_that_does_not_reach_the_checkpoint_is_left_as_it_is_and_the_account_begins_anew(
    tmp_path, caplog, fault
):
    _, journal, position = run_of_two_steps(tmp_path)
    lines = journal.path.read_bytes().splitlines(keepends=True)
    changed = {
        "cut short": lines[:4],
        "flipped": [lines[0], lines[1].replace(b'"each":2', b'"each":3'), *lines[2:]],
        "of another run": [*lines[: position.entries - 1], entry_line({"event": "end", "step": 1}), *lines[8:]],
        "contradicts itself": [*lines[:3], entry_line({"event": "scored", "step": 1, "ids": [[99, 1]]}), *lines[4:]],
    }.get(fault, lines)
    journal.path.write_bytes(b"".join(changed))
    if fault == "gone":
        journal.path.unlink()
    again, journal = opened(tmp_path, 1, None if fault == "of an earlier release" else position, [A0])
    assert "does not reach the checkpoint of step 1" in caplog.text
    assert stat.S_IMODE(journal.path.stat().st_mode) == 0o600
    if fault != "gone":
        assert journal.path.read_bytes().startswith(b"".join(changed))
    again.trained(2, [A0], {})
    again.check([])
    history = ledger_reader.History.of(journal.path)
    assert (history.sampled, history.trained, history.faults) == (1, 1, [])


def test_a_journal_of_a_later_release_is_refused(tmp_path):
    (tmp_path / "journal.jsonl").write_bytes(entry_line({"event": "run", "format": 4, "step": 0, "after": 0}))
    assert ledger_reader.main([str(tmp_path)]) == 2
    with pytest.raises(DataError, match=r"a later release wrote .*journal.jsonl, in the format 4\. Allowed: up to 3"):
        ledger_reader.History.of(tmp_path / "journal.jsonl")


def test_the_files_of_earlier_releases_are_read(tmp_path):
    lines = [b'{"event":"run","format":1,"step":0}\n', entry_line({"event": "asked", "step": 1, "first": 0,
             "uid": ["a"], "each": 1}), b'{"event":"run","format":1,"step":1}\n']  # fmt: skip
    (tmp_path / "ledger.jsonl").write_bytes(b"".join(lines))
    assert ledger_reader.History.of(ledger_reader.ledger_in(tmp_path)).sampled == 1


def test_a_disk_that_is_full_is_one_error_that_says_what_to_do(tmp_path):
    code = """if True:
        import resource, sys
        from pathlib import Path
        from verl.errors import DataError
        from verl.journal.file import Journal
        from verl.journal.ledger import Ledger
        journal = Journal(Path(sys.argv[1]))
        journal.begin()
        book = Ledger(journal)
        resource.setrlimit(resource.RLIMIT_FSIZE, (240, 240))
        try:
            book.requested(1, 0, [("a", k) for k in range(4)], rows=list(range(1000, 1004)))
            book.noted("scored", 1, [("a", k) for k in range(4)], score=[k / 7 for k in range(4)])
        except DataError as error:
            print(error)
    """
    ended = python("-c", code, str(tmp_path))
    assert ended.stdout.count("the journal of the run cannot be written: File too large") == 1
    assert "continues from its last checkpoint" in ended.stdout
    assert ledger_reader.History.of(tmp_path / "journal.jsonl").sampled == 4, "what was written before stays readable"


def test_numbers_that_follow_each_other_are_one_range():
    assert ranges([3, 4, 5, 9, 8]) == [[3, 3], [9, 1], [8, 1]]


def test_what_rows_and_loops_say_stays_within_its_cell(tmp_path, capsys):
    book, _ = opened(tmp_path)
    name = "x\x1b[2J\nsampled  9"
    book.requested(1, 0, [(name, 0)])
    book.noted("sampled", 1, [(name, 0)], finish=["abort"], error=["told\nfault: none\x9b"])
    book.trained(1, [], {"failed_loop": [(name, 0)]})
    book.trained(1, [(name, 0)], {})
    for words in ([], ["--dropped"]):
        assert ledger_reader.main([str(tmp_path), *words]) == 0
        shown = capsys.readouterr().out
        assert "\\x1b[2J\\nsampled  9" in shown and not set("\x1b\x9b") & set(shown)
        assert not any(line.startswith(("sampled  9", "fault: none")) for line in shown.splitlines())


@pytest.mark.parametrize("each", ["1000000000000", "-1", '"x"'])
def test_a_line_that_asks_for_more_than_a_run_does_is_refused(tmp_path, each):
    (tmp_path / "journal.jsonl").write_text(f'{{"event":"asked","step":1,"first":0,"uid":["a"],"each":{each}}}\n')
    with pytest.raises(DataError, match=r"entry 1 does not follow from those before it.*journal\.jsonl"):
        ledger_reader.History.of(tmp_path / "journal.jsonl")


def test_a_line_of_which_a_byte_changed_is_refused(tmp_path):
    """Each byte of the entry and of its checksum in turn; 2 answers to a prompt would balance as well as 1."""
    line = entry_line({"event": "asked", "step": 1, "first": 0, "uid": ["a"], "each": 1})
    assert parse_entry(line) == {"event": "asked", "step": 1, "first": 0, "uid": ["a"], "each": 1}
    marker = line.index(b',"crc":"')
    places = [at for at in range(len(line) - 3) if not marker <= at < marker + 8]
    changed = [line[:at] + bytes([line[at] ^ 1]) + line[at + 1 :] for at in places]
    assert [parse_entry(other) for other in changed] == [None] * len(changed)
    (tmp_path / "journal.jsonl").write_bytes(line + line.replace(b'each":1', b'each":2'))
    with pytest.raises(DataError, match=r"line 2 is not an entry of a journal.*journal\.jsonl"):
        ledger_reader.History.of(tmp_path / "journal.jsonl")


def test_a_line_of_an_earlier_release_has_no_checksum():
    assert parse_entry(b'{"event":"end","step":3}\n') == {"event": "end", "step": 3}
