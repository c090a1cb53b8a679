"""The install lines of the Dockerfiles, run as they stand: pip resolves them and installs nothing."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PIP = """#!{python}
import json, subprocess, sys
from pathlib import Path

here = Path(__file__).parent
resolved, report, pins = here / "resolved.json", here / "report.json", here / "pins.txt"
known = json.loads(resolved.read_text()) if resolved.exists() else {{}}
if sys.argv[1] == "freeze":
    print(*(f"{{name}}=={{version}}" for name, version in known.items()), sep="\\n")
    sys.exit()
files = [sys.argv[at + 1] for at, word in enumerate(sys.argv) if word == "--constraint"]
named = {{line.partition("==")[0].lower().replace("_", "-") for file in files for line in open(file)}}
kept = {{name: version for name, version in known.items() if name.lower().replace("_", "-") not in named}}
pins.write_text("".join(f"{{name}}=={{version}}\\n" for name, version in kept.items()))
words = ["--dry-run", "--quiet", "--ignore-installed", "--report", str(report), "--constraint", str(pins)]
subprocess.run(["{python}", "-m", "pip", *sys.argv[1:], *words], check=True)
for entry in json.loads(report.read_text())["install"]:
    known[entry["metadata"]["name"]] = entry["metadata"]["version"].partition("+")[0]
resolved.write_text(json.dumps(known))
"""
"""Stands for pip: what one call resolved counts as installed in the next one, and stays where that one names no pin."""
LEFT_OUT = re.compile(r"&& python -c .*")
"""Looks at the torch of a base image."""


def install_lines(text: str) -> list[str]:
    """The commands of a Dockerfile that install Python packages, continued lines joined."""
    joined = re.sub(r"\\\n\s*", "", text)
    runs = re.findall(r"^RUN (.*)$", joined, flags=re.MULTILINE)
    return [LEFT_OUT.sub("", run) for run in runs if "pip install" in run]


def variables(text: str) -> dict[str, str]:
    """The defaults of its arguments."""
    return dict(re.findall(r"^ARG (\w+)=(.*)$", text, flags=re.MULTILINE))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cpu", "cuda-vllm", "cuda-sglang", "rocm"])
def test_the_install_lines_of_a_container_resolve(name, tmp_path):
    text = (ROOT / "docker" / f"Dockerfile.{name}").read_text(encoding="utf-8")
    checkout, shim = tmp_path / "verl", tmp_path / "bin" / "pip"
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    checkout.mkdir()
    subprocess.run(["cp", "--parents", "-t", checkout, *files.decode().strip("\0").split("\0")], cwd=ROOT, check=True)
    shim.parent.mkdir()
    shim.write_text(PIP.format(python=sys.executable))
    shim.chmod(0o755)
    environment = {**os.environ, **variables(text), "PATH": f"{shim.parent}:{os.environ['PATH']}"}
    lines = install_lines(text)
    assert lines
    for line in lines:
        done = subprocess.run(["sh", "-ec", line], cwd=checkout, env=environment, stderr=subprocess.PIPE, check=False)
        assert done.returncode == 0, f"{line}\n{done.stderr.decode()[-2000:]}"
    resolved = json.loads((shim.parent / "resolved.json").read_text())
    assert "verl" in resolved and "ray" in resolved
    assert name.removeprefix("cuda-") in resolved or not name.startswith("cuda-")
