"""Every fact of the guides, one case per row: commands and files resolve, and what is not built is refused by name."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from scripts import generate_coverage
from tests.brief.machine import guides_machine, resolve
from tests.brief.small import small, swapped
from tests.brief.states import REFUSED, SAME, WRONG, of_attempt, of_name, of_program, trained
from tests.brief.table import Attempt, Row, rows
from tests.sanity.public_names import PENDING_FILE
from tests.sanity.source_tree import ROOT, read_toml
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


def test_trained_here_is_said_only_of_what_the_tests_run_as_it_is_printed(machine):
    """The small run of such a command has the printed engine, sampler and number of processes."""
    for row in rows():
        if trained(row).word != SAME:
            continue
        assert row.config and not row.instead
        for attempt in (attempt for attempt in row.config if not attempt.wrong):
            assert attempt.runs or of_attempt(attempt).state == REFUSED
            words = small(attempt)
            if attempt.program == "ppo_trainer" and attempt.runs and not attempt.yaml:
                changes = {"actor_rollout_ref.model.path", "critic.model.path", "data.train_files", "data.val_files",
                           "reward.custom_reward_function.path"}  # fmt: skip
                sizes = [word for word in words if word.partition("=")[0] not in changes]
                here, printed = resolve(Attempt(shlex.join(sizes))), resolve(attempt)
                assert here.actor_rollout_ref.rollout.name == printed.actor_rollout_ref.rollout.name
                assert here.actor_rollout_ref.actor.strategy == printed.actor_rollout_ref.actor.strategy
                assert printed.trainer.nnodes * (printed.trainer.n_gpus_per_node or 1) == 1


@pytest.mark.parametrize(
    ("row", "says"),
    [(8, "hf for vllm"), (9, "no Liger"), (76, "not built"), (131, "none of them")],
)
def test_rows_that_were_never_run_as_printed_say_what_was_run(row: int, says: str):
    found = next(one for one in rows() if one.id == row)
    assert says in found.instead and trained(found).word == "no" and not found.hardware


def test_a_sampler_on_eight_devices_is_not_trained_here(machine):
    """vLLM with a tensor-parallel size of 8 resolves, and nothing here has run it."""
    found = [one for one in rows() if any("tensor_parallel_size=8" in a.argv and "=vllm" in a.argv for a in one.config)]
    assert found and all(trained(one).word == "no" and not one.hardware for one in found)
    attempt = Attempt("actor_rollout_ref.rollout.name=vllm trainer.n_gpus_per_node=8")
    assert swapped(attempt) == ["plain for fsdp2", "hf for vllm", "1 process for 8"]


@pytest.mark.parametrize("row", cases("hardware"))
def test_a_page_that_says_what_ran_on_the_hardware_says_it(row: Row):
    for page, words in row.hardware:
        assert words in " ".join((ROOT / page).read_text(encoding="utf-8").split())


@pytest.mark.parametrize("row", cases("programs"))
def test_a_program_of_the_guides_can_be_run_or_is_listed_as_not_built(row: Row):
    page = (ROOT / "docs" / "coverage.md").read_text(encoding="utf-8")
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
