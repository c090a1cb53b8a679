"""Sampling beside training on Ray: group by group, in a pool of its own, with the numbers of one process."""

from __future__ import annotations

import os
import re
import signal
import threading
import time

import numpy as np
import pytest
import torch

from tests.harness.runs import records
from verl.journal import ledger_reader
from verl.journal.gantt import busy_seconds, by_role
from verl.journal.schedule import Script, counts_of
from verl.journal.spans import read_spans
from verl.metrics import notices
from verl.trainer.keeper import UNKNOWN, ReplicaKeeper

pytestmark = pytest.mark.slow

STREAM = (
    "trainer.v1.trainer_mode=fully_async",
    "async_training.staleness_threshold=0.5",
    "async_training.trigger_parameter_sync_step=2",
    "trainer.save_freq=3",
    "actor_rollout_ref.rollout.full_determinism=true",
)
OWN_POOL = (
    "trainer.runtime=ray",
    "actor_rollout_ref.hybrid_engine=false",
    "actor_rollout_ref.rollout.nnodes=1",
    "actor_rollout_ref.rollout.n_gpus_per_node=2",
    "actor_rollout_ref.rollout.checkpoint_engine.backend=shared_memory",
)


@pytest.fixture(scope="module")
def in_turn(train):
    return train("stream_in_turn", 3, *STREAM, "trainer.runtime=local")


def test_groups_that_are_sampled_beside_training_have_the_numbers_of_one_process(train, in_turn):
    """Updates wait for the groups that were admitted, so which version draws what is a matter of counts."""
    beside = train("stream_beside", 3, *STREAM, *OWN_POOL, "trainer.trace=true")
    shown = ("input", "output", "score")
    ours, theirs = ([[tuple(row[name] for name in shown) for row in step] for step in run.samples]
                    for run in (beside, in_turn))  # fmt: skip
    assert ours == theirs and len(ours) == 3
    ours, theirs = beside.weights(3), in_turn.weights(3)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    for name in ("fully_async/staleness/mean", "count/staleness_samples", "actor/grad_norm"):
        assert [step[name] for step in beside.steps] == [step[name] for step in in_turn.steps], name
    assert all(step["fully_async/rollouter/idle_seconds"] > 0 for step in beside.steps)
    drawn = by_role(read_spans(beside.folder))
    groups = {f"group {number}" for number in range(12)}
    assert {one.thread for one in drawn["sampling"]} == {one.thread for one in drawn["scoring"]} == groups
    assert all(busy_seconds(drawn[role]) > 0 for role in ("sampling", "scoring", "training"))


GATED = """import pathlib, time

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    while not pathlib.Path("go").exists():
        time.sleep(0.02)
    return len(set(solution_str)) / 10
"""


def disturb_replacements(monkeypatch) -> None:
    """The first one is stopped before it is sent weights, the next one in its place is killed before it loads."""
    serve, start, stopped, killed = ReplicaKeeper._serve, ReplicaKeeper._start, [], []

    def stop_first(keeper, one):
        if not stopped:
            stopped.append(one)
            os.kill(one.unit.members[0].pid, signal.SIGSTOP)
        return serve(keeper, one)

    def kill_second(keeper, name, slots):
        unit = start(keeper, name, slots)
        if stopped and slots == stopped[0].slots and not killed:
            killed.append(unit)
            os.kill(unit.members[0].pid, signal.SIGKILL)
        return unit

    monkeypatch.setattr(ReplicaKeeper, "_serve", stop_first)
    monkeypatch.setattr(ReplicaKeeper, "_start", kill_second)


def test_replicas_that_die_and_hang_while_a_run_goes_on_change_no_number(train, in_turn, task, monkeypatch):
    """One is killed and one is stopped, both with requests in flight, and two replacements fail."""
    keepers, watch = [], ReplicaKeeper.watch
    monkeypatch.setattr(ReplicaKeeper, "watch", lambda keeper, moved: (keepers.append(keeper), watch(keeper, moved)))
    disturb_replacements(monkeypatch)
    (task / "gated.py").write_text(GATED)
    folder, over = task / "elastic", threading.Event()

    def until(condition):
        while not condition() and not over.wait(0.002):
            pass

    def disturb():
        ledger = folder / "journal.jsonl"
        until(lambda: keepers and ledger.exists() and '"asked"' in ledger.read_text())
        first = list(keepers[0]._replicas) if keepers else []
        pids = [one.unit.members[0].pid for one in first]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(0.3)  # so that requests are sent to both
        os.kill(pids[0], signal.SIGKILL)
        until(lambda: len(keepers[0]._replicas) == 2 and not {*map(id, keepers[0]._replicas)} & {*map(id, first)})
        (task / "go").touch()

    thread = threading.Thread(target=disturb)
    thread.start()
    try:
        run = train("elastic", 3, *STREAM, *OWN_POOL, "actor_rollout_ref.rollout.max_replacements=6",
                    "trainer.hang_seconds=12", "reward.custom_reward_function.path=gated.py",
                    "reward.timeout=300")  # fmt: skip
    finally:
        over.set()
        thread.join()
    shown = ("input", "output", "score")
    ours, theirs = ([[tuple(row[name] for name in shown) for row in step] for step in one.samples]
                    for one in (run, in_turn))  # fmt: skip
    assert ours == theirs and len(ours) == 3
    ours, theirs = run.weights(3), in_turn.weights(3)
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
    moved = sum(step["rollout/replicas/resent"] for step in run.steps)
    lines = records(folder / "journal.jsonl")
    assert 0 < moved <= sum(line["event"] == "moved" for line in lines)
    assert run.steps[-1]["rollout/replicas/alive"] == 2 and run.steps[-1]["rollout/replicas/replaced"] >= 4
    said = notices()["rollout, replica 1, replaced"]
    culprit = r"\(process \d+ on node [\d.]+, stopped by a signal\)"
    assert re.search(culprit + r" has not answered for .*It has \d+ requests, ", said)
    failures = r"rollout, replica \d, replacement \d failed"
    failed = [text for key, text in notices().items() if re.fullmatch(failures, key)]
    assert len(failed) == 2 and all("its replacement did not start: WorkerError: " in text for text in failed)
    assert re.search(r"hangs: replica \d " + culprit + r" has not answered for .*It has 0 requests", failed[0])
    assert re.search(r"the worker replica \d died", failed[1])


def test_a_run_in_order_of_completion_whose_requests_met_new_weights_is_replayed_in_one_process(train):
    """Nobody decides which group ends first and where weights meet a response; the record says so, for every token."""
    loose = (
        "trainer.v1.sampler.order=completion",
        "algorithm.rollout_correction.bypass_mode=true",
        "actor_rollout_ref.rollout.requests_at_update=pause",
        "async_training.staleness_threshold=2",
        "async_training.concurrent_samples_per_replica=1",
        "data.max_response_length=96",
        "actor_rollout_ref.rollout.ignore_eos=true",
    )
    beside = train("loose", 3, *STREAM, *loose, *OWN_POOL)
    recorded = Script.read(beside.folder).decisions
    served = [its for one in recorded if one["event"] == "ended" for group in one["groups"]
              for its in group["requests"].values()]  # fmt: skip
    assert {span[0] for its in served for span in its["spans"]} == {"replica of rollout[0]", "replica of rollout[1]"}
    assert any(len(counts_of(its)) > 1 for its in served)  # 12 groups begin at once, and step 1 trains on 4 of them
    again = train("loose_again", 3, *STREAM, *loose, "trainer.runtime=local", "trainer.replay_from=loose")
    assert again.steps[-1]["replay/decisions_left"] == 1  # the weights of the last step
    ours, theirs = again.weights(3), beside.weights(3)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)


def test_requests_of_a_killed_replica_go_on_elsewhere_from_what_it_had_reported(train, task, monkeypatch, capsys):
    """Each part with the log-probs and the version that drew it; nothing of such a run is replayed with other bits."""
    stopped, killed, why = [], [], ReplicaKeeper._why_hung

    def kill_one_that_reported(keeper, replica, state=UNKNOWN):
        """Stop it first: one that still has requests by the next look has not answered them, however fast it is."""
        pid = replica.unit.members[0].pid
        if replica in stopped and not killed:
            stopped.remove(replica)
            os.kill(pid, signal.SIGKILL if state.requests else signal.SIGCONT)
            killed.extend([replica] if state.requests else [])
        elif state.reported > 100 and not stopped and not killed:
            stopped.append(replica)
            os.kill(pid, signal.SIGSTOP)
        return why(keeper, replica, state)

    monkeypatch.setattr(ReplicaKeeper, "_why_hung", kill_one_that_reported)
    loose = (*STREAM, *OWN_POOL, "actor_rollout_ref.rollout.full_determinism=false",
             "algorithm.rollout_correction.bypass_mode=true", "actor_rollout_ref.rollout.requests_at_update=pause",
             "actor_rollout_ref.rollout.max_replacements=2", "trainer.hang_seconds=60",
             "data.max_response_length=1500", "actor_rollout_ref.rollout.ignore_eos=true",
             "actor_rollout_ref.model.override_config.max_position_embeddings=2048")  # fmt: skip
    run = train("kept", 1, *loose)
    lines = records(run.folder / "journal.jsonl")
    kept = [line["kept"] for line in lines if line["event"] == "moved"]
    assert killed and kept and 5 < max(kept) < 1500, kept
    tokens = [line["tokens"] for line in lines if line["event"] == "sampled"]
    assert tokens and all(count == 1500 for column in tokens for count in np.atleast_1d(column))
    assert run.steps[-1]["training/off_policy/trajectory_staleness_worst/max"] <= 1
    assert ledger_reader.main([str(run.folder), "--step", "1"]) == 0 and "kept" in capsys.readouterr().out
    with pytest.raises(AssertionError):
        train("kept_again", 1, *loose, "trainer.replay_from=kept")
    assert "have the same bits only where other requests in the batch change none" in capsys.readouterr().err
