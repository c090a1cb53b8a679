"""Write ``docs/configuration.md`` from the declarations of the settings.

    python scripts/generate_config_docs.py [--check]

Which test covers a setting stands in ``tests/config/coverage.json``: ``{"ppo_trainer": {key: test id}, ...}``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from verl.config.docs import Coverage, page

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "configuration.md"
COVERAGE = ROOT / "tests" / "config" / "coverage.json"


def read_coverage() -> Coverage:
    """The tests by program and key; empty where there is no such file."""
    return json.loads(COVERAGE.read_text(encoding="utf-8")) if COVERAGE.is_file() else {}


def main(argv: list[str] | None = None) -> int:
    """Write the page, or with ``--check`` say whether it is up to date."""
    made = page(read_coverage())
    if "--check" in (sys.argv[1:] if argv is None else argv):
        is_current = PAGE.is_file() and PAGE.read_text(encoding="utf-8") == made
        print(f"{PAGE.relative_to(ROOT)} is {'up to date' if is_current else 'old: run this script without --check'}")
        return 0 if is_current else 1
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(made, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
