"""What runs leave behind is not always as it should be: growing, copied, truncated, old, huge, hostile."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.viewer.served import served
from verl.errors import DataError
from verl.journal.ending import recorded_end
from verl.journal.file import Journal
from verl.journal.ledger import Ledger
from verl.observability.metrics_log import MOST_POINTS
from verl.observability.samples import dump_generations
from verl.observability.token_dump import table_of, write_table
from verl.viewer.folder import MOST_STACKS
from verl.viewer.run import ViewedRun

HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)>"


@pytest.fixture
def copy(trained, tmp_path) -> Path:
    """A copy of the run to be changed."""
    return Path(shutil.copytree(trained.folder, tmp_path / "copy"))


def log(folder: Path, *steps: int, **data: float | None) -> None:
    with (folder / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps({"step": step, "data": data or {"train/loss": step / 2}}) + "\n" for step in steps)


def dump(folder: Path, step: int, output: str, score: float = 1.0) -> None:
    """The lines of samples of an earlier release: no name of the prompt, no length."""
    dump_generations(folder / "samples", step, ["a?", "b?"], [output, "no"], ["x", "y"], [score, 0.0])


def tokens_of(output: list[str]) -> dict[str, list]:
    return {"input": ["q"] * len(output), "output": output, "uid": ["u"] * len(output), "score": [0.5] * len(output),
            "step": [1] * len(output), "sample": list(range(len(output))), "length": [2] * len(output)}  # fmt: skip


def test_a_copy_of_a_run_is_read_like_the_run(copy, site):
    with served(copy) as other:
        assert other.indexed("samples", size=500)["rows"] == site.get("samples", size=500)["rows"]
        assert other.get("runs")["runs"][0]["notices"] == []


def test_files_that_grow_are_read_as_they_grow(tmp_path):
    log(tmp_path, 1, 2)
    with served(tmp_path) as site:
        assert site.get("curves", metric="train/loss")["series"][0]["x"] == [1.0, 2.0]
        with (tmp_path / "metrics.jsonl").open("a") as file:
            file.write('{"step": 3, "data": {"train/lo')
        first = site.get("curves", metric="train/loss")
        assert first["series"][0]["x"] == [1.0, 2.0]
        with (tmp_path / "metrics.jsonl").open("a") as file:
            file.write('ss": 1.5}}\n')
        assert site.get("curves", metric="train/loss", since=2)["series"][0] == {
            "run": 0, "metric": "train/loss", "x": [3.0], "y": [1.5], "steps": [3],
        }  # fmt: skip
        assert site.send(f"/api/curves?metric=train/loss&changed={first['changed']}").status == 200
        dump(tmp_path, 1, "early")
        assert site.indexed("samples", text="early")["total"] == 1
        dump(tmp_path, 2, "late")
        assert [row["step"] for row in site.indexed("samples")["rows"]] == [2, 2, 1, 1]


def test_a_resumed_run_replaces_what_its_steps_wrote(tmp_path):
    log(tmp_path, 1, 2, 3)
    with served(tmp_path) as site:
        assert site.get("curves", metric="train/loss")["series"][0]["x"] == [1.0, 2.0, 3.0]
        (tmp_path / "fresh").mkdir()
        log(tmp_path / "fresh", 1)
        (tmp_path / "fresh" / "metrics.jsonl").replace(tmp_path / "metrics.jsonl")
        assert site.get("curves", metric="train/loss")["series"][0]["x"] == [1.0]
        dump(tmp_path, 2, "before")
        site.indexed("samples")
        dump(tmp_path, 2, "after")
        assert site.indexed("samples", text="before")["total"] == 0 and site.get("samples", text="after")["total"] == 1


def test_a_text_is_found_in_small_and_large_letters_in_both_kinds_of_files(tmp_path):
    dump(tmp_path, 1, "The ÄPFEL (3+4)")
    columns = tokens_of(["of äpfel (3+4)", "pears"])
    table = table_of(columns, {}, {}, np.array([2, 2]), np.zeros(2, dtype=bool))
    write_table(table, tmp_path / "samples" / "2.parquet")
    with served(tmp_path) as site:
        for text in ("äpfel", "Äpfel (3+4)"):
            assert {row["step"] for row in site.indexed("samples", text=text)["rows"]} == {1, 2}
        assert site.indexed("samples", text="äpfel .3")["total"] == 0, "no pattern"


def test_the_stacks_of_the_last_hang_are_shown_up_to_a_bound(tmp_path):
    with served(tmp_path) as site:
        assert site.get("system")["stacks"] is None
        (tmp_path / "hang.txt").write_text("the first\n")
        (tmp_path / "hang-2.txt").write_text(HOSTILE)
        assert site.get("system")["stacks"] == HOSTILE
        (tmp_path / "hang-3.txt").write_text("x" * (MOST_STACKS + 1))
        stacks = site.get("system")["stacks"]
        assert stacks.startswith("x" * MOST_STACKS + "\n(cut: ") and "hang-3.txt has more" in stacks
        (tmp_path / "hang-4.txt").symlink_to("/etc/hostname")
        assert site.get("system")["stacks"] is None


def test_the_journal_is_followed_across_a_restart(tmp_path):
    journal = Journal(tmp_path)
    ledger = Ledger(journal)
    journal.begin([ledger])
    ledger.requested(1, 0, [("p", 0), ("p", 1)])
    position = journal.position()
    with served(tmp_path) as site:
        assert [row["state"] for row in site.indexed("samples")["rows"]] == ["waiting", "waiting"]
        ledger.dropped(1, "stale", [("p", 0), ("p", 1)])
        assert site.indexed("samples", state="dropped")["total"] == 2
        again = Journal(tmp_path, 1, journal.path.name, position)
        after = Ledger(again)
        again.begin([after])
        after.resume(1, [("p", 0), ("p", 1)])
        after.trained(1, [("p", 0), ("p", 1)], {})
        assert site.indexed("samples", state="trained")["total"] == 2
        assert [event["kind"] for event in site.get("events")["events"]].count("restart") == 1


def test_a_truncated_file_is_named_and_its_lines_are_shown(copy):
    place = copy / "samples" / "2.parquet"
    place.write_bytes(place.read_bytes()[: place.stat().st_size // 2])
    with served(copy) as site:
        site.indexed("samples")
        (notice,) = site.get("runs")["runs"][0]["notices"]
        assert str(place) in notice
        rows = site.get("samples", step=2, size=500)["rows"]
        assert sum(row["id"].startswith("2-") for row in rows) == 16
        assert site.get("sample", id="2-3")["tokens"] is None and site.get("sample", id="3-3")["tokens"] is not None


def test_a_damaged_line_is_named_and_the_others_are_read(tmp_path):
    log(tmp_path, 1)
    (tmp_path / "metrics.jsonl").open("a").write("{broken\n")
    log(tmp_path, 2)
    dump(tmp_path, 1, "fine")
    (tmp_path / "samples" / "1.jsonl").open("a").write("[1, 2\n")
    (tmp_path / "config.yaml").write_text("trainer: [")
    with served(tmp_path) as site:
        assert site.get("curves", metric="train/loss")["series"][0]["x"] == [1.0, 2.0]
        assert site.indexed("samples")["total"] == 2
        notices = " ".join(site.get("runs")["runs"][0]["notices"])
        assert "line 2 of" in notices and "the first is line 3" in notices and "config.yaml" in notices


def test_a_damaged_journal_is_a_notice(copy):
    place = copy / "journal.jsonl"
    lines = place.read_bytes().splitlines(keepends=True)
    place.write_bytes(b"".join([*lines[:5], lines[5].replace(b"0", b"1"), *lines[6:]]))
    with served(copy) as site:
        assert site.indexed("samples", step=1)["total"] >= 16
        assert "journal" in site.get("runs")["runs"][0]["notices"][0]


def test_lines_of_an_earlier_release_make_samples_without_tokens(tmp_path):
    dump(tmp_path, 1, "early")
    with served(tmp_path) as site:
        (first, _) = site.indexed("samples", sort="score", descending=1)["rows"]
        assert (first["excerpt"], first["length"], first["state"]) == ("early", None, None)
        shown = site.get("sample", id=first["id"])
        assert (shown["tokens"], shown["ledger"], shown["ground_truth"]) == (None, None, "x")
        assert site.get("groups", step=1)["total"] == 2
        assert site.get("runs")["runs"][0]["samples"] == "texts"


def test_a_conversation_is_shown_as_turns(tmp_path):
    pieces = [
        {"role": "user", "text": "2*3?"}, {"role": "assistant", "text": "times(2, 3)"},
        {"role": "tool", "calls": [{"name": "times", "answer": "6"}]}, {"role": "assistant", "text": "6"},
    ]  # fmt: skip
    dump_generations(tmp_path / "samples", 1, ["q"], ["a"], ["6"], [1.0], {"trajectory": [pieces], "acc": [True]})
    with served(tmp_path) as site:
        site.indexed("samples")
        shown = site.get("sample", id="1-0")
    assert [(turn["role"], turn["text"]) for turn in shown["turns"]] == [
        ("user", "2*3?"), ("assistant", "times(2, 3)"), ("tool", "times: 6"), ("assistant", "6"),
    ]  # fmt: skip
    assert shown["extra"] == {"acc": True}


def test_settings_that_unfold_without_end_are_refused(tmp_path):
    lines = ["a0: &a0 [x, x]", *(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 30))]
    (tmp_path / "config.yaml").write_text("\n".join(lines) + "\n")
    with served(tmp_path) as site:
        assert site.get("config")["rows"] == []
        assert "more than" in " ".join(site.get("runs")["runs"][0]["notices"])


def test_an_empty_folder_is_a_run_without_anything(tmp_path):
    with served(tmp_path) as site:
        (row,) = site.get("runs")["runs"]
        assert (row["state"], row["last_step"], row["samples"]) == ("unknown", None, "none")
        for name in ("metrics", "steps", "samples", "system", "events", "gantt", "config"):
            site.get(name)


def test_a_folder_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"trainer\.default_local_dir"):
        ViewedRun(tmp_path / "nothing")


def test_a_link_out_of_the_run_is_not_followed(tmp_path):
    secret = tmp_path / "elsewhere" / "secret"
    dump(tmp_path / "elsewhere", 1, "secret")
    run = tmp_path / "run"
    (run / "samples").mkdir(parents=True)
    (run / "samples" / "1.jsonl").symlink_to(tmp_path / "elsewhere" / "samples" / "1.jsonl")
    (run / "metrics.jsonl").symlink_to(tmp_path / "elsewhere" / "samples" / "1.jsonl")
    (run / "config.yaml").symlink_to(secret)
    journal = Journal(tmp_path / "elsewhere")
    ledger = Ledger(journal)
    journal.begin([ledger])
    ledger.requested(1, 0, [("p", 0)])
    (run / "journal.jsonl").symlink_to(journal.path)
    secret.write_text("word: hidden\n")
    with served(run) as site:
        assert site.indexed("samples")["total"] == 0 and site.get("config")["rows"] == []
        notices = " ".join(site.get("runs")["runs"][0]["notices"])
        assert all(name in notices for name in ("1.jsonl", "metrics.jsonl", "config.yaml", "journal.jsonl"))


def test_a_folder_of_samples_elsewhere_is_read_only_if_it_is_named(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    dump(tmp_path, 1, "outside")
    (run / "config.yaml").write_text(f"trainer: {{rollout_data_dir: {tmp_path / 'samples'}}}\n")
    with served(run) as site:
        assert site.indexed("samples")["total"] == 0
        assert "--samples" in " ".join(site.get("runs")["runs"][0]["notices"])
    with served(ViewedRun(run, samples=tmp_path / "samples")) as site:
        assert site.indexed("samples")["total"] == 2


def test_what_a_model_wrote_stays_text(tmp_path):
    dump(tmp_path, 1, HOSTILE)
    dump(tmp_path, 2, "=HYPERLINK(1)")
    with served(tmp_path) as site:
        site.indexed("samples")
        reply = site.send("/api/sample?id=1-0")
        assert reply.json["response"] == HOSTILE and reply.headers["content-type"] == "application/json"
        assert "script-src 'self'" in reply.headers["content-security-policy"]
        assert "'=HYPERLINK(1)" in site.send("/api/export?what=samples").body.decode()


def test_numbers_that_json_does_not_have_are_null(tmp_path):
    log(tmp_path, 1, **{"train/loss": None})
    log(tmp_path, 2, **{"train/loss": 2.0})
    values = {"token_id": np.arange(4), "sampler_log_prob": np.array([-1.0, -np.inf, np.nan, 0.0])}
    table = table_of(
        {**tokens_of(["ab", "cd"]), "score": [float("nan"), 1.0]}, {}, values, np.array([2, 2]), np.ones(2, bool)
    )
    write_table(table, tmp_path / "samples" / "1.parquet")
    with served(tmp_path) as site:
        assert site.get("curves", metric="train/loss")["series"][0]["y"] == [None, 2.0]
        assert site.indexed("samples", sort="score")["rows"][-1]["score"] is None
        shown = [site.get("sample", id=f"1-{place}")["tokens"]["log_prob"] for place in (0, 1)]
        assert shown == [[-1.0, None], [None, 0.0]]


def test_a_sample_of_ten_megabytes_is_cut_unless_all_is_requested(tmp_path):
    output, count = "word " * 2_000_000, 100_000
    values = {"token_id": np.arange(count), "advantage": np.ones(count)}
    table = table_of(tokens_of([output]), {}, values, np.array([count]), np.ones(1, bool))
    write_table(table, tmp_path / "samples" / "1.parquet")
    with served(tmp_path) as site:
        assert len(site.indexed("samples")["rows"][0]["excerpt"]) == 200
        cut, full = site.get("sample", id="1-0"), site.get("sample", id="1-0", all=1)
        assert (cut["cut"], len(cut["response"]), len(cut["tokens"]["ids"])) == (True, 1 << 20, 1 << 16)
        assert (full["cut"], full["response"], len(full["tokens"]["ids"])) == (False, output, count)


def test_a_thinned_curve_keeps_its_peak_its_ends_and_its_gap(tmp_path):
    special = {4321: 9.0, 5000: None, 8999: 1.5}
    lines = [json.dumps({"step": step, "data": {"train/loss": special.get(step, 1.0)}}) for step in range(9000)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    with served(tmp_path) as site:
        (series,) = site.get("curves", metric="train/loss")["series"]
        assert series["thinned"] and len(series["x"]) <= MOST_POINTS
        points = list(zip(series["x"], series["y"]))
        assert (4321.0, 9.0) in points and (5000.0, None) in points, "the peak, and the value that was NaN"
        assert points[0] == (0.0, 1.0) and points[-1] == (8999.0, 1.5) and series["x"] == sorted(series["x"])
        assert len(site.send("/api/export?what=curves&metric=train/loss").body.splitlines()) == 9001


def test_two_runs_are_compared(tmp_path):
    for name, rate in (("one", "1.0e-6"), ("other", "2.0e-6")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").write_text(f"optim: {{lr: {rate}, total: [1, 2]}}\nseed: 1\n")
        log(tmp_path / name, 1)
    with served(tmp_path / "one", tmp_path / "other") as site:
        assert site.get("config", run=0, against=1)["rows"] == [{"key": "optim.lr", "values": ["1e-06", "2e-06"]}]
        assert [series["run"] for series in site.get("curves", run=[0, 1], metric="train/loss")["series"]] == [0, 1]


def test_a_run_whose_process_is_gone_failed_without_a_word(tmp_path):
    code = (
        "import os\nfrom pathlib import Path\nfrom verl.journal.ending import recorded_end\n"
        f"with recorded_end(Path({str(tmp_path)!r}), 7):\n    os.kill(os.getpid(), 9)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=False)
    with served(tmp_path) as site:
        (row,) = site.get("runs")["runs"]
        assert (row["state"], row["total_steps"]) == ("failed", 7) and "without a word" in row["why"]


@pytest.mark.parametrize(
    ("error", "state"), [(ValueError("no more disk"), "failed"), (SystemExit(130), "stopped"), (None, "complete")]
)
def test_a_run_notes_how_it_ended(tmp_path, error, state):
    with pytest.raises(type(error)) if error else recorded_end(tmp_path / "other", 1), recorded_end(tmp_path, 5):
        with served(tmp_path) as site:
            assert site.get("runs")["runs"][0]["state"] == "running"
        if error:
            raise error
    with served(tmp_path) as site:
        (row,) = site.get("runs")["runs"]
        assert row["state"] == state and (state != "failed" or "no more disk" in row["why"])


def test_a_lock_that_another_process_holds_means_running(tmp_path):
    code = (
        "import fcntl, sys\nfile = open(sys.argv[1], 'w')\nfcntl.lockf(file, fcntl.LOCK_EX)\n"
        "print('held', flush=True)\nsys.stdin.read()\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path / ".lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout and holder.stdin and holder.stdout.readline() == "held\n"
        with served(tmp_path) as site:
            assert site.get("runs")["runs"][0]["state"] == "running"
            holder.stdin.close()
            holder.wait()
            assert site.get("runs")["runs"][0]["state"] == "unknown"
