"""Every fact of the guides, one case per row: commands and files resolve, and what is not built is refused by name."""

from __future__ import annotations

import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from scripts import generate_coverage
from tests.brief import test_runs
from tests.brief.machine import guides_machine, resolve
from tests.brief.small import small, swapped
from tests.brief.states import REFUSED, SAME, WRONG, is_trained, of_attempt, of_name, of_program, trained
from tests.brief.table import Attempt, Row, rows
from tests.sanity.public_names import PENDING_FILE
from tests.sanity.source_tree import ROOT, read_toml
from tests.trainer.on_ray import test_starts
from verl import env
from verl.metrics import notices, reset_notices

COMMANDS = [
    pytest.param(attempt, id=f"{row.id}-{number}")
    for row in rows()
    for number, attempt in enumerate(row.config, start=1)
]


@pytest.fixture
def machine(tmp_path: Path):
    with guides_machine(tmp_path):
        yield tmp_path
    reset_notices()


def cases(field: str) -> list:
    return [pytest.param(row, id=str(row.id)) for row in rows() if getattr(row, field)]


def test_every_fact_of_the_specification_is_a_row(shared):
    text = (shared / "spec" / "UPSTREAM.md").read_text(encoding="utf-8")
    section = text.split("\n## 1. ")[1].split("\n## 2. ")[0]
    assert [row.id for row in rows()] == [int(n) for n in re.findall(r"^\| (\d+) \|", section, re.MULTILINE)]


def test_the_committed_page_says_what_has_become_of_every_row():
    made = generate_coverage.page()
    assert generate_coverage.PAGE.read_text(encoding="utf-8") == made, "run scripts/generate_coverage.py"


@pytest.mark.parametrize("row", [pytest.param(row, id=str(row.id)) for row in rows()])
def test_a_row_is_looked_after_somewhere(row: Row):
    assert row.config or row.programs or row.names or row.files or row.docs or row.extras
    assert row.says and not row.says.endswith(".")


@pytest.mark.parametrize("attempt", COMMANDS)
def test_a_command_of_the_guides_resolves_or_is_refused_by_name(machine, attempt: Attempt):
    outcome = of_attempt(attempt)
    if attempt.wrong:
        assert outcome.state == WRONG and attempt.wrong in str(outcome.error)
        return
    if outcome.state == REFUSED:
        assert outcome.by, f"no setting is named: {outcome.error}"
        assert "not built" in str(outcome.error)
        return
    config = resolve(attempt)
    for key, value in attempt.values.items():
        node = config
        for part in key.split("."):
            node = node[part]
        assert node == value, key
    assert set(attempt.notices) <= set(notices())


def test_trained_here_is_said_only_of_commands_that_a_test_runs_as_they_are_printed(machine):
    """Every one of such a row is a case of a test, which gives it small sizes and nothing else."""
    alone, ranks = ([case.values[0] for case in cases] for cases in (test_runs.COMMANDS, test_starts.GUIDES))
    for row in (row for row in rows() if trained(row).word == SAME):
        assert row.config and not row.instead
        for attempt in row.config:
            if not attempt.wrong and of_attempt(attempt).state != REFUSED:
                assert attempt in ranks or (attempt in alone and not swapped(attempt)), (row.id, attempt.argv)


@pytest.mark.parametrize("attempt", [case for case in COMMANDS if case.values[0].ranks or case.values[0].runs])
def test_what_is_made_small_keeps_engines_samplers_and_processes(machine, attempt: Attempt):
    if attempt.program != "ppo_trainer" or of_attempt(attempt).state == REFUSED:
        return
    for folder in ("model", "scorer.py", "train.parquet"):
        (machine / folder).exists() or (machine / folder).write_text("{}")
    printed, here = resolve(attempt), resolve(replace(attempt, argv=shlex.join(small(attempt, rows=8))))
    for key in ("actor_rollout_ref.rollout.name", "actor_rollout_ref.rollout.tensor_model_parallel_size",
                "actor_rollout_ref.actor.strategy", "critic.strategy", "trainer.resource_pools", "trainer.nnodes",
                "trainer.n_gpus_per_node", "actor_rollout_ref.hybrid_engine"):  # fmt: skip
        ours, theirs = here, printed
        for part in key.split("."):
            ours, theirs = ours[part], theirs[part]
        assert ours == theirs, key


@pytest.mark.parametrize(
    ("row", "says"),
    [
        (8, "vLLM"),
        (9, "Liger"),
        (76, "refused by name"),
        (88, "vLLM on 8 devices"),
        (99, "Liger's kernels need a GPU"),
        (100, "flash_attention_2 needs a GPU"),
        (103, "fp8 needs a GPU"),
        (131, "none of them"),
    ],
)
def test_rows_that_were_never_run_as_printed_say_why(machine, row: int, says: str):
    """vLLM on eight devices, the scripts with vLLM, vision models, Liger, flash attention, FP8, others' projects."""
    found = next(one for one in rows() if one.id == row)
    assert trained(found).word == "no" and says in "; ".join(trained(found).why) and not found.hardware


def test_one_process_with_the_built_in_sampler_is_told_apart_from_what_is_printed(machine):
    attempt = Attempt("actor_rollout_ref.rollout.name=vllm trainer.n_gpus_per_node=8", runs=True)
    assert swapped(attempt) == ["plain for fsdp2", "hf for vllm", "1 process for 8"] and not is_trained(attempt)


@pytest.mark.parametrize("row", cases("hardware"))
def test_a_page_that_says_what_ran_on_the_hardware_says_it(row: Row):
    for page, words in row.hardware:
        assert words in " ".join((ROOT / page).read_text(encoding="utf-8").split())


@pytest.mark.parametrize("row", cases("programs"))
def test_a_program_of_the_guides_can_be_run_or_is_listed_as_not_built(row: Row):
    page = (ROOT / "docs" / "appendix" / "coverage.md").read_text(encoding="utf-8")
    for module in row.programs:
        is_told = f"`python -m {module}`: not built" in page
        assert is_told == (of_program(module).state == REFUSED), module


@pytest.mark.parametrize("row", cases("names"))
def test_a_public_name_can_be_imported_or_is_listed_as_pending(row: Row):
    pending = PENDING_FILE.read_text(encoding="utf-8").split()
    assert [name for name in row.names if of_name(name).state == REFUSED and name not in pending] == []


@pytest.mark.parametrize("row", [p for field in ("files", "tests") for p in cases(field)])
def test_a_file_that_a_row_names_is_there(row: Row):
    assert [name for name in (*row.files, *row.tests) if not (ROOT / name.partition("::")[0]).exists()] == []


@pytest.mark.parametrize("row", cases("docs"))
def test_a_sentence_that_a_row_names_is_there(row: Row):
    for page, words in row.docs:
        text = " ".join((ROOT / page).read_text(encoding="utf-8").split())
        assert words in text, f"{page} does not say {words!r}"


@pytest.mark.parametrize("row", cases("extras"))
def test_an_extra_that_a_row_names_can_be_installed(row: Row):
    extras = read_toml(ROOT / "pyproject.toml")["project"]["optional-dependencies"]
    assert set(row.extras) <= set(extras)


@pytest.mark.parametrize("row", cases("environment"))
def test_a_variable_that_a_row_names_reaches_the_workers(row: Row):
    shell = dict.fromkeys(row.environment, "1")
    assert env.forwarded({**shell, "OTHER": "2"}) == shell
