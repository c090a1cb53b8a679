"""What an entry of `recipe.collabllm.loop.CollaborativeLoop` in a file of agent loops may say."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from verl.agent_loop.failed import OnError, check_on_error
from verl.agent_loop.settings import positive
from verl.errors import ConfigError
from verl.registry import load_object

if TYPE_CHECKING:
    from recipe.collabllm.loop import Conversation


@dataclass(frozen=True)
class CollabSettings:
    """The arguments of an entry in ``actor_rollout_ref.rollout.agent.agent_loop_config_path``.

    Args:
        reward: ``my_pkg.mod:name``, a function of a `Conversation`, plain or async, which returns a number, or a dict
            with ``score`` and further numbers, each logged as ``collabllm/<name>``.
        reward_kwargs: its further arguments.
        futures: K.
        max_tokens_per_turn: limit of tokens of one answer; None: what is left of the response.
        reward_timeout: seconds for a reward; an answer at which it hangs has the lowest score, as a mask would pay.
        on_error: of a simulated user or a reward function that fails: ``mask``, ``zero`` or ``raise``.

    Raises:
        ConfigError: a value that is not allowed.
    """

    reward: str
    reward_kwargs: Mapping[str, Any] = field(default_factory=dict)
    futures: int = 3
    max_tokens_per_turn: int | None = None
    reward_timeout: float = 60.0
    on_error: OnError = "mask"

    def __post_init__(self) -> None:
        check_on_error(self.on_error)
        positive(self.reward_timeout, "reward_timeout")
        for key in ("futures", "max_tokens_per_turn"):
            number = getattr(self, key)
            if not (type(number) is int and number >= 1) and (key, number) != ("max_tokens_per_turn", None):
                fix = f"Write {key}: 3, for example, or leave it out."
                raise ConfigError("not a whole number above 0", key=key, got=number, allowed="1, 2, 3, ...", fix=fix)

    def function(self) -> Callable[[Conversation], Any]:
        """The reward function with its arguments.

        Raises:
            ConfigError: there is none, or it does not take them.
        """
        if not isinstance(self.reward, str):
            raise ConfigError("no path of a function", key="reward", got=self.reward, allowed="my_pkg.mod:name")
        if not isinstance(self.reward_kwargs, Mapping):
            fix = "reward_kwargs: {address: http://127.0.0.1:8000}, for example."
            raise ConfigError("no mapping", key="reward_kwargs", got=self.reward_kwargs, allowed="a mapping", fix=fix)
        function = load_object(self.reward)
        try:
            inspect.signature(function).bind(None, **self.reward_kwargs)
        except TypeError as error:
            names = list(inspect.signature(function).parameters)[1:]
            fix = "Set those that it lacks, and leave others out."
            raise ConfigError(
                f"{self.reward}: {error}", key="reward_kwargs", got=list(self.reward_kwargs), allowed=names, fix=fix
            ) from error
        return functools.partial(function, **self.reward_kwargs)
