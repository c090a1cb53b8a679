"""The committed pages are the generated ones, and have every setting with its meaning, default and status."""

import json
import re
from pathlib import Path

import pytest

from scripts import generate_config_docs
from scripts.config_outline import parts
from scripts.config_page import pages
from scripts.generate_config_docs import RECIPES
from verl.config.loading.groups import PPO, SFT
from verl.config.loading.recipes import with_recipes
from verl.config.schema.node import ABSENT, UNSET, leaves, schema_of

COVERAGE = Path(__file__).with_name("coverage.json")
"""Which test covers a setting: {"ppo_trainer": {key: test id}, ...}."""


def expanded(text):
    """Every name in code marks, `a.{b, c}` as `a.b` and `a.c`."""
    found = []
    for name in re.findall(r"`([^`]+)`", text):
        parent, brace, inside = name.partition("{")
        found += [f"{parent}{last}" for last in inside.rstrip("}").split(", ")] if brace else [name]
    return found


MOST_BYTES = {"configuration.md": 95_000, "configuration_more.md": 30_000}


@pytest.fixture(scope="module")
def text():
    """Both pages, one below the other."""
    return "\n".join(pages(RECIPES).values())


@pytest.fixture(scope="module")
def tables(text):
    """Heading -> the rows below it, each as its list of cells."""
    found = {}
    for chapter in re.split(r"^#{2,3} ", text, flags=re.MULTILINE)[1:]:
        heading, _, body = chapter.partition("\n")
        rows = [line.strip("| ").split(" | ") for line in body.splitlines() if line.startswith("| `")]
        found.setdefault(heading.replace("`", ""), []).extend(rows)
    return found


def test_the_committed_files_are_the_generated_ones():
    for file, text in generate_config_docs.made().items():
        assert file.read_text(encoding="utf-8") == text, "run scripts/generate_config_docs.py"


def test_the_script_says_whether_the_page_is_current(capsys, monkeypatch, tmp_path):
    assert generate_config_docs.main(["--check"]) == 0
    monkeypatch.setattr(generate_config_docs, "ROOT", tmp_path)
    assert generate_config_docs.main(["--check"]) == 1
    said = capsys.readouterr().out
    assert all(f"docs/reference/{name} is old" in said for name in MOST_BYTES)
    assert generate_config_docs.main([]) == 0 and generate_config_docs.main(["--check"]) == 0


@pytest.mark.parametrize("program", [PPO, SFT], ids=lambda program: program.name)
def test_every_setting_is_on_the_pages_once(program):
    """Counted in the outline: each leaf of the tree is a row of exactly one part, at one of that part's places."""
    listed = []
    for part in parts():
        names = list(part.rows)
        base = part.base
        while base is not None:
            names += [name for name in base.rows if name not in names]
            base = base.base
        listed += [place.leaf(name) for place in part.places if place.program is program for name in names]
    assert sorted(listed) == sorted(schema_of(program.root).leaves)


def test_a_row_says_what_a_setting_is_and_what_becomes_of_it(tables):
    rows = {cells[0]: cells for cells in tables["actor_rollout_ref.actor"]}
    clip = rows["`clip_ratio_low`"]
    assert clip[1:] == ["`null`", "lower clip range; null: clip_ratio"]
    assert rows["`use_fused_kernels`"][1] == "= `actor_rollout_ref.model.use_fused_kernels`"
    assert "*no effect: actor_rollout_ref.model.use_fused_kernels decides*" in rows["`use_fused_kernels`"][2]
    engines = {cells[0]: cells for cells in tables["actor_rollout_ref.rollout"]}
    assert engines["`scheduling_policy`"][2].endswith("*works with rollout.name=vllm; refused with others*")


def test_every_setting_that_nothing_follows_is_listed_with_its_feature_or_its_reason(text):
    known, effect = (text.partition(f"## {title}\n")[2].partition("\n## ")[0] for title in TITLES)
    for program in (PPO, SFT):
        for key, leaf in schema_of(program.root).upstream_only.items():
            line = next(line for line in (known if leaf.planned else effect).splitlines() if _is_row(line, leaf))
            assert any(key == name or key.endswith(f".{name}") for name in expanded(line)), key


TITLES = ("Known and not built yet", "Known and without effect")


def _is_row(line, leaf):
    return line.startswith(f"| {leaf.planned or leaf.no_effect} |")


def test_a_repeated_section_is_listed_once_with_its_places_and_their_defaults(text):
    assert text.count("### `actor_rollout_ref.actor.optim`") == 1 and "### `critic.optim`" not in text
    assert "The same under `critic.optim` (lr: `1e-05`) and `optim` of supervised runs (lr: `0.001`)." in text
    assert "All settings of `actor_rollout_ref.model`, of which these are redefined or added." in text


def test_every_deviation_from_upstream_stands_in_the_first_chapter(tables, text):
    listed = " ".join(cells[0] for cells in tables["Defaults that deviate from upstream"])
    absent = expanded(text.partition("Upstream does not have these")[2].partition("\n## ")[0])
    first = {place.leaf(name) for part in parts() for place in part.places[:1] for name in part.rows}
    for root, said in ((PPO.root, "`"), (SFT.root, "` of supervised runs")):
        own = {key: row for key, row in leaves(root) if row.metadata["upstream"] is not UNSET}
        for key, row in own.items():
            listed_here = key in absent if row.metadata["upstream"] == ABSENT else f"`{key}{said}" in listed
            assert listed_here == (key in first) or root is SFT.root, key  # a section is named by its first place
    assert "`engine.strategy` of supervised runs" in listed and "data.filter_invalid" in absent


def test_every_older_spelling_stands_in_the_last_chapter(text):
    chapter = text.partition("## Older spellings\n")[2]
    listed = [name for row in re.findall(r"^\| (`.*?) \| ", chapter, re.MULTILINE) for name in expanded(row)]
    aliases = (PPO.aliases, *(recipe.aliases for recipe in RECIPES), SFT.aliases)
    known = [key for tables in aliases for table in vars(tables).values() for key in table]
    assert sorted(listed) == sorted(known)


def test_an_older_spelling_says_where_its_setting_is_now(text):
    chapter = text.partition("## Older spellings\n")[2]
    assert "| `trainer.profile_steps` | `global_profiler.steps` |" in chapter
    assert re.search(
        r"\| `critic\.\{tensor_model_parallel_size, .*sequence_parallel\}` \| `critic\.megatron\.\*` \|", chapter
    )


def test_the_pages_stay_short():
    sizes = {name: len(text.encode()) for name, text in pages(RECIPES).items()}
    assert sizes.keys() == MOST_BYTES.keys() and all(size < MOST_BYTES[name] for name, size in sizes.items()), sizes


def test_a_chapter_stands_on_the_page_of_its_program():
    chapters = [re.findall(r"^## (.*)$", text, re.MULTILINE) for text in pages(RECIPES).values()]
    assert chapters == [
        ["Defaults that deviate from upstream", "RL runs", *TITLES],
        ["Supervised runs", "Settings of recipes", "Older spellings"],
    ]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_every_setting_of_a_recipe_is_on_the_pages(tables, recipe):
    listed = [cells[0].strip("`") for cells in tables[recipe.name]]
    own = schema_of(with_recipes(PPO, [recipe]).root).leaves.keys() - schema_of(PPO.root).leaves.keys()
    assert own and {key for key in own if key not in listed} == {key for key in own if ".optim." in key}
    assert set(listed) - own <= {"reward.reward_model.implicit.optim"}


CRYPTIC = re.compile(r"\bsee \d|\bsince 0\.|\bas actor\b|\bfollows \w+$|2\.1\.\d|``|\bTODO\b|^[a-z]+$")


@pytest.mark.parametrize("program", [PPO, SFT], ids=lambda program: program.name)
def test_meanings_need_no_other_document(program):
    said = {key: row.metadata["meaning"] for key, row in leaves(program.root)}
    assert {key: text for key, text in said.items() if CRYPTIC.search(text) or len(text) < 8} == {}


def test_every_section_has_a_description():
    for part in parts():
        said = (part.cls.__doc__ or "").split("\n")[0]
        assert said.endswith(".") and "``" not in said and len(said.split()) >= 2, part.cls


def test_what_is_said_to_cover_a_setting_exists():
    programs = {program.name: schema_of(program.root).leaves for program in (PPO, SFT)}
    for name, tests in json.loads(COVERAGE.read_text(encoding="utf-8")).items():
        for key, test in tests.items():
            file, _, function = test.partition("::")
            source = generate_config_docs.ROOT / file
            assert key in programs[name], f"{name}: {key} is no setting"
            assert source.is_file(), f"{name}: {key}: no file {file}"
            assert f"def {function.partition('[')[0]}(" in source.read_text(encoding="utf-8"), f"{key}: no {test}"
