"""The site: it builds without a warning and without a network, its links lead somewhere, and it stays short."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlparse

import pytest

from tests.harness.programs import run
from tests.sanity.source_tree import ROOT

DOCS = ROOT / "docs"
PARTS = ("start", "howto", "concepts", "reference", "appendix")
GENERATED = ("reference/configuration", "reference/api.md", "appendix/")
"""What does not count as words to read: made from the code, or evidence."""
MOST_WORDS = 40_000


class Page(HTMLParser):
    """The anchors of a page, what it links to, and what a browser loads to show it."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.feed(file.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.anchors.add(values.get("id", ""))
        if tag == "a":
            self.links.append(values.get("href", ""))
        elif tag in ("script", "img", "link"):
            self.loaded.append(values.get("src") or values.get("href", ""))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site as `make site` builds it."""
    out = tmp_path_factory.mktemp("site")
    (command,) = re.findall(r"^\t@\$\(BIN\)/python (-m sphinx .*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    run(["python", *command.replace("build/site", str(out)).split()], cwd=ROOT)
    return out


@pytest.mark.slow
def test_the_site_builds_without_a_warning_and_every_link_leads_somewhere(site):
    pages = {file: Page(file) for file in site.rglob("*.html")}
    assert {part for part in PARTS if site / part / "index.html" in pages} == set(PARTS)
    broken = []
    for file, page in pages.items():
        for link in page.links:
            address = urlparse(link)
            target = (file.parent / unquote(address.path)).resolve() if address.path else file
            if address.scheme:
                assert address.scheme in ("https", "mailto"), link
            elif not target.is_file() or (
                target in pages and address.fragment and unquote(address.fragment) not in pages[target].anchors
            ):
                broken.append(f"{file.relative_to(site)}: {link}")
    assert broken == []
    for file in DOCS.rglob("*.md"):
        assert (site / file.relative_to(DOCS)).with_suffix(".html") in pages, file
    outside = {link for page in pages.values() for link in page.loaded if urlparse(link).netloc}
    assert outside == set(), "a page loads these from the network"
    index = (site / "searchindex.js").read_text(encoding="utf-8")
    assert "howto/rewards" in index and "n_gpus_per_nod" in index  # stemmed


def test_the_pages_to_read_have_at_most_forty_thousand_words():
    counts = {}
    for file in DOCS.rglob("*.md"):
        name = str(file.relative_to(DOCS))
        if not name.startswith(GENERATED):
            counts[name] = len(file.read_text(encoding="utf-8").split())
    total = sum(counts.values())
    longest = sorted(counts, key=counts.__getitem__, reverse=True)[:5]
    assert total <= MOST_WORDS, f"{total} words; the longest pages: {', '.join(longest)}"
