"""Dumps of samples can be joined with the ledger of their run and with the rows of its data."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq

from tests.harness.runs import prepare, records, train


def test_each_dumped_sample_has_the_names_of_the_ledger_and_its_row_of_the_data(workplace):
    prepare()
    train("trainer.rollout_data_dir=dumps", "trainer.ledger=true", "trainer.default_local_dir=run")
    dumped = records("dumps/1.jsonl")
    events = {event["event"]: event for event in records("run/journal.jsonl")}
    asked, scores = events["asked"], events["scored"]["score"]
    rows = zip(asked["uid"], asked["row"], strict=True)
    names = [(uid, sample, row) for uid, row in rows for sample in range(asked["each"])]
    assert {(one["uid"], one["sample"], one["row"]): one["score"] for one in dumped} == dict(zip(names, scores))
    questions = [row["prompt"][0]["content"] for row in pq.read_table(Path("train.parquet")).to_pylist()]
    assert len({one["row"] for one in dumped}) == 4
    for one in dumped:
        assert questions[one["row"]] in one["input"]
