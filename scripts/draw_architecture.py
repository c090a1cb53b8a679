"""Draws the picture of docs/concepts/architecture.md: the layers of layers.toml, and the stages of the loop.

    PYTHONPATH=. python scripts/draw_architecture.py [--check]    # writes docs/images/architecture.svg

Both halves are read from the project, so the picture cannot say what the code does not.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from html import escape
from pathlib import Path

from tests.sanity.source_tree import read_toml

ROOT = Path(__file__).resolve().parents[1]
TARGET = ROOT / "docs" / "images" / "architecture.svg"
LOOP = ROOT / "verl" / "trainer" / "ppo" / "step.py"
WIDTH, LAYER, GAP = 1000, 46, 8
COLORS = ("#eef1f5", "#dbe7f7", "#d8ebd9", "#ece3f4")
STAGES = {
    "gen": "sample n responses per prompt",
    "reward": "score them; failures are masked",
    "gen_max": "a greedy sample as baseline",
    "old_log_prob": "log-probs before the update",
    "ref": "log-probs of the reference",
    "values": "the critic's values",
    "rollout_correction": "weights against the sampler's own log-probs",
    "adv": "KL in reward, estimator",
    "update_critic": "mini-batches, value loss",
    "update_actor": "mini-batches, policy loss",
}


def stages() -> list[tuple[str, str]]:
    """(function, timer) of every timed stage of the loop, in the order in which step.py has them."""
    tree = ast.parse(LOOP.read_text(encoding="utf-8"))
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    return [(function.name, name) for function in functions for name in _timers(function)]


def _timers(function: ast.FunctionDef) -> Iterator[str]:
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "timed":
            name = node.args[0]
            if isinstance(name, ast.Constant):
                yield str(name.value)


def in_order(found: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """The stages by function, each in the order of its lines (a walk goes by depth)."""
    lines = LOOP.read_text(encoding="utf-8").splitlines()
    where = {name: next(i for i, line in enumerate(lines) if f'timed("{name}")' in line) for _, name in found}
    return sorted(found, key=lambda stage: where[stage[1]])


def picture() -> str:
    """The whole SVG."""
    layers = read_toml(ROOT / "layers.toml")["layers"]
    numbers = sorted(layers, key=int, reverse=True)
    found = in_order(stages())
    height = max(len(numbers) * (LAYER + GAP) + 60, len(found) * 52 + 110)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        _text(20, 28, "rooms: an import may point down only", bold=True),
        _text(640, 28, "one step: verl/trainer/ppo/step.py", bold=True),
    ]
    for row, number in enumerate(numbers):
        y = 44 + row * (LAYER + GAP)
        parts += [_box(20, y, 580, LAYER, COLORS[row % len(COLORS)]), _text(34, y + 28, number, bold=True)]
        parts += _wrapped(60, y, layers[number])
    parts += _loop(found)
    return "\n".join([*parts, "</svg>", ""])


def _loop(found: list[tuple[str, str]]) -> list[str]:
    parts, y = [], 44
    for function in dict.fromkeys(name for name, _ in found):
        parts.append(_text(640, y + 14, function, bold=True))
        y += 24
        for _, timer in (stage for stage in found if stage[0] == function):
            parts += [_box(640, y, 340, 40, "#eef1f5"), _text(652, y + 17, timer, bold=True)]
            parts += [_text(652, y + 33, STAGES.get(timer, ""), size=11)]
            y += 48
        y += 8
    return [*parts, _text(640, y + 14, "then: checkpoint, weights to the sampler, validation", size=11)]


def _wrapped(x: int, y: int, rooms: list[str]) -> list[str]:
    """Names of rooms in one line, or in two where one is too short."""
    line = " · ".join(rooms)
    if len(line) <= 76:
        return [_text(x, y + 28, line)]
    half = (len(rooms) + 1) // 2
    return [_text(x, y + 20, " · ".join(rooms[:half])), _text(x, y + 38, " · ".join(rooms[half:]))]


def _box(x: int, y: int, width: int, height: int, color: str) -> str:
    return f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="6" fill="{color}" stroke="#8795a5"/>'


def _text(x: int, y: int, words: str, size: int = 13, bold: bool = False) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return f'<text x="{x}" y="{y}" font-size="{size}" fill="#1f2a36"{weight}>{escape(words)}</text>'


def main(argv: list[str] | None = None) -> int:
    """Write the picture, or with ``--check`` say whether it is up to date."""
    made = picture()
    if "--check" in (sys.argv[1:] if argv is None else argv):
        is_current = TARGET.is_file() and TARGET.read_text(encoding="utf-8") == made
        print(f"{TARGET.relative_to(ROOT)} is {'up to date' if is_current else 'old: run this script without --check'}")
        return 0 if is_current else 1
    TARGET.write_text(made, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
