"""The committed YAML files show the tree as it is: what they say, a run without them has."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import verl
from verl.config.groups import PPO
from verl.config.loading import read_config
from verl.config.schema import schema_of

FOLDER = Path(verl.__file__).parent / "trainer" / "config"


def read(folder: Path, name: str):
    return read_config("ppo_trainer", ["--config-path", str(folder), "--config-name", name])


@pytest.mark.parametrize("name", ["ppo_trainer", "ppo_megatron_trainer"])
@pytest.mark.parametrize("prefix", ["", "_generated_"])
def test_a_run_with_the_file_is_the_run_without_it(name, prefix):
    assert read(FOLDER, f"{prefix}{name}") == read_config(name, [])


def test_the_file_to_copy_from_has_every_setting_that_works_once_its_lines_count(tmp_path):
    text = (FOLDER / "every_setting.yaml").read_text(encoding="utf-8")
    setting = re.compile(r"^( *)# (\w+: )", re.MULTILINE)
    assert len(setting.findall(text)) == sum(leaf.planned is None for leaf in schema_of(PPO.root).leaves.values())
    (tmp_path / "all.yaml").write_text(setting.sub(r"\1\2", text), encoding="utf-8")
    assert read(tmp_path, "all") == read_config("ppo_trainer", [])
    assert not [line for line in text.splitlines() if re.search(r"\bnot built\b", line)]


def test_a_line_that_is_uncommented_and_changed_counts(tmp_path):
    text = (FOLDER / "every_setting.yaml").read_text(encoding="utf-8")
    changed, count = re.subn(r"# rollout_is_level: token\b", "rollout_is_level: sequence", text)
    (tmp_path / "mine.yaml").write_text(changed, encoding="utf-8")
    assert count == 1 and read(tmp_path, "mine").algorithm.rollout_is_level == "sequence"
