"""``python -m tests.dist.switches`` shows what each setting changes, off and on; ``--write`` puts it into a page."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.dist.sharing_cells import sharing
from tests.dist.switch_cells import switches
from tests.harness.ranks import run_cells

PAGE = Path(__file__).resolve().parents[2] / "docs" / "appendix" / "switches.md"
HEAD = """# What each switch changes

Seen on two processes with FSDP2 over gloo, with models of two layers (three units with the root), width 32 and a
vocabulary of 259, in float32. The rows of the first table are shared by both processes; those of the second are all on
the first one, and each of its numbers is what arithmetic says: tokens of the rows, (P-1)/P (N/P) (2H + 2h) d numbers
for Ulysses, 1/P of the experts. `python -m tests.dist.switches --write` makes this page, and the tests check it.

Not seen here, because on a CPU they change nothing: `param_offload`, `optimizer_offload`, `offload_policy`,
`model.enable_activation_offload` (`tests/gpu`), `model.use_liger`.
"""


def main(write: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        found = page(run_cells(2, [switches, sharing], Path(folder)))
    if write:
        PAGE.write_text(found, encoding="utf-8")
    else:
        print(found)


def page(runs: dict[str, list[Any]]) -> str:
    """The document, from what rank 0 saw in the cells of two processes."""
    return f"{HEAD}\n{settings_table(runs)}\n{sharing_table(runs)}"


def settings_table(runs: dict[str, list[Any]]) -> str:
    return _table(runs["switches"][0])


def sharing_table(runs: dict[str, list[Any]]) -> str:
    return _table({name: case["seen"] for name, case in runs["sharing"][0].items()})


def _table(found: dict[str, list[Any]]) -> str:
    lines = ["| setting | seen | off | on |", "| --- | --- | --- | --- |"]
    for switch, value in found.items():
        setting, _, seen = switch.partition(": ")
        off, *on = (f"{v:,}" if isinstance(v, int) else str(v).removeprefix("torch.") for v in value)
        lines.append(f"| `{setting}` | {seen} | {off} | {' or '.join(on)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main("--write" in sys.argv[1:])
