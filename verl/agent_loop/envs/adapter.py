"""A user's environment behind one asynchronous form, whatever variant of gymnasium's ``reset``/``step`` it has.

The environment is any object; gymnasium itself is not needed. Plain methods run in a thread and may block, coroutines
run on the tools' event loop; each call has a time limit, and what comes back is checked.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import numbers
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from PIL.Image import Image, fromarray

from verl.agent_loop.envs.host import accepted
from verl.tools.runner import TimeLimit, in_thread, runner

OBSERVED = ("text", "image", "video")
"""Parts of an observation that has several; ``image`` is one image or a list, ``video`` is one video."""


class EnvironmentFailure(Exception):
    """The environment raised, hung, or returned something else than its contract says."""


class RemoteEnvironmentError(Exception):
    """What a call of an environment in another process came to: ``raised ValueError: ...``, ``ended its process``."""


@dataclass(frozen=True)
class Observation:
    """What an environment shows: a text, and for a model that sees images and videos before it, in any form.

    Args:
        state: names the state that is observed, where the environment does; else the observation itself does.
    """

    text: str
    images: tuple[object, ...] = ()
    videos: tuple[object, ...] = ()
    state: str = ""


@dataclass(frozen=True)
class Step:
    """What one action led to.

    Args:
        observation: what the model is shown next.
        reward: of this action alone.
        terminated: the episode reached its end; ``truncated``: it was cut off.
    """

    observation: Observation
    reward: float
    terminated: bool
    truncated: bool
    info: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_over(self) -> bool:
        return self.terminated or self.truncated


class Environment:
    """One episode.

    Args:
        make: makes the environment; gets ``kwargs``.
        timeout: seconds of any call, but of ``step`` where the environment has the attribute ``bounds_its_steps``: its
            steps end by limits of its own, and may wait for others before.
    """

    hang_hint = "; its thread stays (process: true ends it)"

    def __init__(self, make: Callable[..., object], kwargs: Mapping[str, object], timeout: float):
        self._make, self._kwargs, self._timeout = make, dict(kwargs), timeout
        self._it: Any = None

    async def make(self) -> None:
        """Make it, and call its ``before_reset()`` where it has one: for this no time limit holds."""
        self._it = await self._call("making it", self._timeout, self._make, **self._kwargs)
        prepare = getattr(self._it, "before_reset", None)
        if callable(prepare):
            await self._call("before_reset", None, prepare)

    async def reset(self, seed: int, options: Mapping[str, Any] | None) -> Observation:
        """Reset it; the first observation.

        Args:
            seed, options: given where ``reset`` takes them.
        """
        missing = [name for name in ("reset", "step") if not callable(getattr(self._it, name, None))]
        if missing:
            raise EnvironmentFailure(f"{type(self._it).__name__} has no method {missing[0]}")
        arguments = {"seed": seed, "options": None if options is None else dict(options)}
        answer = await self._call("reset", self._timeout, self._it.reset, **accepted(self._it.reset, arguments))
        info: Mapping[str, Any] = {}
        if isinstance(answer, tuple) and len(answer) == 2 and isinstance(answer[1], Mapping):
            answer, info = answer
        return replace(_observed(answer, "reset"), state=_state(info, "reset"))

    async def step(self, action: str) -> Step:
        """Do what the model wrote."""
        limit = None if getattr(self._it, "bounds_its_steps", False) else self._timeout
        answer = await self._call("step", limit, self._it.step, action)
        if not isinstance(answer, tuple) or len(answer) not in (4, 5):
            raise EnvironmentFailure(
                f"step returned {answer!r:.100}, not (observation, reward, terminated, truncated, info)"
            )
        observation, reward, terminated, *rest = answer
        truncated, info = (rest[0], rest[1]) if len(rest) == 2 else (False, rest[0])
        if isinstance(reward, bool) or not isinstance(reward, numbers.Real) or not math.isfinite(reward):
            raise EnvironmentFailure(f"step returned the reward {reward!r:.100}, which is no finite number")
        over = bool(terminated) or bool(truncated)
        shown = Observation("") if over and observation is None else _observed(observation, "step")
        info = info if isinstance(info, Mapping) else {}
        shown = replace(shown, state=_state(info, "step"))
        return Step(shown, float(reward), bool(terminated), bool(truncated), info)

    async def close(self) -> None:
        """Let go of it, where it has a ``close``."""
        close = getattr(self._it, "close", None)
        if callable(close):
            await self._call("close", self._timeout, close)

    async def _call(
        self, what: str, limit: float | None, function: Callable[..., Any], /, *arguments: Any, **named: Any
    ) -> Any:
        try:
            return await runner().run(lambda: _run(function, *arguments, **named), limit)
        except TimeLimit as error:
            left = f"{what} took longer than {error.seconds:g} s and was given up{self.hang_hint}"
            raise EnvironmentFailure(left) from error
        except RemoteEnvironmentError as error:
            raise EnvironmentFailure(f"{what} {error}") from error
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # boundary: the user's environment, which may even call sys.exit
            raise EnvironmentFailure(f"{what} raised {type(error).__name__}: {error}") from error


async def _run(function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    if inspect.iscoroutinefunction(function):
        return await function(*arguments, **named)
    result = await in_thread(function, *arguments, **named)
    return await result if inspect.isawaitable(result) else result


def _observed(observation: object, where: str) -> Observation:
    """An observation in any of its forms: a text, an image, or both by name."""
    if isinstance(observation, Mapping):
        unknown = [name for name in observation if name not in OBSERVED]
        if unknown or not observation:
            why = f"{where} returned an observation with {unknown or 'nothing'}"
            raise EnvironmentFailure(f"{why}; it may have {', '.join(OBSERVED)}")
        images, video = observation.get("image"), observation.get("video")
        listed = images if isinstance(images, (list, tuple)) else [] if images is None else [images]
        videos = () if video is None else (_clip(video),)
        return Observation(_text(observation.get("text") or "", where), tuple(map(_picture, listed)), videos)
    if isinstance(observation, np.ndarray) and observation.ndim == 4:
        return Observation("", videos=(_clip(observation),))
    if isinstance(observation, (np.ndarray, Image)):
        return Observation("", (_picture(observation),))
    return Observation(_text(observation, where))


def _picture(image: object) -> object:
    """Pixels (H, W), (H, W, 3) or (H, W, 4) uint8 as a picture; other forms of images are read as those of rows are."""
    if not isinstance(image, np.ndarray):
        return image
    has_channels = image.ndim == 2 or (image.ndim == 3 and image.shape[-1] in (3, 4))
    if image.dtype != np.uint8 or not image.size or not has_channels:
        got, allowed = f"the shape {image.shape} and the type {image.dtype}", "(H, W), (H, W, 3) or (H, W, 4), of uint8"
        raise EnvironmentFailure(f"an image has {got}; it may have {allowed}")
    return fromarray(image)


def _state(info: Mapping[str, object], where: str) -> str:
    """``info["state"]``, a text or a number; empty where there is none."""
    state = info.get("state")
    if state is None:
        return ""
    if isinstance(state, str) and state:
        return state
    if isinstance(state, numbers.Real) and math.isfinite(state):
        return _text(state, where)
    raise EnvironmentFailure(f"{where} returned info['state'] {state!r:.100}; it is a text or a finite number")


def _clip(video: object) -> object:
    """Frames (T, H, W, 3) uint8, or a list of pictures, as a list; other forms are read as those of rows are."""
    if isinstance(video, (np.ndarray, list, tuple)):
        return [_picture(frame) for frame in video]
    return video


def _text(observation: object, where: str) -> str:
    if isinstance(observation, str):
        return observation
    if isinstance(observation, numbers.Number):
        try:
            return str(observation)
        except ValueError as error:  # Python writes no integer of more than 4,300 digits
            raise EnvironmentFailure(f"{where} returned a number that cannot be written as text: {error}") from error
    raise EnvironmentFailure(
        f"{where} returned an observation of type {type(observation).__name__}; it is a text, an image, "
        'a video, or {"text": ..., "image": ..., "video": ...}'
    )
