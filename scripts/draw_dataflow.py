"""Draws one step of RL training (who computes what, and what travels between them), and the walk of a group.

python scripts/draw_dataflow.py        # writes docs/images/dataflow.svg and docs/images/stream.svg
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

IMAGES = Path(__file__).resolve().parents[1] / "docs" / "images"
CONTROL, SAMPLE, TRAIN, FROZEN, TEXT = "#eef1f5", "#d8ebd9", "#dbe7f7", "#ece3f4", "#1f2a36"


@dataclass(frozen=True)
class Box:
    """A labelled rectangle; x and y are its lower left corner."""

    x: float
    y: float
    width: float
    height: float
    title: str
    body: str
    color: str

    def draw(self, axes: Axes) -> None:
        shape = FancyBboxPatch(
            (self.x, self.y), self.width, self.height,
            boxstyle="round,pad=0,rounding_size=0.12", facecolor=self.color, edgecolor="#8795a5", linewidth=1,
        )  # fmt: skip
        axes.add_patch(shape)
        middle, top = self.x + self.width / 2, self.y + self.height
        axes.text(middle, top - 0.2, self.title, ha="center", va="center", weight="bold", color=TEXT)
        axes.text(middle, self.y + (self.height - 0.3) / 2, self.body, ha="center", va="center", fontsize=8, color=TEXT)


STAGES = (
    Box(0.3, 3.15, 1.9, 1.1, "generate", "n responses a prompt,\ntheir log-probs", CONTROL),
    Box(2.6, 3.15, 1.9, 1.1, "score", "token_level_scores,\nfailures masked", CONTROL),
    Box(4.9, 3.15, 1.9, 1.1, "infer", "old_log_probs*,\nref_log_prob*, values*", CONTROL),
    Box(7.2, 3.15, 1.9, 1.1, "advantage", "KL in reward*,\nestimator", CONTROL),
    Box(9.5, 3.15, 1.9, 1.1, "train", "critic*, then actor:\nmini-batches, loss", CONTROL),
)
ROLES = (
    Box(0.3, 0.55, 1.9, 1.15, "rollout", "sampler\n(hf)", SAMPLE),
    Box(2.6, 0.55, 1.9, 1.15, "reward", "your function,\nin a process of its own", SAMPLE),
    Box(4.9, 0.55, 1.9, 1.15, "ref*", "frozen policy", FROZEN),
    Box(7.2, 0.55, 1.9, 1.15, "actor", "policy,\ntrainable", TRAIN),
    Box(9.5, 0.55, 1.9, 1.15, "critic*", "value model,\ntrainable", TRAIN),
)
WALK = (
    Box(0.3, 2.0, 1.75, 1.1, "drawn", "a prompt of the\nloader, its uid", CONTROL),
    Box(2.4, 2.0, 1.75, 1.1, "admitted", "as far as the\nbound allows", CONTROL),
    Box(4.5, 2.0, 1.75, 1.1, "sampled, scored", "n responses,\na driver's turn", SAMPLE),
    Box(6.6, 2.0, 1.75, 1.1, "judged", "signal? complete?\nfailed?", CONTROL),
    Box(8.7, 2.0, 1.75, 1.1, "waiting", "in the queue, and\nin a checkpoint", CONTROL),
    Box(10.8, 2.0, 1.75, 1.1, "taken", "in order, age of\ntokens checked", CONTROL),
    Box(12.9, 2.0, 1.75, 1.1, "learned from", "advantages,\noptimizer step", TRAIN),
)
CALLS = ((1.25, 1.25), (3.55, 3.55), (5.4, 5.4), (6.0, 7.5), (6.5, 9.8), (9.9, 8.6), (10.7, 10.7))
"""Where a double arrow from a stage to a role begins and ends (x)."""


def arrow(
    axes: Axes, start: tuple[float, float], end: tuple[float, float], both: bool = False, bend: float = 0
) -> None:
    axes.add_patch(
        FancyArrowPatch(
            start, end, arrowstyle="<|-|>" if both else "-|>", mutation_scale=10, color="#53616f", linewidth=1.1,
            connectionstyle=f"arc3,rad={bend}", shrinkA=1, shrinkB=1,
        )
    )  # fmt: skip


def blank(width: float, height: float) -> tuple[Figure, Axes]:
    """A figure whose units are inches."""
    figure, axes = pyplot.subplots(figsize=(width, height))
    axes.set_xlim(0, width)
    axes.set_ylim(-0.05, height + 0.15)
    axes.axis("off")
    return figure, axes


def note(axes: Axes, x: float, y: float, text: str, where: str = "center") -> None:
    axes.text(x, y, text, ha=where, va="center", fontsize=8, color=TEXT)


def save(figure: Figure, name: str) -> None:
    IMAGES.mkdir(parents=True, exist_ok=True)
    figure.savefig(IMAGES / name, bbox_inches="tight", metadata={"Date": None})
    print(f"wrote docs/images/{name}")


def draw_walk() -> None:
    """Every group moves from left to right; one that is dropped makes room for another."""
    figure, axes = blank(14.8, 4.0)
    for box in WALK:
        box.draw(axes)
    for left, right in pairwise(WALK):
        arrow(axes, (left.x + left.width, 2.55), (right.x, 2.55))
    arrow(axes, (7.2, 2.0), (3.6, 2.0), bend=-0.12)
    note(axes, 6.0, 1.55, "dropped: no signal, or failed twice; room for another group")
    arrow(axes, (7.8, 3.1), (5.2, 3.1), bend=0.35)
    note(axes, 6.5, 3.85, "failed once, or not complete: again")
    arrow(axes, (13.8, 2.0), (2.9, 2.0), bend=-0.3)
    note(axes, 8.4, 0.15, "new weights after every step: the bound admits the next groups")
    arrow(axes, (9.6, 2.0), (9.6, 1.55))
    note(axes, 9.6, 1.4, "dropped where it is too stale")
    save(figure, "stream.svg")


def draw() -> None:
    figure, axes = blank(11.7, 5.0)
    for x, width, label in ((0.15, 4.5, "collect"), (4.75, 6.8, "learn")):
        frame = FancyBboxPatch(
            (x, 2.95), width, 1.85, boxstyle="round,pad=0,rounding_size=0.15", facecolor="none", edgecolor="#b3bfcc",
            linestyle="--",
        )  # fmt: skip
        axes.add_patch(frame)
        axes.text(x + 0.15, 4.56, label, weight="bold", fontsize=10, color="#53616f", va="center")
    axes.text(0.15, 5.0, "controller: verl/trainer/ppo/step.py", fontsize=9, color="#53616f", va="center")
    axes.text(1.45, 2.2, "roles", fontsize=9, color="#53616f", va="center")
    for box in (*STAGES, *ROLES):
        box.draw(axes)
    for left, right in pairwise(STAGES):
        arrow(axes, (left.x + left.width, 3.6), (right.x, 3.6))
    for top, bottom in CALLS:
        arrow(axes, (top, 3.15), (bottom, 1.7), both=True)
    arrow(axes, (8.15, 0.55), (1.25, 0.55), bend=-0.075)
    note(axes, 4.7, 0.12, "new weights after every step")
    axes.text(
        11.55, 5.0, "* only where the configuration asks for it", ha="right", fontsize=8, color="#53616f", va="center"
    )
    save(figure, "dataflow.svg")


if __name__ == "__main__":
    pyplot.switch_backend("Agg")
    pyplot.rcParams.update({"svg.hashsalt": "verl", "font.family": "DejaVu Sans", "font.size": 9})
    draw()
    draw_walk()
