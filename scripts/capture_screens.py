"""Run the commands of the guides in terminals of several widths and keep what they show, as text and as pictures.

    PYTHONPATH=. python scripts/capture_screens.py FOLDER   # writes docs/images/screen_*.png and .txt

FOLDER has `examples`, and the commands of the quickstart's page and of the page of several turns were run in it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from matplotlib import font_manager
from PIL import Image, ImageDraw, ImageFont
from rich.color import Color
from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ROOT / "docs" / "images"
BACKGROUND, FOREGROUND = (30, 30, 30), (220, 220, 220)
SIZE = 15
MODEL = "my/sft/global_step_60/model/huggingface"
QUICK = (
    "verl train grpo data.train_files=my/data/train.parquet data.val_files=my/data/test.parquet "
    "data.train_batch_size=16 data.max_prompt_length=32 data.max_response_length=8 "
    f"actor_rollout_ref.model.path={MODEL} actor_rollout_ref.actor.ppo_mini_batch_size=16 "
    "actor_rollout_ref.actor.optim.lr=1e-3 reward.custom_reward_function.path=examples/quickstart/reward.py "
    "trainer.total_training_steps=2 trainer.test_freq=2"
)
SCREENS = {
    "100_columns": (100, True, QUICK),
    "60_columns": (60, True, QUICK),
    "pipe": (100, False, QUICK),
    "several_turns": (100, True, "TURNS"),
}
"""Name -> columns, whether it is a terminal, and the command."""


def turns() -> str:
    """The run of the page of several turns, two steps of it."""
    page = (ROOT / "docs" / "howto" / "multi_turn.md").read_text(encoding="utf-8")
    run = page.partition("\nverl train grpo ")[2].partition("\n```")[0].replace("\\\n", " ")
    return f"verl train grpo {run} trainer.total_training_steps=2 trainer.test_freq=2"


def shown(folder: Path, columns: int, is_terminal: bool, command: str) -> str:
    """What a command prints: with colours, and without what moves, where it is a terminal."""
    terminal = {"TTY_COMPATIBLE": "1", "TTY_INTERACTIVE": "0", "TERM": "xterm-256color"} if is_terminal else {}
    environment = {**os.environ, **terminal, "COLUMNS": str(columns), "PYTHONPATH": f"{folder}:{ROOT}"}
    environment["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-ec", command],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{command}\n{done.stdout[-3000:]}")
    return done.stdout.replace(str(folder), "~")


def picture(text: str, columns: int) -> Image.Image:
    """The text as a terminal of so many columns shows it."""
    font = ImageFont.truetype(font_manager.findfont("DejaVu Sans Mono"), SIZE)
    width, height = font.getlength("m"), SIZE + 4
    console = Console(width=columns, color_system="truecolor", force_terminal=True)
    lines = console.render_lines(Text.from_ansi(text), console.options.update(width=columns), pad=False)
    image = Image.new("RGB", (round(width * columns) + 16, height * len(lines) + 16), BACKGROUND)
    draw = ImageDraw.Draw(image)
    for row, line in enumerate(lines):
        column = 0
        for segment in line:
            draw.text((8 + column * width, 8 + row * height), segment.text, colour(segment.style), font)
            column += segment.cell_length
    return image


def colour(style: object) -> tuple[int, int, int]:
    """What a style writes with; dim is halfway to the background."""
    of_style: Color | None = getattr(style, "color", None)
    shade = tuple(of_style.get_truecolor(MONOKAI)) if of_style is not None and not of_style.is_default else FOREGROUND
    if getattr(style, "dim", False):
        shade = tuple((one + other) // 2 for one, other in zip(shade, BACKGROUND))
    return shade  # type: ignore[return-value]


def main() -> None:
    folder = Path(sys.argv[1]).resolve()
    for name, (columns, is_terminal, command) in SCREENS.items():
        text = shown(folder, columns, is_terminal, turns() if command == "TURNS" else command)
        plain = Text.from_ansi(text).plain
        (IMAGES / f"screen_{name}.txt").write_text(plain.rstrip() + "\n", encoding="utf-8")
        picture(text, columns).quantize(32).save(IMAGES / f"screen_{name}.png", optimize=True)
        print(f"{name}: {len(plain.splitlines())} lines")


if __name__ == "__main__":
    main()
