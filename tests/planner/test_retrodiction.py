"""The benchmark that predicts published runs: its fit, its order of reading, and the page that it writes."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "retrodiction.py"
spec = importlib.util.spec_from_file_location("retrodiction", SCRIPT)
retrodiction = importlib.util.module_from_spec(spec)
sys.modules["retrodiction"] = retrodiction  # where its dataclasses look for their module
spec.loader.exec_module(retrodiction)
Law, fit = retrodiction.Law, retrodiction.fit


def test_a_law_is_recovered_from_its_points():
    assert fit({32: 10 + 640 / 32, 64: 10 + 640 / 64, 128: 10 + 640 / 128}) == pytest.approx((10, 640))
    assert fit({16: 30}) == Law(0, 480)


def test_no_part_of_a_law_is_negative():
    assert fit({1: 100, 2: 40}).constant == 0  # falls faster than 1 / n
    assert fit({64: 286, 128: 345}).work == 0  # and grows


def test_the_page_has_the_tables_of_the_rows_after_the_constants():
    output = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, check=True).stdout
    constants, tables = output.split("\n\n", 1)
    assert "7B 28k, generation: 94.2 s + 6096 device seconds" in constants
    page = retrodiction.PAGE.read_text(encoding="utf-8")
    assert tables.startswith(page.split(retrodiction.BEGIN + "\n")[1].split("\n" + retrodiction.END)[0])


def test_the_constants_do_not_need_the_asynchronous_rows(tmp_path):
    for file in ("retrodiction.py", "published/synchronous.yaml"):
        target = tmp_path / file
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text((ROOT / "benchmarks" / file).read_text(encoding="utf-8"), encoding="utf-8")
    run = subprocess.run(
        [sys.executable, str(tmp_path / "retrodiction.py")], capture_output=True, text=True, check=False
    )
    assert "7B 28k, update: 58.3 s" in run.stdout and "asynchronous.yaml" in run.stderr
