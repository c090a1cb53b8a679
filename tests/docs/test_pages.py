"""Every page that guides name is there, found from the index, and the generated ones and pictures are current."""

from __future__ import annotations

import re
import xml.etree.ElementTree as xml

import pytest

from scripts import draw_architecture, generate_baselines, generate_readme
from tests.sanity.source_tree import ROOT

DOCS = ROOT / "docs"
NAMED = {
    "installation": "start/install.md",
    "quickstart": "start/quickstart.md",
    "prepare data": "howto/data.md",
    "reward function": "howto/rewards.md",
    "PPO architecture": "concepts/architecture.md",
    "configuration": "reference/configuration.md",
    "GSM8K walk-through": "howto/gsm8k.md",
    "baselines": "appendix/baselines.md",
    "trainer": "concepts/backends.md",
    "backends": "concepts/backends.md",
    "placement": "howto/placement.md",
    "extending to other algorithms": "howto/extending.md",
    "adding a model": "howto/models.md",
    "multi-turn": "howto/multi_turn.md",
    "performance tuning": "howto/perf_tuning.md",
    "supervised fine-tuning": "howto/sft.md",
    "DPO and reward models": "howto/preference.md",
    "evaluation": "howto/evaluation.md",
    "several nodes": "howto/multi_node.md",
    "debugging": "howto/debugging.md",
    "troubleshooting": "howto/troubleshooting.md",
    "ROCm": "howto/rocm.md",
    "citation": "appendix/citation.md",
}
LINK = re.compile(r"\]\(([\w./]+\.md)")


@pytest.mark.parametrize("topic", NAMED)
def test_a_page_that_guides_name_is_there_and_says_something(topic):
    text = (DOCS / NAMED[topic]).read_text(encoding="utf-8")
    assert text.startswith("# ") and len(text.splitlines()) >= 10


def test_every_page_is_found_from_the_index():
    linked = {DOCS / "index.md"}
    for _ in ("parts", "pages"):  # the index names the parts, and their indexes the pages
        for index in [page for page in linked if page.name == "index.md"]:
            linked |= {(index.parent / link).resolve() for link in LINK.findall(index.read_text(encoding="utf-8"))}
    assert {*DOCS.rglob("*.md")} - linked == set(), "add these pages to the index of their folder"


def test_both_ways_of_adding_a_model_are_described():
    text = (DOCS / "howto" / "models.md").read_text(encoding="utf-8")
    assert "## Adding a model with the FSDP backend" in text
    assert "## Adding a model with the Megatron-LM backend" in text


def test_the_picture_of_the_architecture_is_drawn_from_the_code():
    made = draw_architecture.picture()
    assert draw_architecture.TARGET.read_text(encoding="utf-8") == made, "run scripts/draw_architecture.py"
    texts = [node.text for node in xml.fromstring(made).iter() if node.tag.endswith("text")]
    assert {"collect", "learn", "update_actor"} <= set(texts)


def test_the_picture_has_the_stages_in_the_order_of_the_loop():
    names = [name for _, name in draw_architecture.in_order(draw_architecture.stages())]
    wanted = ["gen", "reward", "old_log_prob", "ref", "values", "adv", "update_critic", "update_actor"]
    assert [name for name in names if name in wanted] == wanted


def test_the_readme_says_what_works_and_what_is_refused():
    text = generate_readme.PAGE.read_text(encoding="utf-8")
    assert generate_readme.page(text) == text, "run scripts/generate_readme.py"
    assert "`grpo`" in generate_readme.table() and generate_readme.table().count("\n") == 10


def test_the_baselines_are_those_that_the_script_has_noted():
    noted = generate_baselines.noted()
    assert set(noted) <= set(generate_baselines.MEASURES) and "scorers" in noted
    made = generate_baselines.page(noted)
    assert generate_baselines.PAGE.read_text(encoding="utf-8") == made, "run scripts/generate_baselines.py"
    for one in generate_baselines.MEASURES.values():
        assert (ROOT / one.words[0]).is_file()


def test_a_measurement_is_read_off_what_its_command_prints(monkeypatch, tmp_path):
    (tmp_path / "speed.py").write_text("print('| fast | 1,234 | 5 |')")
    one = generate_baselines.Measure("speed", (str(tmp_path / "speed.py"),), {"fast": r"^\| fast \| ([0-9,]+) \|"})
    monkeypatch.setattr(generate_baselines, "MEASURES", {"speed": one})
    found = generate_baselines.measure("speed")
    assert found["results"] == {"fast": "1,234"}
    page = generate_baselines.page({"speed": found})
    assert "| `speed` | speed |" in page and "fast: 1,234" in page
    (tmp_path / "speed.py").write_text("print('nothing')")
    with pytest.raises(SystemExit, match="printed no fast"):
        generate_baselines.measure("speed")
