"""A small text environment: guess a digit, higher or lower is told; used by tests and without gymnasium."""

from __future__ import annotations

import json
import random

import numpy as np
from PIL import Image


class Guess:
    """Reward 1 for the right digit, -0.25 for a wrong one; truncated after ``limit`` guesses."""

    made: list[Guess] = []  # noqa: RUF012

    def __init__(self, limit: int = 5, broken: str = ""):
        self.limit, self.broken, self.guesses, self.closed = limit, broken, 0, False
        self.seed: int | None = None
        Guess.made.append(self)

    def reset(self, *, seed: int | None = None, options: dict | None = None):
        self.seed = seed
        if self.broken == "reset":
            json.loads("no board")
        self.digit = (options or {}).get("digit", random.Random(seed).randrange(10))
        return "Guess a digit.", {"digit": self.digit}

    def step(self, action: str):
        self.guesses += 1
        if self.broken == "raise":
            raise ValueError("the board is gone")
        if self.broken == "exit":
            raise SystemExit(2)
        if self.broken == "hang":
            import time

            time.sleep(60)
        if self.broken == "shape":
            return "x"
        if self.broken == "nan":
            return "x", float("nan"), False, False, {}
        if self.broken == "digits":
            return 10**5000, 0.0, False, False, {}
        if self.broken == "novel":
            raise ValueError("x" * 10_000_000)
        if self.broken == "bytes":
            return b"x", 0.0, False, False, {}
        if action == str(self.digit):
            return "Right.", 1.0, True, False, {}
        told = "higher" if action < str(self.digit) else "lower"
        return told, -0.25, False, self.guesses >= self.limit, {}

    def close(self):
        self.closed = True


class Named(Guess):
    """Names its states: ``start``, then the number of guesses."""

    def reset(self, **options):
        shown, info = super().reset(**options)
        return shown, {**info, "state": [] if self.broken == "state" else "start"}

    def step(self, action):
        *step, info = super().step(action)
        return (*step, {**info, "state": self.guesses})


class Discs:
    """Shows a blue disc, then a red one; the answer is the colour that is shown. Each picture has its own form."""

    def __init__(self, broken: str = ""):
        self.broken = broken

    def reset(self):
        picture = np.zeros((56, 56, 3), dtype=np.uint8)
        picture[..., 2] = 255
        forms = {"shape": picture[..., :2], "name": {"picture": picture}, "damaged": {"image": b"no picture"}}
        return forms.get(self.broken, {"text": "Which colour?", "image": picture}), {}

    def step(self, action: str):
        return Image.new("RGB", (84, 56), "red"), float(action == "blue"), action == "red", False, {}


class Films:
    """Shows four frames of a colour, as an array, then two of another, by name; the answer is the colour."""

    def __init__(self, broken: bool = False, file: str = ""):
        self.broken, self.file = broken, file

    def reset(self):
        if self.file:
            return {"video": self.file}, {}
        frames = np.zeros((4, 56, 56, 3), dtype=np.uint8)
        frames[..., 2] = 255
        return (frames.astype(np.float32) if self.broken else frames), {}

    def step(self, action: str):
        shown = {"text": "And now?", "video": [Image.new("RGB", (84, 56), "red")] * 2}
        return shown, float(action == "blue"), action == "red", False, {}


class Older:
    """The form of before 2022: ``reset`` gives the observation alone, ``step`` one ``done``."""

    def reset(self):
        return "Say a."

    def step(self, action: str):
        return "", float(action == "a"), True, {}


class Asynchronous:
    """Coroutines instead of plain methods."""

    async def reset(self, seed=None):
        return "Say b.", {}

    async def step(self, action: str):
        return None, float(action == "b"), True, False, {}


class Flood:
    """Shows 30 MB at every step; the second one is the last."""

    def __init__(self):
        self.steps = 0

    def reset(self):
        return "x" * 30_000_000, {}

    def step(self, action: str):
        self.steps += 1
        return "x" * 30_000_000, 0.0, self.steps == 2, False, {}
