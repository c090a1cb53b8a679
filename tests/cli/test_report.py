"""The planner's page: what its charts draw, and that each command writes one with the tables it prints."""

from __future__ import annotations

import json
import re
from html import unescape
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest
from rich.table import Table

from tests.planner.test_proposal import QWEN
from verl.cli.planning import main
from verl.cli.report import Bar, PlanReport, bar_chart, planned_spans
from verl.planner.space import PlacementPlan, PoolPlan, RoleCost

SVG = "{http://www.w3.org/2000/svg}"


def rectangles(svg: str) -> dict[str, tuple[float, float]]:
    """Tooltip -> begin and width of each part of a bar."""
    return {
        rect[0].text or "": (float(rect.get("x", 0)), float(rect.get("width", 0)))
        for rect in ElementTree.fromstring(svg).iter(f"{SVG}rect")
        if len(rect)
    }


def test_parts_of_a_bar_stand_behind_each_other_and_are_as_long_as_they_are_large():
    svg = bar_chart("GB", [Bar("a", {"weights": 3.0, "kv_cache": 1.0}), Bar("b", {"kv_cache": 2.0})], ("room", 8.0))
    drawn = rectangles(svg)
    assert list(drawn) == ["a: weights 3", "a: kv cache 1", "b: kv cache 2"]
    (begin, weights), (second, cache), (third, larger) = drawn.values()
    assert weights == pytest.approx(3 * cache, abs=0.02) and larger == pytest.approx(2 * cache, abs=0.02)
    assert second == pytest.approx(begin + weights, abs=0.02) and third == begin
    (room,) = (line for line in ElementTree.fromstring(svg).iter(f"{SVG}line") if line.get("stroke-dasharray"))
    assert float(room.get("x1", 0)) == pytest.approx(begin + 8 * cache, abs=0.1)


def test_a_range_reaches_from_its_lowest_to_its_highest_value():
    svg = bar_chart("s", [Bar("step", {"likely": 4.0}, (2.0, 8.0))])
    ((begin, width),) = rectangles(svg).values()
    (path,) = ElementTree.fromstring(svg).iter(f"{SVG}path")
    low, high = re.match(r"M([\d.]+) [\d.]+H([\d.]+)", path.get("d", "")).groups()  # type: ignore[union-attr]
    assert float(low) == pytest.approx(begin + width / 2, abs=0.02)
    assert float(high) == pytest.approx(begin + 2 * width, abs=0.02)


@pytest.mark.parametrize("most", [3e-4, 0.07, 1.0, 12.4, 99.0, 8000.0])
def test_an_axis_has_a_few_round_numbers(most: float):
    svg = bar_chart("", [Bar("a", {"x": most})])
    ticks = [float(text.text or "") for text in ElementTree.fromstring(svg).iter(f"{SVG}text")
             if text.get("text-anchor") == "middle"]  # fmt: skip
    assert ticks[0] == 0 and 4 <= len(ticks) <= 11 and most / 1.5 < ticks[-1] <= most
    assert {f"{tick:e}"[:3] for tick in ticks[1:2]} <= {"1.0", "2.0", "5.0"}


def test_nothing_to_draw_is_an_empty_chart():
    assert rectangles(bar_chart("GB", [Bar("a", {"weights": 0.0})])) == {}


@pytest.mark.parametrize(("schedule", "generation"), [("sync", 4.0), ("async", 4.0), ("async", 11.0)])
def test_steps_of_a_plan_follow_each_other_by_its_seconds(schedule: str, generation: float):
    cost = RoleCost(generation, preparation=2.0, training=3.0)
    plan = PlacementPlan(schedule, (PoolPlan(8, {"actor": None}, {"actor": cost}),))
    spans = planned_spans(plan)
    ends = [span.end for span in spans if span.stage == "update_actor"]
    assert len(ends) == 3 and ends[2] - ends[1] == pytest.approx(plan.seconds)
    for stage in ("gen", "ref", "update_actor"):
        work = [span for span in spans if span.stage == stage]
        assert all(before.end <= after.begin for before, after in pairwise(work))
    if schedule == "sync":
        assert all(before.end == after.begin for before, after in pairwise(spans))


def test_a_page_shows_texts_as_they_are_and_loads_nothing():
    table = Table("role", title="<b>GB</b>")
    table.add_row("<script>alert(1)</script>")
    page = PlanReport(
        "verl.planner plan 'a=<img src=x>'", "1 < 2", [table], [bar_chart("<i>", [Bar("&", {"x": 1.0})])]
    ).html()
    assert not re.search(r"<(script|img|link|iframe|b|i)\b|url\(|@import", page)
    assert set(re.findall(r"https?://[^\"' ]+", page)) == {"http://www.w3.org/2000/svg"}
    assert "<script>alert(1)</script>" in unescape(page) and "1 &lt; 2" in page


@pytest.mark.parametrize(("command", "charts"), [("estimate", 2), ("plan", 2), ("simulate", 2)])
def test_each_command_writes_the_tables_that_it_prints(tmp_path: Path, capsys, command: str, charts: int):
    (tmp_path / "config.json").write_text(json.dumps(QWEN), encoding="utf-8")
    file = tmp_path / "report.html"
    words = [command, "--devices", "8xH100", "algorithm.adv_estimator=grpo", f"actor_rollout_ref.model.path={tmp_path}",
             "actor_rollout_ref.rollout.name=vllm", "actor_rollout_ref.rollout.n=8", "data.train_batch_size=64",
             "actor_rollout_ref.actor.ppo_mini_batch_size=64"]  # fmt: skip
    assert main([*words, "--report", str(file)]) == 0
    printed, page = capsys.readouterr().out, file.read_text(encoding="utf-8")
    svgs = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    assert len(svgs) == charts and all(rectangles(svg) for svg in svgs)
    assert f"--devices 8xH100 algorithm.adv_estimator=grpo actor_rollout_ref.model.path={tmp_path}" in unescape(page)
    cells = [unescape(cell) for cell in re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", page)]
    squeezed = re.sub(r"\s+", "", printed)
    assert (
        len(cells) > 10 and [cell for cell in cells if len(cell) < 9 and re.sub(r"\s+", "", cell) not in squeezed] == []
    )
    text = re.findall(r"<pre>(.*?)</pre>", page, re.DOTALL)[-1]
    assert printed.rstrip().endswith(unescape(text).rstrip())


def test_a_page_is_written_next_to_objects(tmp_path: Path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(QWEN), encoding="utf-8")
    file = tmp_path / "report.html"
    words = ["estimate", "--devices", "8xH100", f"actor_rollout_ref.model.path={tmp_path}", "--json"]
    assert main([*words, "--report", str(file)]) == 0
    assert json.loads(capsys.readouterr().out)["devices"] and file.read_text(encoding="utf-8").endswith("</html>\n")


@pytest.mark.parametrize(
    "words", [["estimate", "--report"], ["plan", "--report"], ["simulate", "--gantt"], ["calibrate"]], ids=" ".join
)
def test_a_file_that_cannot_be_written_is_refused_at_the_start(tmp_path: Path, capsys, words: list[str]):
    file = tmp_path / "absent" / "report.html"
    assert main([*words, str(file)]) == 2
    assert main([*words, str(tmp_path)]) == 2
    message = capsys.readouterr().err
    assert str(file) in message and "in a folder that is there" in message
