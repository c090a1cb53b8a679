"""One pool on few devices, several on many: the search with the cost model of HybridFlow, and the page of it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def rows_of(text):
    cells = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")
    ]
    return {(row[0], int(row[1])): row for row in cells[2:]}


def test_models_share_a_pool_on_few_devices_and_divide_many():
    script = [sys.executable, str(ROOT / "benchmarks" / "placement_crossovers.py"), "--models", "13B", "34B"]
    output = subprocess.run(
        [*script, "--devices", "32", "96", "128"], capture_output=True, text=True, check=True
    ).stdout
    rows = rows_of(output)
    assert rows["13B", 32][3] == rows["34B", 32][3] == "+0%"
    assert rows["34B", 128][4] == "+0%" and rows["34B", 128][3] != "+0%"
    assert all(row[6].count(" on ") > 1 for key, row in rows.items() if key[1] == 96)
    page = rows_of((ROOT / "docs" / "appendix" / "placement_crossovers.md").read_text(encoding="utf-8"))
    assert {key: page[key] for key in rows} == rows
