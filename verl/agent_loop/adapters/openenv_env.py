"""Environments behind a server of OpenEnv (``reset`` and ``step`` over a WebSocket), for `EnvironmentAgentLoop`.

https://github.com/huggingface/OpenEnv; the connection is the package's own ``GenericEnvClient``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib import import_module

from verl.errors import ConfigError
from verl.json_text import object_of

INSTALL = "pip install openenv"
MESSAGE_SECONDS = 86_400.0
"""Of the package's own limit on a message: the loop's ``step_timeout`` and ``timeout`` end an episode before."""
ACTION_REFUSED = "(code: VALIDATION_ERROR)"
"""What the server's refusal of an action ends with."""


class OpenEnv:
    """One episode, in a session of its own at the server.

    Args:
        url: of the server, such as ``http://localhost:8000``.
        action: field of the action that holds the model's text; None: the text is the whole action, a JSON object.
        observation: field of the observation that is shown, a text or a number; None: all fields, as JSON.
        invalid: reward of a text that is no action of this server, which ends the episode; None with ``action``: such a
            text is a failure of the environment.

    Raises:
        ConfigError: the package is not installed or has another form, or ``invalid`` is missing.
    """

    def __init__(
        self, url: str, action: str | None = None, observation: str | None = None, invalid: float | None = None
    ):
        if action is None and invalid is None:
            fix = "Name the field of the action that is the model's text (action: message), or set invalid: -1.0."
            raise ConfigError("texts that are no JSON need a reward", key="environment_kwargs.invalid", fix=fix)
        try:
            core = import_module("openenv.core")
        except ModuleNotFoundError as error:
            if error.name not in ("openenv", "openenv.core"):
                raise
            raise ConfigError("the package openenv is not installed", key="environment", fix=INSTALL) from error
        self._action, self._observation, self._invalid = action, observation, invalid
        self._client = core.GenericEnvClient(base_url=url, message_timeout_s=MESSAGE_SECONDS)
        self._session = self._connection()
        self._is_rewarded = False

    async def reset(self, seed: int, options: Mapping[str, object] | None = None) -> tuple[object, dict[str, object]]:
        """The first observation; the server gets the seed and what a row's ``environment_options`` hold."""
        result = await self._client.reset(seed=seed, **(options or {}))
        self._session = self._connection()
        return self._shown(result.observation), {}

    async def step(self, text: str) -> tuple[object, object, bool, bool, dict[str, object]]:
        """Send the model's text. A step without a reward counts 0, but an episode without one is a failure.

        Raises:
            RuntimeError: the server's own error, or it began another session in the midst of the episode.
        """
        action = {self._action: text} if self._action else object_of(text)
        if not isinstance(action, Mapping):
            return self._refusal("it is no JSON object")
        failure: RuntimeError | None = None
        try:
            result = await self._client.step(action)
        except RuntimeError as error:
            failure = error
        if self._connection() is not self._session:
            what = "the connection was lost: the server began another session in the midst of the episode"
            raise RuntimeError(what) from failure
        if failure is not None:
            if self._invalid is None or not str(failure).endswith(ACTION_REFUSED):
                raise failure
            return self._refusal(failure)
        self._is_rewarded |= result.reward is not None
        reward = float(result.reward) if isinstance(result.reward, bool) else result.reward
        if reward is None and (self._is_rewarded or not result.done):
            reward = 0.0
        return self._shown(result.observation), reward, bool(result.done), False, {}

    async def close(self) -> None:
        """End the session."""
        await self._client.close()

    def _connection(self) -> object:
        """The socket; the client replaces one that was lost, and says nothing."""
        try:
            return self._client._ws
        except AttributeError as error:
            what = "this version of openenv hides its connection (GenericEnvClient._ws): a lost session is not seen"
            raise ConfigError(what, key="environment", fix=INSTALL) from error

    def _refusal(self, reason: object) -> tuple[object, object, bool, bool, dict[str, object]]:
        return f"no action of this environment: {reason}", self._invalid, True, False, {}

    def _shown(self, observation: object) -> object:
        if self._observation is None:
            return json.dumps(observation, ensure_ascii=False)
        if not isinstance(observation, Mapping) or self._observation not in observation:
            names = sorted(observation) if isinstance(observation, Mapping) else observation
            raise ConfigError("the server's observation has no such field", key="environment_kwargs.observation",
                              got=self._observation, allowed=names)  # fmt: skip
        return observation[self._observation]
