"""The site of these pages: `make site`, without a network; a link that leads nowhere fails the build."""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from verl import __version__  # noqa: E402 - needs the path

project, author, release = "verl", "the authors of verl", __version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
source_suffix = {".md": "markdown", ".rst": "restructuredtext"}
exclude_patterns = ["index.rst"]  # where older guides point to; index.md is the first page

myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 4  # anchors as GitHub makes them
suppress_warnings = ["misc.highlighting_failure"]  # settings with ${interpolations} in ini blocks

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"

html_theme = "pydata_sphinx_theme"
html_title = f"verl {release}"
html_theme_options = {
    "header_links_before_dropdown": 6,
    "navigation_with_keys": False,
    "show_toc_level": 2,
    "secondary_sidebar_items": ["page-toc"],
    "footer_start": [],
    "footer_end": [],
}
html_copy_source = False
html_show_sourcelink = False


PAGES = re.compile(r"\]\(((?:\.\./(?:advance|examples)/)?[\w/]+)\.(?:md|rst)\)")
OUTSIDE = re.compile(r"\[([^\]]+)\]\(((?:\.\./)+[\w./-]+)(?:#[\w-]+)?\)")
RST_LINK = re.compile(r"(<[\w./-]+)\.md(#[\w-]+)?>`_")


def prepare(app, name: str, source: list[str]) -> None:
    """What the site needs of a page and a reader of the file does not see."""
    source[0] = OUTSIDE.sub(lambda link: outside(app.srcdir / name, link), source[0])
    source[0] = RST_LINK.sub(r"\1.html\2>`_", source[0])
    if name.rpartition("/")[2] == "index":
        source[0] += toctree(name, source[0])


def outside(page: Path, link: re.Match[str]) -> str:
    """A link to a file of the checkout that is no page becomes its path."""
    words, target = link.groups()
    path = (page.parent / target).resolve()
    if path.is_relative_to(ROOT / "docs") or not path.exists():  # a page, or a link that fails the build
        return link[0]
    code = f"`{path.relative_to(ROOT)}`"
    return code if words.strip("`") in code else f"{words} ({code})"


def toctree(name: str, text: str) -> str:
    """The navigation: the pages of an index's tables, in their order."""
    pages = [page for page in dict.fromkeys(PAGES.findall(text)) if name != "index" or page.endswith("/index")]
    return "\n```{toctree}\n:hidden:\n\n" + "\n".join(pages) + "\n```\n"


def setup(app) -> None:
    app.connect("source-read", prepare)
