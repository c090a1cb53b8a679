"""One pool on few devices, several on many: the search with the cost model of HybridFlow, and the page of it."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

from verl.planner.search import PlacementSearch
from verl.planner.space import RoleCost, SearchSpace

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "placement_crossovers.py"


def crossovers(monkeypatch):
    """The benchmark as a module."""
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    spec = importlib.util.spec_from_file_location("placement_crossovers", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "placement_crossovers", module)
    spec.loader.exec_module(module)
    return module


def rows_of(text):
    cells = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")
    ]
    return {(row[0], int(row[1])): row for row in cells[2:]}


def test_models_share_a_pool_on_few_devices_and_divide_many():
    script = [sys.executable, str(SCRIPT), "--models", "13B", "34B"]
    output = subprocess.run(
        [*script, "--devices", "32", "96", "128"], capture_output=True, text=True, check=True
    ).stdout
    rows = rows_of(output)
    assert rows["13B", 32][3] == rows["34B", 32][3] == "+0%"
    assert rows["34B", 128][4] == "+0%" and rows["34B", 128][3] != "+0%"
    assert all(row[7].count(" on ") > 1 for key, row in rows.items() if key[1] == 96)
    page = rows_of((ROOT / "docs" / "appendix" / "placement_crossovers.md").read_text(encoding="utf-8"))
    assert {key: page[key] for key in rows} == rows


def test_algorithm_1_does_not_trade_memory_for_seconds(monkeypatch):
    """A fast actor of 60 bytes leaves 20 for the critic, whose choice in 40 bytes is ten times faster."""
    table = {"actor": [RoleCost(training=1, resident=60), RoleCost(training=2, resident=40)],
             "critic": [RoleCost(training=100, resident=20), RoleCost(training=10, resident=40)]}  # fmt: skip
    space = SearchSpace(("actor", "critic"), 1, 80, (1,), lambda role, n: range(2), lambda role, n, c: table[role][c])
    search = PlacementSearch(space)
    assert crossovers(monkeypatch).algorithm_1(search).seconds == 101
    assert search.best().seconds == 12


def test_algorithm_1_is_optimal_where_memory_is_no_matter(monkeypatch):
    """Two pools take max(40, 30) = 40 of training on 1 + 1 devices, one pool of 2 takes 35."""
    seconds = {("actor", 1): 40, ("critic", 1): 30, ("actor", 2): 20, ("critic", 2): 15}
    space = SearchSpace(("actor", "critic"), 2, 80, (1, 2), lambda role, n: [1],
                        lambda role, n, c: RoleCost(training=seconds[role, n]),
                        ("sync",))  # fmt: skip
    search = PlacementSearch(space)
    assert crossovers(monkeypatch).algorithm_1(search).seconds == search.best().seconds == 35
