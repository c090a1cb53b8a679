"""The ledger of a run: what is written survives, what is repeated is replaced, and what is lost is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.programs import python
from verl.errors import DataError
from verl.observability import ledger_reader
from verl.observability.account import ranges
from verl.observability.ledger import Ledger, entry_of, line_of

A0, A1, B0, B1 = ("a", 0), ("a", 1), ("b", 0), ("b", 1)


def run_of_two_steps(folder: Path) -> Ledger:
    """Step 1 trains on a#0, masks a#1, filters prompt b; step 2 has begun with prompt a of the next epoch."""
    book = Ledger(folder)
    book.asked(1, 0, [A0, A1, B0, B1], rows=[7, 7, 9, 9])
    book.noted("sampled", 1, [A0, A1, B0, B1], turns=[1, 1, 1, 3], tokens=[5, 6, 7, 8], finish=["stop"] * 3 + ["abort"],
               newest_version=[0] * 4, oldest_version=[0] * 4)  # fmt: skip
    book.noted("scored", 1, [A0, A1, B0, B1], score=[0.5, float("nan"), 0.0, 0.0])
    book.dropped(1, "filtered_group", [B0, B1])
    book.noted("batch", 1, [A0, A1])
    book.trained(1, [A0], {"unscorable": [A1]})
    book.end(1, saved=True)
    book.asked(2, 1, [("a2", 0), ("a2", 1)])
    return book


def test_a_question_about_a_step_a_prompt_and_a_reason_is_answered_from_the_file_of_a_run_that_goes_on(
    tmp_path, capsys
):
    book = run_of_two_steps(tmp_path)
    history = ledger_reader.History.of(book.path)
    fates = {f"{one.uid}{one.sample}": history.fate(one) for one in history.samples}
    assert fates["a0"] == "trained in step 1, which made version 1"
    assert fates["a1"] == "dropped in step 1: unscorable, it could not be scored, so it was masked"
    assert fates["b1"].startswith("dropped in step 1: filtered_group, all answers to its prompt came out the same")
    assert fates["a20"] == "being sampled"
    assert [(one.row, one.facts["tokens"], one.facts["score"]) for one in history.samples[:3]] == [
        (7, 5, 0.5), (7, 6, None), (9, 7, 0.0)
    ]  # fmt: skip
    kept = ledger_reader.History.of(book.path, ledger_reader.asked_for(None, "b", None))
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
    book = run_of_two_steps(tmp_path)
    waiting = [("a2", 0), ("a2", 1)]
    book.check(waiting)
    with pytest.raises(DataError, match=r"1 samples were lost: a2#1 \(of step 2, asked\)"):
        book.check(waiting[:1])
    book.trained(2, [A0, ("a2", 0)], {})
    with pytest.raises(DataError, match="a#0 was trained in step 2, and was not in flight then"):
        book.check(waiting[1:])
    assert "a#0 was trained in step 2" in ledger_reader.account_table(ledger_reader.History.of(book.path))


def test_a_resumed_run_replaces_what_its_repeated_steps_had_written_and_what_its_checkpoint_does_not_hold(tmp_path):
    first = run_of_two_steps(tmp_path)
    first.end(2)
    before = first.path.read_text()
    with first.path.open("a") as file:
        file.write('{"event":"asked","st')  # a kill amid a line
    again = Ledger(tmp_path, step=1, before=first.path.name)
    kept = before[: before.index('{"event":"asked","step":2')]
    assert again.path.read_text().startswith(kept) and '"step":2' not in again.path.read_text()
    assert (tmp_path / "ledger.replaced.jsonl").read_text().endswith('{"event":"asked","st')
    again.asked(2, 1, [("a2", 0), ("a2", 1)])
    again.check([("a2", 0), ("a2", 1)])
    assert again.account.sampled == 6
    third = Ledger(tmp_path, step=1, before=first.path.name, waiting=[("late", 0)])
    third.check([("late", 0)])  # a checkpoint of a run that kept no ledger then


def test_what_was_sampled_ahead_and_is_not_in_the_checkpoint_is_dropped_as_repeated(tmp_path):
    book = Ledger(tmp_path)
    book.asked(1, 0, [A0])
    book.asked(2, 0, [B0, B1])  # beside the update of step 1
    book.trained(1, [A0], {})
    book.end(1)
    again = Ledger(tmp_path, step=1, before=book.path.name, waiting=[B1])
    assert dict(again.account.dropped) == {"repeated": 1}
    again.asked(2, 0, [B0])
    again.trained(2, [B0, B1], {})
    again.check([])
    attempts = {(s.uid, s.sample, s.facts["attempt"]): s.stage for s in ledger_reader.History.of(book.path).samples}
    assert attempts[("b", 0, 1)] == "dropped" and attempts[("b", 0, 2)] == "trained"


@pytest.mark.parametrize("damage", ["", '{"event":"trained","step":1,"ids":[[99,1]]}\n', '{"event":"end","step":[]}\n'])
def test_a_ledger_that_does_not_reach_the_step_begins_anew_and_says_so(tmp_path, caplog, damage):
    book = run_of_two_steps(tmp_path)
    book.path.write_text(book.path.read_text() + damage)
    again = Ledger(tmp_path, step=5, before=book.path.name, waiting=[A0])
    assert "does not reach step 5" in caplog.text
    again.trained(6, [A0], {})
    again.check([])


def test_a_disk_that_is_full_is_one_error_that_says_what_to_do(tmp_path):
    code = """if True:
        import resource, sys
        from pathlib import Path
        from verl.errors import DataError
        from verl.observability.ledger import Ledger, entry_of, line_of
        book = Ledger(Path(sys.argv[1]))
        resource.setrlimit(resource.RLIMIT_FSIZE, (200, 200))
        try:
            book.asked(1, 0, [("a", k) for k in range(4)], rows=list(range(1000, 1004)))
            book.noted("scored", 1, [("a", k) for k in range(4)], score=[k / 7 for k in range(4)])
        except DataError as error:
            print(error)
    """
    ended = python("-c", code, str(tmp_path))
    assert ended.stdout.count("trainer.ledger: the ledger of the samples cannot be written: File too large") == 1
    assert "goes on from its last checkpoint" in ended.stdout
    assert ledger_reader.History.of(tmp_path / "ledger.jsonl").sampled == 4, "what was written before stays readable"


def test_numbers_that_follow_each_other_are_one_range():
    assert ranges([3, 4, 5, 9, 8]) == [[3, 3], [9, 1], [8, 1]]


def test_what_rows_and_loops_say_stays_within_its_cell(tmp_path, capsys):
    book = Ledger(tmp_path)
    name = "x\x1b[2J\nsampled  9"
    book.asked(1, 0, [(name, 0)])
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
    (tmp_path / "ledger.jsonl").write_text(f'{{"event":"asked","step":1,"first":0,"uid":["a"],"each":{each}}}\n')
    with pytest.raises(DataError, match=r"line 1 does not follow from those before it.*ledger\.jsonl"):
        ledger_reader.History.of(tmp_path / "ledger.jsonl")


def test_a_line_of_which_a_byte_changed_is_refused(tmp_path):
    """Each byte of the entry and of its checksum in turn; 2 answers to a prompt would balance as well as 1."""
    line = line_of({"event": "asked", "step": 1, "first": 0, "uid": ["a"], "each": 1})
    assert entry_of(line) == {"event": "asked", "step": 1, "first": 0, "uid": ["a"], "each": 1}
    marker = line.index(b',"crc":"')
    places = [at for at in range(len(line) - 3) if not marker <= at < marker + 8]
    changed = [line[:at] + bytes([line[at] ^ 1]) + line[at + 1 :] for at in places]
    assert [entry_of(other) for other in changed] == [None] * len(changed)
    (tmp_path / "ledger.jsonl").write_bytes(line + line.replace(b'each":1', b'each":2'))
    with pytest.raises(DataError, match=r"line 2 is not an entry of a ledger.*ledger\.jsonl"):
        ledger_reader.History.of(tmp_path / "ledger.jsonl")


def test_a_line_of_an_earlier_release_has_no_checksum():
    assert entry_of(b'{"event":"end","step":3}\n') == {"event": "end", "step": 3}
