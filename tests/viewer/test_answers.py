"""What the page shows of a real run, held against the batches that it trained on and the files that it wrote."""

from __future__ import annotations

import csv
import io
import json
import math

import numpy as np
import pyarrow.parquet as pq
import pytest

from tests.harness.runs import records
from tests.viewer.conftest import STEPS
from tests.viewer.served import served
from verl.journal.file import Journal
from verl.journal.ledger import Ledger
from verl.journal.ledger_reader import History
from verl.viewer import run
from verl.viewer.questions import Question

SAMPLES = 16
"""Of a step: four prompts, four answers each."""


def batch_of(trained, step):
    return trained.seen.batches[step - 1]


def row_of(trained, site, step, place):
    """(a sample as the page has it, its row of the batch, its number of tokens)."""
    (row,) = [row for row in site.get("samples", step=step, size=500)["rows"] if row["id"] == f"{step}-{place}"]
    sample = site.get("sample", id=row["id"])
    width = batch_of(trained, step).tensors["responses"].shape[1]
    length = int(batch_of(trained, step).tensors["attention_mask"][place, -width:].sum())
    return sample, place, length


def test_a_run_that_is_complete_is_listed_as_such(site, trained):
    (row,) = site.get("runs")["runs"]
    assert (row["state"], row["last_step"], row["total_steps"], row["samples"]) == ("complete", STEPS, STEPS, "tokens")
    assert row["notices"] == [] and row["folder"] == str(trained.folder)


def test_a_run_is_seen_while_it_trains(trained):
    live = trained.live
    assert (live.runs["state"], live.runs["last_step"]) == ("running", 1)
    assert live.curve["x"] == [1.0]
    assert sum(row["id"].startswith("1-") for row in live.page["rows"]) == SAMPLES


def test_a_curve_has_every_step_and_the_values_of_the_file(site, trained):
    (series,) = site.get("curves", metric="critic/score/mean")["series"]
    logged = records(trained.folder / "metrics.jsonl")
    assert series["x"] == series["steps"] == [line["step"] for line in logged] and "thinned" not in series
    assert series["y"] == [line["data"]["critic/score/mean"] for line in logged]
    assert site.get("curves", metric="critic/score/mean", since=2)["series"][0]["x"] == [3.0]


def test_the_axis_may_be_seconds_or_samples(site, trained):
    logged = records(trained.folder / "metrics.jsonl")
    seconds = np.cumsum([line["data"]["timing_s/step"] for line in logged])
    assert site.get("curves", metric="actor/lr", x="time")["series"][0]["x"] == pytest.approx(seconds.tolist())
    (by_samples,) = site.get("curves", metric="actor/lr", x="samples")["series"]
    assert by_samples["x"] == [16.0, 32.0, 48.0] and by_samples["steps"] == [1, 2, 3]


def test_metrics_are_grouped_like_the_table_of_the_console(site):
    groups = {group["name"]: group["metrics"] for group in site.get("metrics")["groups"]}
    assert groups["reward"][:3] == ["critic/score/mean", "critic/score/max", "critic/score/min"]
    assert next(iter(groups)) == "reward" and "perf/throughput" in groups["speed"]
    names = [name for metrics in groups.values() for name in metrics]
    assert len(names) == len(set(names))


def test_each_step_has_its_samples_groups_and_mean_score(site, trained):
    for row in site.get("steps")["steps"]:
        batch = batch_of(trained, row["step"])
        assert (row["samples"], row["groups"]) == (SAMPLES, 4)
        assert row["score_mean"] == pytest.approx(batch.tensors["token_level_scores"].sum(-1).mean().item(), abs=1e-6)


def test_groups_are_the_prompts_of_a_step_by_their_spread(site, trained):
    batch = batch_of(trained, 2)
    scores = batch.tensors["token_level_scores"].sum(-1).numpy()
    uids = batch.non_tensor_batch["uid"]
    spreads = {uid: float(np.ptp(scores[uids == uid])) for uid in uids}
    answer = site.get("groups", step=2, sort="score_spread", descending=1)
    trained_groups = [row for row in answer["rows"] if row["state"] == "trained"]
    assert {row["uid"]: pytest.approx(row["score_spread"], abs=1e-6) for row in trained_groups} == spreads
    shown = [row["score_spread"] for row in answer["rows"]]
    assert shown == sorted(shown, reverse=True)
    assert all(row["prompt"].startswith("user") for row in trained_groups)


def test_what_was_dropped_before_a_batch_is_there_with_its_reason(site, trained):
    history = History.of(trained.folder / "journal.jsonl")
    surplus = [record for record in history.samples if record.facts.get("reason") == "surplus"]
    assert surplus
    rows = site.get("samples", state="dropped", reason="surplus", size=500)["rows"]
    assert sorted((row["uid"], row["score"]) for row in rows) == sorted((r.uid, r.facts["score"]) for r in surplus)
    shown = site.get("sample", id=rows[0]["id"])
    assert shown["tokens"] is None and "oversample_factor" in shown["meaning"] and shown["ledger"]["stage"] == "dropped"
    assert sum(row["dropped"] for row in site.get("steps")["steps"]) == len(surplus)


def test_filters_and_pages_give_the_samples_that_a_loop_would_find(site):
    rows = site.get("samples", size=500)["rows"]
    chosen = site.get("samples", min_score=0.5, max_length=7, sort="score", descending=1, size=500)
    expected = [r for r in rows if r["score"] is not None and r["score"] >= 0.5 and r["length"] <= 7]
    assert chosen["total"] == len(expected)
    scores = [row["score"] for row in chosen["rows"]]
    assert scores == sorted((row["score"] for row in expected), reverse=True)
    pages = [site.get("samples", sort="length", page=page, size=7)["rows"] for page in range(math.ceil(len(rows) / 7))]
    assert sorted(row["id"] for page in pages for row in page) == sorted(row["id"] for row in rows)


def test_a_text_is_searched_in_prompts_and_responses(site):
    rows = site.get("samples", size=500)["rows"]
    digit = site.get("sample", id="1-0")["prompt"].split("\n")[1]
    hits = site.get("samples", text=digit, size=500)
    shown = [site.get("sample", id=row["id"]) for row in rows]
    expected = {one["id"] for one in shown if digit in one["prompt"] or digit in one["response"]}
    assert {row["id"] for row in hits["rows"]} == expected and "1-0" in expected
    assert hits["searched"]["files"] == hits["searched"]["of"]


@pytest.mark.parametrize(
    ("shown", "column"),
    [("ids", "responses"), ("log_prob", "rollout_log_probs"), ("trainer_log_prob", "old_log_probs"),
     ("advantage", "advantages"), ("entropy", "entropys"), ("mask", "response_mask"), ("version", "token_versions")],
)  # fmt: skip
def test_the_tokens_of_a_sample_are_those_of_the_batch(site, trained, shown, column):
    sample, place, length = row_of(trained, site, 2, 5)
    expected = batch_of(trained, 2).tensors[column][place, :length].tolist()
    assert sample["tokens"][shown] == pytest.approx(expected)


def test_ratio_and_difference_are_of_trainer_and_sampler(site, trained):
    tokens = row_of(trained, site, 3, 2)[0]["tokens"]
    pairs = list(zip(tokens["log_prob"], tokens["trainer_log_prob"]))
    assert tokens["difference"] == pytest.approx([sampler - trainer for sampler, trainer in pairs])
    assert tokens["ratio"] == pytest.approx([math.exp(trainer - sampler) for sampler, trainer in pairs])


def test_the_texts_of_tokens_join_to_the_response(site, trained):
    tokenizer = trained.seen.trainer.tokenizer
    for place in range(SAMPLES):
        sample, _, length = row_of(trained, site, 1, place)
        ids = batch_of(trained, 1).tensors["responses"][place, :length].tolist()
        assert len(sample["tokens"]["text"]) == length
        assert "".join(sample["tokens"]["text"]) == tokenizer.decode(ids)


def test_the_same_prompt_is_followed_over_steps(site):
    rows = site.get("samples", size=500)["rows"]
    row = next(row for row in rows if row["id"] == "1-0")
    same = site.get("prompt", id="1-0", size=500)["rows"]
    assert {one["id"] for one in same} == {one["id"] for one in rows if one["row"] == row["row"]}
    assert [one["step"] for one in same] == sorted(one["step"] for one in same)


def test_the_gantt_chart_has_the_stages_of_the_steps(site):
    spans = site.get("gantt", first=2, last=2)["spans"]
    assert {"sampling", "scoring", "training"} <= {span["role"] for span in spans}
    assert all(0 <= span["begin"] <= span["end"] for span in spans) and {span["step"] for span in spans} == {2}
    assert site.refused("gantt", first=90, last=91)["message"]


def test_busy_and_idle_seconds_of_a_role_add_up_to_the_run(site):
    system = site.get("system")
    sums = [role["busy"] + role["idle"] for role in system["roles"]]
    assert sums == pytest.approx([sums[0]] * len(sums)) and {role["step"] for role in system["roles"]} == {STEPS}


def test_the_settings_of_a_run_are_listed(site):
    rows = {row["key"]: row["values"] for row in site.get("config")["rows"]}
    assert rows["actor_rollout_ref.rollout.n"] == ["4"] and rows["trainer.rollout_data_dir"] == ["run/samples"]
    assert site.get("config", run=0, against=0)["rows"] == []


def test_a_table_is_exported_as_csv_and_parquet(site):
    reply = site.send("/api/export?what=samples&step=2")
    rows = list(csv.DictReader(io.StringIO(reply.body.decode())))
    assert reply.headers["content-disposition"] == 'attachment; filename="samples.csv"'
    shown = {row["id"]: row for row in site.get("samples", step=2, size=500)["rows"]}
    assert {row["id"]: float(row["score"]) for row in rows} == {name: row["score"] for name, row in shown.items()}
    table = pq.read_table(io.BytesIO(site.send("/api/export?what=curves&metric=actor/lr&format=parquet").body))
    assert table["step"].to_pylist() == [1.0, 2.0, 3.0]
    groups = site.send("/api/export?what=groups&step=2").body.decode()
    assert len(groups.splitlines()) > 4


@pytest.mark.parametrize(("name", "rows", "parameters"), [
    ("runs", "runs", ""), ("steps", "steps", ""), ("config", "rows", "&run=0"),
    ("gantt", "spans", "&first=2&last=2"), ("system", "roles", ""),
])  # fmt: skip
def test_each_view_is_exported_with_the_rows_that_it_shows(site, name, rows, parameters):
    shown = site.send(f"/api/{name}?{parameters}").json[rows]
    content = site.send(f"/api/export?what={name}{parameters}").body.decode()
    assert [row[0] for row in csv.reader(io.StringIO(content))][1:] == [str(next(iter(row.values()))) for row in shown]
    table = pq.read_table(io.BytesIO(site.send(f"/api/export?what={name}&format=parquet{parameters}").body))
    assert table.num_rows == len(shown) > 0 and table.column_names == list(shown[0])


def test_the_tokens_of_a_sample_are_exported_with_their_numbers(site):
    identity = site.get("samples", step=2)["rows"][0]["id"]
    tokens = site.get("sample", id=identity)["tokens"]
    table = pq.read_table(io.BytesIO(site.send(f"/api/export?what=tokens&id={identity}&format=parquet").body))
    assert table["ids"].to_pylist() == tokens["ids"] and table["advantage"].to_pylist() == tokens["advantage"]
    assert table.num_rows == tokens["total"] and {"text", "ratio", "mask", "version"} <= set(table.column_names)


def test_columns_of_tokens_of_other_lengths_are_no_table(monkeypatch):
    monkeypatch.setattr(run.ViewedRun, "sample", lambda *_, **__: {"tokens": {"ids": [1, 2], "mask": [1]}})
    with pytest.raises(ValueError, match="shorter"):
        run.ViewedRun.tokens(object.__new__(run.ViewedRun), Question([("id", "1-0")]))


def test_an_export_without_all_its_rows_is_refused(site, monkeypatch):
    monkeypatch.setattr(run, "MOST_SPANS", 2)
    assert site.get("gantt", first=2, last=2)["left_out"] > 0
    assert site.refused("export", what="gantt", first=2, last=2)["fix"] == "Choose fewer steps."
    changed = site.get("steps")["changed"]
    assert site.refused("export", what="steps", changed=changed)["key"] == "changed"


def test_an_answer_that_has_not_changed_is_empty(site):
    changed = site.get("steps")["changed"]
    reply = site.send(f"/api/steps?changed={changed}")
    assert (reply.status, reply.body) == (204, b"")


@pytest.mark.parametrize(
    ("name", "parameters", "key"),
    [("samples", {"minscore": 1}, "minscore"), ("samples", {"min_score": "high"}, "min_score"),
     ("samples", {"sort": "beauty"}, "sort"), ("samples", {"finish": "never"}, "finish"),
     ("samples", {"size": 10_000}, "size"), ("curves", {"metric": "critic/score/meen"}, "metric"),
     ("curves", {"x": "moons"}, "x"), ("export", {"what": "weights"}, "what")],
)  # fmt: skip
def test_a_mistake_in_a_question_is_named(site, name, parameters, key):
    assert site.refused(name, **parameters)["key"] == key


@pytest.mark.parametrize("identity", ["9-9", "L99999", "", "1-99", "../1-0", "1-0-0", "١-٠"])
def test_an_unknown_sample_is_not_there(site, identity):
    assert site.refused("sample", 404, id=identity)["key"] == "id"


def test_an_unknown_run_is_not_there(site):
    assert site.refused("steps", 404, run=7)["key"] == "run"


def test_the_journal_alone_says_no_length_of_a_conversation(tmp_path):
    """It counts sampled tokens, and files count those that tools inserted, too."""
    journal = Journal(tmp_path)
    ledger, keys = Ledger(journal), [("a", sample) for sample in range(3)]
    journal.begin([ledger])
    ledger.requested(1, 0, keys)
    ledger.noted("sampled", 1, keys, tokens=[9, 8, 7], turns=[2, 4, 2])
    ledger.dropped(1, "filtered_group", keys)
    ledger.end(1)
    journal.close()
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "data": {"training/global_step": 1}}\n')
    with served(tmp_path) as here:
        rows = here.indexed("samples")["rows"]
    assert {row["id"]: row["length"] for row in rows} == {"L0": 9, "L1": None, "L2": 7}


def test_the_lines_of_samples_have_length_and_finish_reason(trained):
    batch = batch_of(trained, 1)
    lines = records(trained.folder / "samples" / "1.jsonl")
    width = batch.tensors["responses"].shape[1]
    assert [line["response_tokens"] for line in lines] == batch.tensors["attention_mask"][:, -width:].sum(-1).tolist()
    assert [line["response_finish_reason"] for line in lines] == list(batch.non_tensor_batch["finish_reason"])
    assert json.loads((trained.folder / "state.json").read_text())["state"] == "complete"
