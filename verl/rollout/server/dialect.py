"""A kind of server: its form of requests and answers, and its other calls."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from PIL import Image

from verl.errors import NotBuiltError, RolloutError
from verl.json_text import Json, JsonObject
from verl.protocol.tokenizer import Tokenizer
from verl.rollout.base import Request
from verl.rollout.gated import NEVER, Sampled
from verl.rollout.reload_check import FIX
from verl.rollout.scores import ScoreRequest, Scores
from verl.rollout.server.pictures import ByIdentity, Post, png_url


class AskServer(Protocol):
    """One request to the server, with retries: the JSON of its answer."""

    async def __call__(self, method: str, path: str, payload: Json | None = None, *, once: bool = False) -> Any: ...


class Dialect(ABC):
    """One kind of server.

    Args:
        ask: sends a question.
        model: the served model's name.
        text: gives the tokenizer, loaded when it is first needed.
    """

    name: str
    takes_ids = True
    """Whether a prompt is sent as token ids; text passes a tokenizer twice and may become other tokens."""
    gives_log_probs = True
    raw_is_adjusted = False
    """Whether its raw log-probs contain the repetition penalty and the shortest response, which change them first."""
    fix_of_reload = FIX
    """What to do if new weights arrive incomplete."""
    takes_images = takes_videos = False
    """Whether a prompt may show images, or videos: only where the tokens that the server makes of it are known."""
    updates_from_folder = False
    """Whether it takes new weights from a folder that it can read."""
    scores_tokens = scores_at_temperature = False
    """Whether it gives log-probs of tokens that are sent to it, and whether also at a temperature other than 1."""

    image_token_id: int | None = None
    """Stands for a part of an image in prompts; None: the model reads only text."""
    never_drawn: tuple[int, ...] = ()
    """Tokens that later turns would take for those of an image or a video."""

    def __init__(self, ask: AskServer, model: str, text: Callable[[], Tokenizer]):
        self.ask, self.model, self.text = ask, model, text
        self._urls = ByIdentity(self._encoding)

    @abstractmethod
    def question(self, request: Request, stops: Sequence[int], seed: int) -> tuple[str, dict[str, Any]]:
        """Path and payload of a request.

        Args:
            stops: all tokens that end the response.
        """

    @abstractmethod
    def answer(self, request: Request, content: JsonObject) -> Sampled:
        """The completion in an answer; a KeyError, IndexError, TypeError or ValueError means that it is nonsense."""

    def score_question(self, request: ScoreRequest) -> tuple[str, JsonObject]:
        """Path and payload of a request for the log-probs of given tokens.

        Raises:
            NotBuiltError: this kind of server gives none.
        """
        raise NotBuiltError(
            f"a server of kind {self.name!r} gives no log-probs of tokens that are sent to it",
            key="actor_rollout_ref.rollout.server.api",
            got=self.name,
            fix="Serve the model with vLLM, SGLang or a host of this library, and name its kind there if it was not "
            "recognised.",
        )

    def scores(self, request: ScoreRequest, content: JsonObject) -> Scores:
        """The log-probs in an answer; errors as in `answer`."""
        raise AssertionError(f"{self.name} is queried for no scores")

    async def exchange(self, request: Request, payload: dict[str, Any], post: Post) -> JsonObject:
        """The content of the answer to a question, which ``post`` sends to its path.

        Raises:
            NotBuiltError: the request shows images or videos that this kind of server does not take.
        """
        if request.videos and not self.takes_videos:
            raise NotBuiltError(
                f"a server of kind {self.name!r} chooses the frames of videos itself, and which it shows is not known",
                key="actor_rollout_ref.rollout.server.api",
                got=self.name,
                fix="Set actor_rollout_ref.rollout.name to vllm or hf, or serve the model with a host of this library.",
            )
        if request.sees and not self.takes_images:
            raise NotBuiltError(
                f"a server of kind {self.name!r} takes text, and which tokens it makes of images is not known",
                key="actor_rollout_ref.rollout.server.api",
                got=self.name,
                fix="Serve the model with vLLM, SGLang or a host of this library.",
            )
        return await post(payload)

    async def image_urls(self, request: Request) -> list[str]:
        """Its images as data URLs, encoded in threads; the samples of a prompt share the work."""
        return [await asyncio.shield(self._urls.of(image)) for image in request.images or ()]

    def _encoding(self, image: Image.Image) -> asyncio.Future[str]:
        work = asyncio.ensure_future(asyncio.to_thread(png_url, image))

        def check(done: asyncio.Future[str]) -> None:
            if done.cancelled() or done.exception() is not None:
                self._urls.drop(image)

        work.add_done_callback(check)
        return work

    @property
    def bias(self) -> dict[str, Any]:
        """The parameter by which no placeholder and no mark of an image or video is drawn."""
        return {"logit_bias": {str(token): NEVER for token in self.never_drawn}} if self.never_drawn else {}

    def key(self, request: Request) -> str:
        """The name under which the server knows a request, for `abort`."""
        return request.id

    async def abort(self, keys: Sequence[str]) -> bool:
        """Ask the server to end requests now, so that they answer with what they have; False if it cannot."""
        return False

    async def weights_folder(self) -> str | None:
        """Where the server wants new weights to be put; None leaves it to the client."""
        return None

    async def update(self, folder: str, version: int) -> None:
        """Load the weights in a folder.

        Raises:
            RolloutError: this kind of server has no call for it.
        """
        raise RolloutError(
            f"a server of kind {self.name!r} has no call for new weights, so a policy cannot be trained with it",
            key="actor_rollout_ref.rollout.name",
            got="server",
            fix="Use it for evaluation (trainer.val_only=true, main_generation), or train on vLLM or SGLang.",
        )

    async def logprobs_mode(self) -> str | None:
        """Which log-probs the server says that it reports; None if it does not say it."""
        return None

    async def version(self) -> int | None:
        """The version of the server's weights; None if it does not report it."""
        return None

    async def prompt_log_probs(self, token_ids: Sequence[int]) -> list[float] | None:
        """Of every token of a prompt but the first; None if the server does not report them."""
        return None

    async def reload(self) -> bool:
        """Reload the current weights; False if the server has no call for it."""
        return False

    async def sleep(self, level: int) -> bool:
        """Free memory; False if the server has no call for it."""
        return False

    async def wake(self) -> bool:
        """Undo it."""
        return False


def resumed_prompt(request: Request) -> list[int]:
    """What the model has seen when it continues."""
    return [*request.token_ids, *request.generated_prefix]


def check_prompt(request: Request, used: Sequence[int] | None, fix: str) -> None:
    """Refuse an answer to another prompt than the request's.

    Args:
        used: the token ids that the server made of the prompt; None where it does not say.
        fix: what may help.

    Raises:
        RolloutError: they differ, or are not known.
    """
    meant, key = resumed_prompt(request), f"request {request.id}"
    if used is None:
        raise RolloutError("the server does not say which tokens it made of the prompt", key=key, fix=fix)
    if list(token_ids(used)) != meant:
        message = f"the server made {len(used)} other tokens of the prompt of {len(meant)}"
        raise RolloutError(message, key=key, fix=fix)


def budget_of(request: Request) -> int:
    """Tokens that are left to sample."""
    return request.sampling.max_tokens - len(request.generated_prefix)


def shortest_of(request: Request) -> int:
    """Tokens that are left to sample before an end token may come; 0 where none ends the response anyway."""
    sampling = request.sampling
    return 0 if sampling.ignore_eos else max(0, sampling.min_tokens - len(request.generated_prefix))


def token_ids(values: Iterable[int]) -> tuple[int, ...]:
    """Whole numbers, or a TypeError: a server that says 7.5 does not mean 7."""
    ids = tuple(values)
    if isinstance(values, str) or any(type(value) is not int for value in ids):
        raise TypeError(f"token ids {str(ids)[:80]}")
    return ids


def log_probs(values: Iterable[float]) -> tuple[float, ...]:
    """Numbers, or a TypeError."""
    return tuple(float(value) for value in values)
