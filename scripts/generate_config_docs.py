"""Write ``docs/reference/configuration*.md`` and ``verl/trainer/config/*.yaml`` from the declarations of the settings.

python scripts/generate_config_docs.py [--check]
"""

from __future__ import annotations

import sys
from pathlib import Path

from recipe import flowrl, online_dpo, prime, rep_exp, spin, spo, sppo
from scripts import config_views
from scripts.config_page import pages

ROOT = Path(__file__).resolve().parent.parent
RECIPES = (flowrl.RECIPE, online_dpo.RECIPE, prime.RECIPE, rep_exp.RECIPE, spin.RECIPE, spo.RECIPE, sppo.RECIPE)


def made() -> dict[Path, str]:
    """Every file and its text."""
    views = {ROOT / "verl" / "trainer" / "config" / name: text for name, text in config_views.files().items()}
    return {ROOT / "docs" / "reference" / name: text for name, text in pages(RECIPES).items()} | views


def main(argv: list[str] | None = None) -> int:
    """Write the files, or with ``--check`` say whether they are up to date."""
    if "--check" in (sys.argv[1:] if argv is None else argv):
        return max(_is_old(file, text) for file, text in made().items())
    for file, text in made().items():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    return 0


def _is_old(file: Path, text: str) -> bool:
    is_current = file.is_file() and file.read_text(encoding="utf-8") == text
    print(f"{file.relative_to(ROOT)} is {'up to date' if is_current else 'old: run this script without --check'}")
    return not is_current


if __name__ == "__main__":
    sys.exit(main())
