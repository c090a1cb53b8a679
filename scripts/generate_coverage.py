"""Write ``docs/appendix/coverage.md``: what public guides to verl say, row by row, and what has become of it here.

    PYTHONPATH=. python scripts/generate_coverage.py [--check]

The rows lie in ``tests/brief/rows``; whether a row works is found out: its commands are read, its names looked for.
"""

from __future__ import annotations

import logging
import sys
import tempfile
from collections import Counter
from pathlib import Path

from tests.brief.machine import guides_machine
from tests.brief.states import IDLE, REFUSED, SAME, SIZES, WORKS, Outcome, Trained, of_name, outcomes, state, trained
from tests.brief.table import Row, rows
from verl.config.loading.groups import PPO, SFT
from verl.config.schema.node import schema_of

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "appendix" / "coverage.md"
LONGEST = 150
HEAD = """# What works, row by row

Public guides to verl state facts: commands, settings, names, pages. Each is a row here.

Three columns tell three things apart:

1. **resolves**: the command is accepted on a pretended machine (eight GPUs, all packages). *works*: every command is,
   every name is there; *refused by name*: the error names the setting whose feature is missing; *an error on purpose*:
   it asks for what cannot work, or never existed; *without effect*: with a notice that the setting does nothing here;
   *partly*: a mixture; *said or shipped*: there is nothing to run.
2. **trained here**: a test starts the command on CPUs and trains, as printed but for sizes, files and the number of
   steps: in one process (`tests/brief/test_runs.py`), or on Ray with as many processes as it prints
   (`tests/trainer/on_ray/test_starts.py`). *no*, with the reason, where no test does: a run with another engine,
   sampler or number of processes does not count. vLLM beside two ranks of FSDP2 was run on CPUs apart from these
   commands ([engines.md](../howto/engines.md)).
3. **on its hardware**: run on its target; [install.md](../start/install.md#what-has-not-been-run) lists the rest.

{counts}.

This page is generated (`PYTHONPATH=. python scripts/generate_coverage.py`), and a test holds it to what the library
does: each row is a case of `tests/brief/test_rows.py`. How many of upstream's own scripts resolve is on a page of its
own: [compatibility.md](compatibility.md).
"""


TABLE = """| # | what guides say | resolves | trained here | on its hardware | how, and where |
| --- | --- | --- | --- | --- | --- |"""


def page() -> str:
    """The whole page."""
    for name in (name for row in rows() for name in row.names):
        of_name(name)  # imports it here, where no package seems to be there that is not
    with tempfile.TemporaryDirectory() as folder, guides_machine(Path(folder)):
        found = {row.id: outcomes(row) for row in rows()}
        ran = {row.id: trained(row) for row in rows()}
    states = Counter(state(found[row.id]) for row in rows())
    counts = "; ".join(f"{number} {name}" for name, number in states.most_common())
    as_printed, real = sum(one.word == SAME for one in ran.values()), sum(bool(row.hardware) for row in rows())
    counts += f". Trained here as printed: {as_printed}; run on their hardware: {real}"
    text = [HEAD.format(counts=f"{len(found)} rows: {counts}")]
    for title in dict.fromkeys(row.section for row in rows()):
        text += [f"## {title}\n", TABLE]
        text += [_line(row, found[row.id], ran[row.id]) for row in rows() if row.section == title]
        text.append("")
    missing = "".join(f"- {name}\n" for name in features())
    return "\n".join([*text, f"## Features whose settings are refused by name\n\n{missing}"])


def features() -> list[str]:
    """The features that settings wait for with every sampler, sorted; docs/reference/configuration.md says which."""
    leaves = [leaf for program in (PPO, SFT) for leaf in schema_of(program.root).every.values()]
    return sorted({leaf.planned for leaf in leaves if leaf.planned and not leaf.engines}, key=str.lower)


def _line(row: Row, found: list[Outcome], ran: Trained) -> str:
    parts = [_outcome(outcome) for outcome in found]
    places = [*row.files, *(name for name, _ in row.docs), *row.tests]
    parts += [f"[{name}](../../{name})" for name in dict.fromkeys(places)]
    parts += [f"extra `{name}`" for name in row.extras] + [f"`{name}`" for name in row.environment]
    here = SIZES if ran.word == SAME else ": ".join(filter(None, [ran.word, "; ".join(ran.why)]))
    real = ", ".join(f"[{words}](../../{name})" for name, words in row.hardware)
    real = real or ("-" if not row.config and not row.instead else "no")
    return f"| {row.id} | {row.says} | {state(found)} | {here} | {real} | {'<br>'.join(parts)} |"


def _outcome(outcome: Outcome) -> str:
    words = outcome.what if len(outcome.what) <= LONGEST else outcome.what[:LONGEST].rpartition(" ")[0] + " …"
    code = f"`{words}`".replace("|", "\\|")
    if outcome.state == WORKS:
        return code
    if outcome.state == REFUSED:
        return f"{code}: not built" + (f" ({', '.join(f'`{key}`' for key in outcome.by)})" if outcome.by else "")
    if outcome.state == IDLE:
        return f"{code}: accepted, with a notice that {', '.join(f'`{key}`' for key in outcome.by)} does nothing here"
    return f"{code}: an error on purpose"


def main(argv: list[str] | None = None) -> int:
    """Write the page, or with ``--check`` say whether it is up to date."""
    logging.getLogger("verl").setLevel(logging.ERROR)  # no notices of the hundreds of configurations it reads
    made = page()
    if "--check" in (sys.argv[1:] if argv is None else argv):
        is_current = PAGE.is_file() and PAGE.read_text(encoding="utf-8") == made
        print(f"{PAGE.relative_to(ROOT)} is {'up to date' if is_current else 'old: run this script without --check'}")
        return 0 if is_current else 1
    PAGE.write_text(made, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
