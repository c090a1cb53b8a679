"""What every recipe has, and the script that draws their curves."""

from __future__ import annotations

import re
import threading
from pathlib import Path

import pytest

from scripts.recipe_curves import COMPARED, SCORE, around, curves, judging, runs, table
from tests.sanity.source_tree import ROOT

OTHER_FIRSTS = ("spo", "spin", "online_dpo", "collabllm", "distillation", "one_step_off_policy", "fully_async_policy",
                 "fapo")  # fmt: skip
"""Their first step has other prompts, another number of answers to each, longer conversations, or another scale."""
LOWEST = {"fapo": -1.0}
"""The smallest score where it is not 0."""
HELD = {"collabllm": 314, "prime": 431, "rep_exp": 264}
"""Lines of recipes with more than 200; these numbers may only fall."""
NO_PARTS = ("__init__", "settings", "trial")
WITH_PAPERS = sorted(page.parent.name for page in (ROOT / "recipe").glob("*/README.md"))


def test_a_cell_is_the_mean_over_three_steps_and_the_seeds():
    rising = [step / 100 for step in range(1, 41)]
    assert around(rising, 1) == pytest.approx(0.015) and around(rising, 20) == pytest.approx(0.2)
    assert around(rising, 40) == pytest.approx(0.395)
    made = table({"A": [rising, [0.5] * 40], "B": [[0.25] * 40]}, 40)
    assert made.splitlines()[0] == "| step | 1 | 10 | 20 | 30 | 40 |"
    assert "| A | 0.26 (0.01 to 0.50) | 0.30 (0.10 to 0.50) | 0.35 (0.20 to 0.50) |" in made
    assert "| B | 0.25 | 0.25 | 0.25 | 0.25 | 0.25 |" in made


def test_a_judge_of_a_run_that_fails_is_ended():
    before = threading.active_count()
    with pytest.raises(ZeroDivisionError), judging():
        raise ZeroDivisionError
    assert threading.active_count() == before


@pytest.mark.slow
@pytest.mark.parametrize("recipe", COMPARED)
def test_every_run_of_a_curve_starts_and_has_a_score_of_each_step(workplace: Path, recipe: str):
    """By the ``main`` of its recipe."""
    if recipe == "langgraph_agent":
        pytest.importorskip("langgraph")
    made = curves(recipe, 2, [0], [SCORE, "response_length/mean"])
    names = list(runs(recipe, 2, "http://judge"))
    assert list(made) == [label for name in names for label in (name, f"{name}, `response_length/mean`")]
    assert {len(curve) for of_seeds in made.values() for curve in of_seeds} == {2}
    firsts = [made[name][0][0] for name in names]
    assert all(LOWEST.get(recipe, 0) <= first < 0.4 for first in firsts), (
        "before the first update all are one new model"
    )
    assert firsts[0] == pytest.approx(firsts[1], abs=1e-3) or recipe in OTHER_FIRSTS


@pytest.mark.parametrize("recipe", COMPARED)
def test_a_recipe_is_compared_with_grpo_by_as_many_answers_per_step(recipe: str):
    compared = runs(recipe, 40, "http://judge")
    assert next(iter(compared)).startswith("GRPO") and len(compared) >= 2
    for _, words in compared.values():
        settings = dict(word.split("=", 1) for word in words if word.count("=") == 1)
        batch = int(settings.get("data.train_batch_size", 8)) * int(settings.get("actor_rollout_ref.rollout.n", 4))
        assert batch == 32
    folder = ROOT / "recipe" / recipe
    page = (folder / "README.md" if folder.is_dir() else ROOT / "docs" / "howto" / f"{recipe}.md").read_text()
    assert f"python scripts/recipe_curves.py {recipe} --seeds" in page


@pytest.mark.parametrize("recipe", WITH_PAPERS)
def test_a_recipe_names_its_source_and_its_program_and_is_short(recipe):
    folder = ROOT / "recipe" / recipe
    page = (folder / "README.md").read_text()
    program = re.search(rf"python -m (recipe\.{recipe}\.\w*main\w*)", page)
    assert program and (ROOT / f"{program[1].replace('.', '/')}.py").is_file()
    parts = [file for file in folder.glob("*.py") if "main" not in file.stem and file.stem not in NO_PARTS]
    assert sum(len(file.read_text().splitlines()) for file in parts) <= HELD.get(recipe, 200)


def test_recipes_are_listed(project_root: Path):
    listed = (project_root / "docs/howto/index.md").read_text()
    assert [name for name in WITH_PAPERS if f"recipe/{name}/README.md" not in listed] == []
