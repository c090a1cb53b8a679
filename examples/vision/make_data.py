"""Draws pictures with one question each: the colour of a disc, how many discs there are, which digit is written.

The task ``last`` draws videos of four frames, with a disc that changes its colour.

python examples/vision/make_data.py --task colour --save_dir outputs/vision/data

It writes ``train.parquet`` and ``test.parquet`` (prompts for reinforcement learning), ``sft.parquet`` (conversations)
and ``pairs.parquet`` (a right and a wrong answer). Equal arguments write equal files; no picture is in two of them.
With ``--camera`` rows of prompts have no picture: the tool in ``camera.py`` shows it. One conversation in two uses the
tool, the others guess.
"""

from __future__ import annotations

import argparse
import io
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image, ImageDraw, ImageFont

Row = dict[str, Any]
COLOURS = {"red": (220, 40, 40), "green": (40, 180, 60), "blue": (50, 80, 220), "yellow": (230, 210, 50)}
MOST_DISCS = 4
CAMERA = '<tool_call>\n{"name": "camera", "arguments": {}}\n</tool_call>'


def draw_colour(rng: random.Random, side: int) -> tuple[Image.Image, str]:
    """A disc of random place and size on grey."""
    name = rng.choice(sorted(COLOURS))
    picture = Image.new("RGB", (side, side), (rng.randrange(90, 160),) * 3)
    radius = rng.randint(side // 7, side // 4)
    x, y = (rng.randint(radius, side - radius) for _ in range(2))
    ImageDraw.Draw(picture).ellipse((x - radius, y - radius, x + radius, y + radius), fill=COLOURS[name])
    return picture, name


def draw_count(rng: random.Random, side: int) -> tuple[Image.Image, str]:
    """One to `MOST_DISCS` discs, each in a cell of its own of a grid, so that none hides another."""
    number = rng.randint(1, MOST_DISCS)
    picture = Image.new("RGB", (side, side), (rng.randrange(90, 160),) * 3)
    cells, cell = rng.sample(range(4), number), side // 2
    for place in cells:
        radius = rng.randint(cell // 5, cell // 3)
        x, y = (cell * axis + rng.randint(radius, cell - radius) for axis in divmod(place, 2))
        box = (x - radius, y - radius, x + radius, y + radius)
        ImageDraw.Draw(picture).ellipse(box, fill=COLOURS[rng.choice(sorted(COLOURS))])
    return picture, str(number)


def draw_digit(rng: random.Random, side: int) -> tuple[Image.Image, str]:
    """A digit in the middle, off it by at most one pixel: at a random place a small model does not learn to read."""
    digit = str(rng.randrange(10))
    picture = Image.new("RGB", (side, side), (rng.randrange(0, 60),) * 3)
    middle = side / 2 + rng.randint(-1, 1), side / 2 + rng.randint(-1, 1)
    ink = (rng.randrange(200, 256),) * 3
    ImageDraw.Draw(picture).text(middle, digit, fill=ink, font=ImageFont.load_default(side * 0.7), anchor="mm")
    return picture, digit


def draw_last(rng: random.Random, side: int) -> tuple[list[Image.Image], str]:
    """A large disc of one colour in two frames, then of another in two."""
    first, last = rng.sample(sorted(COLOURS), 2)
    grey, radius = (rng.randrange(90, 160),) * 3, rng.randint(side // 3, side // 2)
    x, y = (side // 2 + rng.randint(-2, 2) for _ in range(2))
    frames = []
    for name in (first, first, last, last):
        frames.append(Image.new("RGB", (side, side), grey))
        ImageDraw.Draw(frames[-1]).ellipse((x - radius, y - radius, x + radius, y + radius), fill=COLOURS[name])
    return frames, last


Draw = Callable[[random.Random, int], tuple[Image.Image | list[Image.Image], str]]
TASKS: dict[str, tuple[Draw, str, tuple[str, ...]]] = {
    "colour": (draw_colour, "What colour is the disc?", tuple(sorted(COLOURS))),
    "count": (draw_count, "How many discs are there?", tuple(str(i + 1) for i in range(MOST_DISCS))),
    "digit": (draw_digit, "Which digit is this?", tuple("0123456789")),
    "last": (draw_last, "What colour is the disc last?", tuple(sorted(COLOURS))),
}
"""How a picture is drawn, what is asked about it, and every answer there is."""


def png(picture: Image.Image) -> dict[str, Any]:
    """The picture as the bytes of a file, as data sets of the hub keep it."""
    out = io.BytesIO()
    picture.save(out, format="PNG")
    return {"bytes": out.getvalue(), "path": None}


def rows(task: str, counts: dict[str, int], side: int, seed: int, camera: bool = False) -> dict[str, list[Row]]:
    """Rows by the name of their file; no picture occurs twice.

    Args:
        counts: how many rows each file gets.
        side: pixels of a picture's edges.
        camera: a tool shows the pictures.

    Raises:
        ValueError: the task has not so many different pictures.
    """
    draw, question, answers = TASKS[task]
    rng, seen = random.Random(seed), set()
    made: dict[str, list[Row]] = {}
    for name, count in counts.items():
        made[name] = []
        for number in range(count):
            for _ in range(1000):
                drawn, answer = draw(rng, side)
                media = [png(frame) for frame in drawn] if isinstance(drawn, list) else png(drawn)
                key = str(media)
                if key not in seen:
                    break
            else:
                raise ValueError(f"{task} has fewer different pictures of {side} pixels than {sum(counts.values())}")
            seen.add(key)
            wrong = rng.choice([other for other in answers if other != answer])
            made[name].append(row_of(name, question, media, (answer, wrong), (task, number)))
            if camera:
                guess = rng.choice(answers) if rng.random() < 0.5 else None
                made[name][-1] = through_camera(made[name][-1], question, guess)
    return made


def through_camera(row: Row, question: str, guess: str | None) -> Row:
    """A row whose picture a tool shows; a conversation with a ``guess`` does without."""
    (picture,), user = row.pop("images"), {"role": "user", "content": question}
    if "messages" not in row:
        shown = {"tools_kwargs": {"camera": {"create_kwargs": {"picture": picture["bytes"]}}}}
        return {**row, "prompt": [user], "extra_info": {**row["extra_info"], **shown}}
    if guess is not None:
        return {"messages": [user, {"role": "assistant", "content": guess}], "images": []}
    call, shown = {"role": "assistant", "content": CAMERA}, {"role": "tool", "content": "<image>"}
    return {"messages": [user, call, shown, row["messages"][-1]], "images": [picture]}


def row_of(name: str, question: str, media: Any, answers: tuple[str, str], place: tuple[str, int]) -> Row:
    """One row of the file ``name``; of the answers the first is right. A list is the frames of a video."""
    kind = "video" if isinstance(media, list) else "image"
    column = {f"{kind}s": [media]}
    user, said = {"role": "user", "content": f"<{kind}>{question}"}, {"role": "assistant", "content": answers[0]}
    if name == "sft":
        return {"messages": [user, said], **column}
    if name == "pairs":
        wrong = {"role": "assistant", "content": answers[1]}
        return {"prompt": [user], "chosen": [said], "rejected": [wrong], **column}
    return {
        "data_source": f"vision/{place[0]}",
        "prompt": [user],
        **column,
        "ability": "vision",
        "reward_model": {"style": "rule", "ground_truth": answers[0]},
        "extra_info": {"split": name, "index": place[1]},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Write pictures or videos with questions as four parquet files.")
    parser.add_argument("--task", choices=sorted(TASKS), default="colour")
    parser.add_argument("--save_dir", type=Path, default=Path("outputs/vision/data"))
    parser.add_argument("--train_size", type=int, default=512)
    parser.add_argument("--test_size", type=int, default=128)
    parser.add_argument("--sft_size", type=int, default=512)
    parser.add_argument("--pairs_size", type=int, default=256)
    parser.add_argument("--side", type=int, default=56, help="pixels of a picture's edges")
    parser.add_argument("--camera", action="store_true", help="a tool shows the pictures: see camera.py")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    if arguments.camera and (arguments.task == "last" or arguments.pairs_size):
        parser.error("--camera is for pictures and needs --pairs_size 0")
    # The test comes first: other sizes of the other files leave it as it is.
    counts = {name: getattr(arguments, f"{name}_size") for name in ("test", "train", "sft", "pairs")}
    counts = {name: count for name, count in counts.items() if count}
    arguments.save_dir.mkdir(parents=True, exist_ok=True)
    for name, made in rows(arguments.task, counts, arguments.side, arguments.seed, arguments.camera).items():
        pq.write_table(pa.Table.from_pylist(made), arguments.save_dir / f"{name}.parquet")
        print(f"wrote {arguments.save_dir / name}.parquet: {len(made)} rows")


if __name__ == "__main__":
    main()
