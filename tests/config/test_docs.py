"""The committed page is the generated one, and it has every setting with what is known about it."""

import json
import re
from pathlib import Path

import pytest

from scripts import generate_config_docs
from verl.config.docs import page
from verl.config.groups import PPO, SFT
from verl.config.node import UNSET, leaves
from verl.config.outline import parts
from verl.config.schema import schema_of

COVERAGE = Path(__file__).with_name("coverage.json")
"""Which test covers a setting: {"ppo_trainer": {key: test id}, ...}."""


@pytest.fixture(scope="module")
def text():
    return page()


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
    monkeypatch.setattr(generate_config_docs, "PAGE", tmp_path / "docs" / "configuration.md")
    assert generate_config_docs.main(["--check"]) == 1
    assert "docs/configuration.md is old" in capsys.readouterr().out
    assert generate_config_docs.main([]) == 0 and generate_config_docs.main(["--check"]) == 0


@pytest.mark.parametrize("program", [PPO, SFT], ids=lambda program: program.name)
def test_every_setting_is_on_the_page_once(program):
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
    assert clip[1:] == ["`null`", "clip below alone; null: clip_ratio"]
    assert rows["`use_fused_kernels`"][1] == "= `actor_rollout_ref.model.use_fused_kernels`"
    assert "*no effect: actor_rollout_ref.model.use_fused_kernels is what counts*" in rows["`use_fused_kernels`"][2]
    engines = {cells[0]: cells for cells in tables["actor_rollout_ref.rollout"]}
    assert engines["`quantization`"][2].endswith("*works with rollout.name=vllm or sglang; refused with others*")


def test_every_setting_that_nothing_follows_is_listed_with_its_feature_or_its_reason(text):
    known, effect = (text.partition(f"## {title}\n")[2].partition("\n## ")[0] for title in TITLES)
    for program in (PPO, SFT):
        for key, leaf in schema_of(program.root).upstream_only.items():
            line = next(line for line in (known if leaf.planned else effect).splitlines() if _is_row(line, leaf))
            assert any(f"`{key[cut:]}`" in line for cut in range(len(key))), key


TITLES = ("Known and not built yet", "Known and without effect")


def _is_row(line, leaf):
    return line.startswith(f"| {leaf.planned or leaf.no_effect} |")


def test_a_repeated_section_is_listed_once_with_its_places_and_their_defaults(text):
    assert text.count("### `actor_rollout_ref.actor.optim`") == 1 and "### `critic.optim`" not in text
    implicit = "`reward.reward_model.implicit.optim` (weight_decay: `0.0`, clip_grad: `10.0`)"
    assert (
        f"The same under `critic.optim` (lr: `1e-05`), {implicit} and `optim` of supervised runs (lr: `0.001`)." in text
    )
    assert "All settings of `actor_rollout_ref.model`, of which these are declared anew or added." in text


def test_every_deviation_from_upstream_stands_in_the_first_table(tables):
    listed = " ".join(cells[0] for cells in tables["Defaults that deviate from upstream"])
    for root, said in ((PPO.root, "`"), (SFT.root, "` of supervised runs")):
        own = {key: row for key, row in leaves(root) if row.metadata["upstream"] is not UNSET}
        for key in own:
            inherited = key.startswith(("critic.model.", "engine."))  # listed where they are declared
            assert inherited or f"`{key}{said}" in listed, key


def test_every_older_spelling_stands_in_the_last_table(tables):
    listed = [cells[0].strip("`") for cells in tables["Older spellings"]]
    known = [key for program in (PPO, SFT) for table in vars(program.aliases).values() for key in table]
    assert listed == known


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
