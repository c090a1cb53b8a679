"""What README and docs tell people to type exists, and every link inside the project leads somewhere."""

from __future__ import annotations

import importlib.util
import re

import pytest

from tests.sanity.source_tree import ROOT, tracked_files

PAGES = sorted(p for p in tracked_files() if p.suffix == ".md" and "tests" not in p.relative_to(ROOT).parts)
NAMES = [str(p.relative_to(ROOT)) for p in PAGES]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
UNBUILT = "not built"


def shell_blocks(text: str) -> str:
    """All shell commands of a page; a block or a page that speaks of what is not built is left to its words."""
    return "\n".join(body for language, body in FENCE.findall(text) if language in ("bash", "sh", "console"))


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_commands_name_modules_files_and_targets_that_exist(page):
    commands = shell_blocks(page.read_text(encoding="utf-8"))
    targets = set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    modules = set(re.findall(r"-m (verl[\w.]*)", commands))
    files = set(re.findall(r"\b((?:examples|scripts|benchmarks|docker|docs)/[\w./-]+)", commands))
    missing = [m for m in sorted(modules) if not _module_exists(m)]
    missing += [f for f in sorted(files) if not (ROOT / f).exists()]
    missing += [
        f"make {t}" for t in re.findall(r"^\s*\$?\s*make ([a-z]\w*)", commands, re.MULTILINE) if t not in targets
    ]
    assert not missing, f"{page.relative_to(ROOT)} names what does not exist: {missing}"


def _module_exists(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_links_inside_the_project_lead_somewhere(page):
    links = LINK.findall(FENCE.sub("", page.read_text(encoding="utf-8")))
    inside = [link for link in links if "://" not in link and not link.startswith("mailto:")]
    broken = [link for link in inside if not (page.parent / link).exists()]
    assert not broken, f"{page.relative_to(ROOT)}: {broken}"


def test_the_readme_shows_the_two_commands_on_its_first_screen():
    first = "\n".join((ROOT / "README.md").read_text(encoding="utf-8").splitlines()[:40])
    assert "make quickstart" in first and "make test" in first
