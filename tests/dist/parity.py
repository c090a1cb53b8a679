"""``python -m tests.dist.parity`` runs the parity matrix and prints it; ``--write`` puts its cells into a page."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from tests.harness.ranks import run_cells
from tests.dist.parity_cells import FAMILIES, SIZES, Beside, Layout, layouts

PAGE = Path(__file__).resolve().parents[2] / "docs" / "parity.md"
HEAD = """# Which layouts over processes there are

Each cell computes with FSDP2 from equal weights what the plain engine does: log-probs, entropies, loss and gradient of a ragged
mini-batch, cut into micro-batches, agree to a relative L2 error of 1e-5 in float32, over gloo
(`tests/dist/test_parity_matrix.py`). A number instead of a cross is the reason why a cell does not exist; it stands
below. `python -m tests.dist.parity --write` writes this page; without `--write` it runs all cells and prints the
largest error of each.

`dense` is a Qwen3, `mixture` a Qwen3-MoE of four experts; LoRA is on the attention's linear layers. sp, ep: processes
that share sequences (Ulysses), experts.
"""
COLUMNS = [(packed, adapter) for packed in (True, False) for adapter in (False, True)]


def main(write: bool) -> None:
    if write:
        PAGE.write_text(page(), encoding="utf-8")
        return
    errors: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        for size in SIZES:
            cells = [Beside(layout) for layout in layouts() if layout.absence is None and layout.ranks == size]
            found = run_cells(size, cells, Path(folder))
            errors |= {name: max(answers[0].values()) for name, answers in found.items()}
    print("\n".join(table(errors)))
    print(f"{len(errors)} cells, largest error {max(errors.values()):.1e}")


def page() -> str:
    """The whole document."""
    reasons = _reasons()
    told = [f"{number}. {reason[0].upper()}{reason[1:]}." for reason, number in reasons.items()]
    return "\n".join([HEAD, *table(None), "", *told]) + "\n"


def table(errors: dict[str, float] | None) -> list[str]:
    """Lines of Markdown; a cross per cell, or its largest relative error."""
    names = [f"{'packed' if packed else 'padded'}, {'LoRA' if adapter else 'full'}" for packed, adapter in COLUMNS]
    lines = [f"| processes | model | shared | {' | '.join(names)} |", "| --- " * (3 + len(COLUMNS)) + "|"]
    cells = {_key(layout): layout for layout in layouts()}
    rows = dict.fromkeys(key[:4] for key in cells)
    for row in sorted(rows, key=lambda r: (r[0], list(FAMILIES).index(r[1]), *r[2:])):
        own = [cells[(*row, *column)] for column in COLUMNS]
        if all(layout.absence == own[0].absence is not None for layout in own) and row[0] == 1:
            continue  # one process shares nothing: one line below says so
        shared = " ".join(f"{name} 2" for name, size in zip(("sp", "ep"), row[2:4]) if size == 2)
        shown = [_shown(layout, errors) for layout in own]
        lines.append(f"| {row[0]} | {row[1]} | {shared} | {' | '.join(shown)} |")
    return lines


def _key(layout: Layout) -> tuple:
    how = layout
    return how.ranks, how.family, how.sp, how.ep, how.packed, how.adapter


def _shown(layout: Layout, errors: dict[str, float] | None) -> str:
    if layout.absence is not None:
        return str(_reasons()[layout.absence])
    return "×" if errors is None else f"{errors[str(layout)]:.0e}"


def _reasons() -> dict[str, int]:
    found = dict.fromkeys(layout.absence for layout in layouts() if layout.absence is not None)
    return {str(reason): number for number, reason in enumerate(found, start=1)}


if __name__ == "__main__":
    main("--write" in sys.argv[1:])
