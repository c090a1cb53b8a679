"""A kind of server: its form of requests and answers, and its other calls."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from verl.errors import RolloutError
from verl.rollout.base import Request
from verl.rollout.gated import Sampled
from verl.rollout.reload_check import FIX


class AskServer(Protocol):
    """One request to the server, with retries: the JSON of its answer."""

    async def __call__(self, method: str, path: str, payload: Any = None, *, once: bool = False) -> Any: ...


class Text(Protocol):
    """A tokenizer, for servers that take and give text."""

    def decode(self, token_ids: Sequence[int], **options: Any) -> str: ...

    def encode(self, text: str, **options: Any) -> list[int]: ...


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
    updates_from_folder = False
    """Whether it takes new weights from a folder that it can read."""

    def __init__(self, ask: AskServer, model: str, text: Callable[[], Text]):
        self.ask, self.model, self.text = ask, model, text

    @abstractmethod
    def question(self, request: Request, stops: Sequence[int], seed: int) -> tuple[str, dict[str, Any]]:
        """Path and payload of a request.

        Args:
            stops: all tokens that end the response.
        """

    @abstractmethod
    def answer(self, request: Request, content: Any) -> Sampled:
        """The completion in an answer; a KeyError, IndexError, TypeError or ValueError means that it is nonsense."""

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


def prompt_of(request: Request) -> list[int]:
    """What the model has seen when it continues."""
    return [*request.token_ids, *request.generated_prefix]


def budget_of(request: Request) -> int:
    """Tokens that are left to sample."""
    return request.sampling.max_tokens - len(request.generated_prefix)


def shortest_of(request: Request) -> int:
    """Tokens that are left to sample before an end token may come; 0 where none ends the response anyway."""
    sampling = request.sampling
    return 0 if sampling.ignore_eos else max(0, sampling.min_tokens - len(request.generated_prefix))


def token_ids(values: Any) -> tuple[int, ...]:
    """Whole numbers, or a TypeError: a server that says 7.5 does not mean 7."""
    ids = tuple(values)
    if isinstance(values, str) or any(type(value) is not int for value in ids):
        raise TypeError(f"token ids {str(ids)[:80]}")
    return ids


def log_probs(values: Any) -> tuple[float, ...]:
    """Numbers, or a TypeError."""
    return tuple(float(value) for value in values)
