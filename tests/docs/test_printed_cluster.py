"""What the pages of schedules, replays, replicas, several nodes, profiles and debuggers print is run as it stands."""

from __future__ import annotations

import gzip
import inspect
import json
import os
import re
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.docs.printed import bash, block
from tests.docs.test_statements import blocks
from tests.harness.programs import replica_processes
from tests.harness.waiting import wait_until
from tests.sanity.source_tree import ROOT
from verl.engines.plain import PlainEngine

ASYNC, REPLAY, ELASTIC = "docs/howto/async.md", "docs/howto/replay.md", "docs/howto/elastic.md"
NODES, PROFILING, DEBUGGING = "docs/howto/multi_node.md", "docs/howto/profiling.md", "docs/howto/debugging.md"
RESHARDING = "docs/concepts/resharding.md"
RUN: dict[str, tuple[str, ...]] = {
    ASYNC: ("verl train grpo",),
    REPLAY: ("verl train grpo --preset", "verl train grpo --config"),
    ELASTIC: ("verl train grpo",),
    NODES: ("verl train grpo",),
    PROFILING: ("verl train grpo",),
    DEBUGGING: ("python -m pdb", "python -m verl.rewards.check"),
    RESHARDING: ("from verl.weight_sync.resharding",),
}
"""Page -> the starts of the blocks that a test of this file runs."""
NOT_RUN: dict[str, dict[str, str]] = {
    NODES: {
        "ray get-auth-token": "several machines",
        "HEAD_IP=": "several machines",
        "MASTER=": "several machines",
    },
}
"""Page -> the starts of the blocks that none runs, and what they need."""
QUICKSTART = "python examples/data_preprocess/arithmetic.py"


@pytest.fixture(scope="module")
def made(own_ray_folder: str, fine_tuned: Path) -> Path:
    return fine_tuned


def steps_of(folder: Path) -> list[dict[str, Any]]:
    """The metrics of each step of a run."""
    records = [json.loads(line)["data"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row for row in records if "critic/score/mean" in row]


@pytest.mark.slow
def test_the_printed_schedule_one_step_off_trains_on_the_last_version(made):
    bash(made, block(ASYNC, "verl train grpo"), total_training_steps="3")
    steps = steps_of(made / "my/ahead")
    assert [step["training/off_policy/trajectory_staleness/mean"] for step in steps] == [0, 1, 1]


@pytest.mark.slow
def test_the_printed_replay_ends_with_the_weights_of_the_recorded_run(made):
    bash(made, block(REPLAY, "verl train grpo --preset"), total_training_steps="2", save_freq="2")
    bash(made, block(REPLAY, "verl train grpo --config"))
    place = "global_step_2/actor/huggingface/model.safetensors"
    ours, theirs = (load_file(made / "my" / name / place) for name in ("replay", "first"))
    assert ours.keys() == theirs.keys() and all(ours[key].equal(theirs[key]) for key in ours)
    steps = steps_of(made / "my/replay")
    left = [step["replay/decisions_left"] for step in steps]
    assert len(left) == 2 and left[0] > left[1] and all(step["actor/grad_norm"] > 0 for step in steps)


@contextmanager
def under_way(folder: Path, script: str) -> Iterator[threading.Thread]:
    """A script that runs meanwhile, and has ended without an error afterwards."""
    errors: list[BaseException] = []

    def work() -> None:
        try:
            bash(folder, script)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield thread
    finally:
        thread.join()
        if errors:
            raise errors[0]


@pytest.mark.slow
def test_the_page_of_replicas_replaces_one_that_is_killed(made):
    folder = made / "my/elastic"
    with under_way(made, block(ELASTIC, "verl train grpo")) as run:
        wait_until(lambda: (folder / "metrics.jsonl").exists() or not run.is_alive())
        os.kill(min(replica_processes()), signal.SIGKILL)
    steps = steps_of(folder)
    assert len(steps) == 50 and steps[-1]["rollout/replicas/replaced"] == 1 <= steps[-1]["rollout/replicas/alive"]


@pytest.mark.slow
def test_the_page_of_several_nodes_trains_with_two_processes(made):
    printed = bash(made, f"exec 2>&1\n{block(NODES, 'verl train grpo')}", total_training_steps="2")
    assert "trainer.runtime: the run uses a Ray cluster of its own with 1 node(s)" in printed
    assert re.search(r"^(topology: )?2 processes on Ray$", printed, re.MULTILINE)
    assert len(steps_of(made / "my/two")) == 2


@pytest.mark.slow
def test_the_printed_profile_has_the_ranges_that_its_page_names(made):
    bash(made, block(PROFILING, "verl train grpo"), total_training_steps="2")
    with gzip.open(made / "outputs/profile/step_2/actor_rank0.json.gz") as file:
        names = {event.get("name") for event in json.load(file)["traceEvents"]}
    assert {"actor/train", "rollout/generate_sequences"} <= names
    assert not (made / "outputs/profile/step_1").exists()


@pytest.mark.slow
def test_a_debugger_stops_in_the_engine_of_the_printed_run(made):
    code = inspect.unwrap(PlainEngine.train_batch).__code__
    within = sorted({line for *_, line in code.co_lines() if line})[1]
    typed = rf"b {code.co_filename}:{within}\nc\ncl 1\nc\nq\n"
    printed = bash(made, f"printf '{typed}' | {block(DEBUGGING, 'python -m pdb')}")
    assert re.search(rf"> {re.escape(code.co_filename)}\({within}\)train_batch\(\)", printed)
    assert "step:1 - " in printed


def test_the_page_of_debugging_checks_a_reward_function(tmp_path):
    bash(tmp_path, block("docs/start/quickstart.md", QUICKSTART).splitlines()[0])
    printed = bash(tmp_path, block(DEBUGGING, "python -m verl.rewards.check"))
    assert "reward function compute_score" in printed and "│   1 │ arithmetic" in printed


def test_the_page_of_resharding_shows_the_plan_that_its_code_prints(capsys):
    exec(block(RESHARDING, "from verl.weight_sync.resharding"), {})
    printed = capsys.readouterr().out
    (shown,) = blocks(ROOT / RESHARDING, "text")
    assert len(shown.splitlines()) == 3 and printed.startswith(shown)
