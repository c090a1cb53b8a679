"""A model, demonstrations and prompts on which DeepEyes can be tried in minutes on a CPU.

    python -m recipe.deepeyes.trial outputs/deepeyes [--seed 0]

A picture of 448 x 448 pixels has one small disc in its upper left corner, and the model is shown the picture at an
eighth of its size. In the demonstrations three pupils in four zoom in on the corner and name the colour; the
others guess.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

import pandas as pd
from PIL import Image, ImageDraw
from transformers import AutoModelForImageTextToText, AutoTokenizer

from examples.vision.make_data import COLOURS, png
from examples.vision.make_model import write_model
from recipe.deepeyes.zoom import NAME

SIDE, CORNER = 448, 56
QUESTION = {"role": "user", "content": "<image>What colour is the disc?"}
CALL = f"<tool_call>\n{json.dumps({'name': NAME, 'arguments': {'bbox_2d': [0, 0, CORNER, CORNER]}})}\n</tool_call>"


def draw(rng: random.Random) -> tuple[Image.Image, str]:
    """A picture and the colour of its disc."""
    colour, radius = rng.choice(sorted(COLOURS)), rng.randint(8, 14)
    picture = Image.new("RGB", (SIDE, SIDE), (rng.randrange(90, 160),) * 3)
    x, y = (rng.randint(radius, CORNER - radius) for _ in range(2))
    ImageDraw.Draw(picture).ellipse((x - radius, y - radius, x + radius, y + radius), fill=COLOURS[colour])
    return picture, colour


def answer(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def demonstration(rng: random.Random, picture: Image.Image, colour: str) -> dict[str, Any]:
    """A conversation with a look, or with a guess."""
    if rng.random() < 0.25:
        return {
            "messages": [QUESTION, answer(f"<answer>{rng.choice(sorted(COLOURS))}</answer>")],
            "images": [png(picture)],
        }
    messages = [QUESTION, answer(CALL), {"role": "tool", "content": "<image>"}, answer(f"<answer>{colour}</answer>")]
    return {"messages": messages, "images": [png(picture), png(picture.crop((0, 0, CORNER, CORNER)))]}


def prompt(picture: Image.Image, colour: str, index: int) -> dict[str, Any]:
    look = {NAME: {"create_kwargs": {"image": png(picture)["bytes"]}}}
    truth = {"style": "rule", "ground_truth": colour}
    row = {"data_source": "vision/corner", "prompt": [QUESTION], "images": [png(picture)]}
    return {**row, "reward_model": truth, "extra_info": {"index": index, "tools_kwargs": look}}


def make_model(folder: Path, seed: int) -> None:
    """That of ``examples/vision``, with a token for the call and one for each end of an answer."""
    write_model(folder, seed=seed)
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForImageTextToText.from_pretrained(folder)
    tokenizer.add_tokens([CALL, "<answer>", "</answer>"])
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description="Write model, demonstrations and prompts for a trial of DeepEyes.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rows", type=int, default=1024, help="demonstrations; of prompts there are 1 for 2 of these")
    arguments = parser.parse_args()
    folder, rng = arguments.folder, random.Random(arguments.seed)
    folder.mkdir(parents=True, exist_ok=True)
    pd.DataFrame([demonstration(rng, *draw(rng)) for _ in range(arguments.rows)]).to_parquet(folder / "sft.parquet")
    pd.DataFrame([prompt(*draw(rng), index) for index in range(arguments.rows // 2)]).to_parquet(
        folder / "train.parquet"
    )
    make_model(folder / "base", arguments.seed)
    print(f"wrote {folder}")


if __name__ == "__main__":
    main()
