"""Counts the frames between `stages.train` on the controller and ``optimizer.step`` in a worker.

    PYTHONPATH=. python scripts/count_frames.py [--runtime local ray]    # trains a tiny model for one step

Frames are those of verl's own modules, without the two ends: what a person reads in a traceback from a failing step.
On Ray they are those of the controller until the call is handed to Ray, then those of the worker's process.

The worker's half is read by a hook of torch, which this module installs where it is imported while a count runs: a run
names it as the ``external_lib`` of its model.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

FOLDER = "VERL_FRAMES_FOLDER"
"""The variable that names the folder of the count that runs; workers take over what begins with VERL_."""
SETTING = f"actor_rollout_ref.model.external_lib={__name__ if __name__ != '__main__' else 'scripts.count_frames'}"
"""The setting of a run that is counted."""
LOCAL_FRAMES, RAY_FRAMES = 9, 10
"""No more than these; tests hold both."""
ABOVE, CALL = "verl.trainer.ppo.stages.train", "verl.workers.roles.train"
Frames = list[str]


@contextmanager
def counted() -> Iterator[Frames]:
    """Count the frames of the run inside, which has `SETTING`; the list is full afterwards.

    Yields:
        ``module.function`` of every frame, outermost first.
    """
    from verl.trainer.ppo import stages

    found: Frames = []
    train = stages.train

    def watched(*args: Any, **kwargs: Any) -> None:
        before = sys.getprofile()
        sys.setprofile(_sender(found) if "ray" in sys.modules else before)
        try:
            train(*args, **kwargs)
        finally:
            sys.setprofile(before)

    with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, {FOLDER: folder}):
        hook = _watch_optimizers(Path(folder))  # for a run in this process
        try:
            with mock.patch.object(stages, "train", watched):
                yield found
        finally:
            hook.remove()
        worker = json.loads(Path(folder, "worker.json").read_text())
    found += worker["frames"]


def _sender(found: Frames) -> Callable[[FrameType, str, Any], None]:
    """A profile function that keeps the frames above the first update that is handed to Ray."""

    def profile(frame: FrameType, event: str, arg: Any) -> None:
        if event == "call" and not found and frame.f_code.co_name == "remote" and _module(frame).startswith("ray."):
            frames = _frames(frame)
            found.extend(frames if CALL in frames else [])  # a group may first be queried for its mesh

    return profile


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _frames(frame: FrameType | None) -> Frames:
    """verl's frames from this one up to `stages.train` or to the end, outermost first."""
    found: Frames = []
    while frame is not None and (name := f"{_module(frame)}.{frame.f_code.co_name}") != ABOVE:
        found += [name] if name.startswith("verl.") else []
        frame = frame.f_back
    return found[::-1]


def _watch_optimizers(folder: Path) -> Any:
    """Write the frames above the first optimizer step of this process, which trains."""
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    def before_step(*_: Any) -> None:
        note = folder / "worker.json"
        if not note.exists():
            note.write_text(json.dumps({"frames": _frames(sys._getframe())}))

    return register_optimizer_step_pre_hook(before_step)


def count(runtime: str) -> Frames:
    """The frames of one step of a tiny model.

    Args:
        runtime: ``local`` or ``ray``.
    """
    from tests.harness.runs import prepare, train

    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            prepare()
            with counted() as found:
                train(f"trainer.runtime={runtime}", SETTING, "trainer.device=cpu")
        finally:
            os.chdir(before)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runtime", nargs="+", choices=("local", "ray"), default=["local", "ray"])
    for runtime in parser.parse_args().runtime:
        found = count(runtime)
        print("\n".join([f"{runtime}: {len(found)} frames", *(f"  {frame}" for frame in found)]))


if os.environ.get(FOLDER):
    _watch_optimizers(Path(os.environ[FOLDER]))
if __name__ == "__main__":
    main()
