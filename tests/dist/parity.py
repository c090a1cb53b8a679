"""``python -m tests.dist.parity`` runs the parity matrix and prints it; ``--write`` puts its cells into a page."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.dist import titan_cells
from tests.dist.parity_cells import FAMILIES, SIZES, Beside, Layout, layouts
from tests.harness.ranks import run_cells
from tests.megatron.layouts import ADAPTERS, ERRORS, PARITY

PAGE = Path(__file__).resolve().parents[2] / "docs" / "appendix" / "parity.md"
HEAD = """# Which layouts over processes there are

Each cell computes with FSDP2 from equal weights what the plain engine does: log-probs, entropies, loss and gradient of
a ragged mini-batch, cut into micro-batches, agree to a relative L2 error of 1e-5 in float32, over gloo
(`tests/dist/test_parity_matrix.py`). A number instead of a cross is the reason why a cell does not exist; it stands
below. `python -m tests.dist.parity --write` writes this page; without `--write` it runs all cells and prints the
largest error of each.

`dense` is a Qwen3, `mixture` a Qwen3-MoE of four experts; LoRA is on the attention's linear layers. sp, ep: processes
that share sequences (Ulysses), experts.
"""
OTHERS = """## Megatron-Core and TorchTitan

The same of two other engines, in layouts that were chosen to meet every family and every axis at least once, most of
them with another. Log-probs and entropies, loss, gradient (norm) and the weights after the last of three steps
(TorchTitan: two), routers' metrics, and with LoRA factors and merged weights agree with the plain engine to 1e-5
(`tests/megatron/test_engine.py`, `tests/dist/test_titan.py`).

tp, pp, cp, ep: ranks that share layers' matrices (tensor), the layers (pipeline), tokens (context), experts. sp: with
sequence parallel; vpp: layers of a virtual stage; etp: ranks that share one expert's matrices; dp, fsdp: every rank has
other rows; replicas: of hybrid sharding; recomputed: activations are computed again in the backward pass; uneven
stages: not all of them have as many layers.
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
    others = largest_errors()
    print("\n".join([*table(errors), "", *table_of_others(others)]))
    everything = [*errors.values(), *others.values()]
    print(f"{len(everything)} cells, largest error {max(everything):.1e}")


def page() -> str:
    """The whole document."""
    reasons = _reasons()
    told = [f"{number}. {reason[0].upper()}{reason[1:]}." for reason, number in reasons.items()]
    return "\n".join([HEAD, *table(None), "", *told, "", OTHERS, *table_of_others(None)]) + "\n"


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


Key = tuple[str, int, int]
"""An engine, the number of ranks, and the number of the cell among those."""


def others() -> dict[Key, Any]:
    """The cells of Megatron-Core and TorchTitan."""
    adapted = {size: [*PARITY[size], *ADAPTERS[size]] for size in PARITY}
    engines = {"Megatron-Core": adapted, "TorchTitan": titan_cells.PARITY}
    sizes = ((engine, size, cells) for engine, by_size in engines.items() for size, cells in by_size.items())
    return {(engine, size, number): cell for engine, size, cells in sizes for number, cell in enumerate(cells)}


def largest_errors() -> dict[Key, float]:
    """Run these cells; the largest relative error of each, over ranks and quantities."""
    errors: dict[Key, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        for size in PARITY:
            cells = [
                cell for (engine, ranks, _), cell in others().items() if (engine, ranks) == ("Megatron-Core", size)
            ]
            answers = run_cells(size, cells, Path(folder) / "megatron" / str(size))
            for number, cell in enumerate(cells):
                ranks = answers[cell.name]
                errors["Megatron-Core", size, number] = max(f[name] for f in ranks for name in ERRORS if name in f)
        for size in titan_cells.PARITY:
            (results, *_) = run_cells(size, [titan_cells.parity], Path(folder) / "titan", keep_groups=True)["parity"]
            for number, result in enumerate(results):
                errors["TorchTitan", size, number] = max(result["errors"].values())
    return errors


def table_of_others(errors: dict[Key, float] | None) -> list[str]:
    """As `table`, a line for each cell."""
    lines = ["| engine | processes | model | layout | trained | |", "| --- " * 6 + "|"]
    for key, cell in others().items():
        shown = "×" if errors is None else f"{errors[key]:.0e}"
        lines.append(f"| {key[0]} | {key[1]} | {cell.family} | {cell.layout} | {cell.trained} | {shown} |")
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
