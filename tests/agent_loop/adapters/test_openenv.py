"""Episodes at a server made with the package ``openenv`` itself."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import sys
import threading
from types import SimpleNamespace

import pytest
import uvicorn

from tests.agent_loop.server.scripted import TOKENIZER, Scripted, rows, settings
from tests.harness.waiting import wait_until
from verl.agent_loop import AgentLoopManager
from verl.agent_loop.adapters.openenv_env import OpenEnv
from verl.errors import ConfigError, RolloutError
from verl.ports import free_port

HAS_OPENENV = importlib.util.find_spec("openenv") is not None
needs_openenv = pytest.mark.skipif(not HAS_OPENENV, reason="openenv is not installed: make test-adapters")


def application():
    """A server as a user writes one: the digit is guessed by a text, or it goes wrong in a way that the text names."""
    from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app

    class Guess(Action):
        message: str

    class Answer(Observation):
        text: str = ""

    class Game(Environment):
        SUPPORTS_CONCURRENT_SESSIONS = True

        def __init__(self):
            super().__init__()
            self._state = State()

        def reset(self, seed=None, episode_id=None, digit=7, **kwargs):
            self.digit = str(digit)
            return Answer(text="Guess a digit.")

        def step(self, action, timeout_s=None, **kwargs):
            if action.message == self.digit:
                return Answer(text="Right.", done=True, reward=1.0)
            if action.message == "raise":
                raise ValueError("the board is gone")
            if action.message == "hang":
                threading.Event().wait(60)
            if action.message == "unpaid":
                return Answer(text="", done=True)
            return Answer(text="no", reward=None)

        @property
        def state(self):
            return self._state

    globals().update(Guess=Guess, Answer=Answer)
    return create_fastapi_app(Game, Guess, Answer, max_concurrent_envs=8)


def dropping(inner):
    """The server, which closes a connection after its answer to the action ``drop``."""

    async def application_that_drops(scope, receive, send):
        texts = [""]

        async def read():
            message = await receive()
            texts.append(message.get("text") or "")
            return message

        async def write(message):
            await send(message)
            if '"drop"' in texts[-1]:
                await send({"type": "websocket.close", "code": 1001})

        streams = (read, write) if scope["type"] == "websocket" else (receive, send)
        await inner(scope, *streams)

    return application_that_drops


@pytest.fixture(scope="module")
def url():
    port = free_port()
    server = uvicorn.Server(uvicorn.Config(dropping(application()), port=port, log_level="critical"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    wait_until(lambda: server.started)
    yield f"http://127.0.0.1:{port}"
    server.should_exit = server.force_exit = True
    thread.join(30)


def play(folder, *script, batch=None, step_timeout=60, **kwargs):
    entry = {"name": "game", "_target_": "verl.agent_loop.envs.loop.EnvironmentAgentLoop"}
    entry |= {"environment": "verl.agent_loop.adapters.openenv_env:OpenEnv", "environment_kwargs": kwargs}
    (folder / "loops.yaml").write_text(json.dumps([{**entry, "max_turns": 4, "step_timeout": step_timeout}]))
    agent = SimpleNamespace(default_agent_loop="game", agent_loop_config_path=str(folder / "loops.yaml"))
    manager = AgentLoopManager(settings(agent=agent), Scripted(*script), TOKENIZER)
    return manager.generate_sequences(batch if batch is not None else rows(extra_info=[digit(7)]))


def digit(value) -> dict:
    return {"environment_options": {"digit": value}}


@needs_openenv
def test_texts_are_a_field_of_the_action_and_rewards_are_the_server_s(tmp_path, url):
    made = play(tmp_path, "3", "7", url=url, action="message", observation="text")
    columns = made.non_tensor_batch
    assert [piece["text"] for piece in columns["trajectory"][0]] == ["Guess a digit.", "3", "no", "7"]
    assert columns["step_rewards"][0] == [0.0, 1.0] and columns["ended"].tolist() == ["terminated"]
    made = play(tmp_path, '{"message": "4"}', batch=rows(extra_info=[digit(4)]), url=url, invalid=-1.0)
    assert made.non_tensor_batch["reward_score"].tolist() == [1.0]
    shown = made.non_tensor_batch["trajectory"][0][0]["text"]
    assert json.loads(shown) == {"metadata": {}, "text": "Guess a digit."}


@needs_openenv
@pytest.mark.parametrize("text", ["no JSON", "[1]", '{"guess": "7"}'])
def test_a_text_that_is_no_action_ends_the_episode_with_its_price(tmp_path, url, text):
    made = play(tmp_path, text, url=url, invalid=-1.0)
    assert made.non_tensor_batch["agent_error"].tolist() == [None]
    assert made.non_tensor_batch["reward_score"].tolist() == [-1.0]
    assert made.non_tensor_batch["ended"].tolist() == ["terminated"]


@needs_openenv
@pytest.mark.parametrize(
    "text, reason",
    [
        ("raise", "Server error: the board is gone"),
        ("hang", "step took longer than 2 s"),
        ("unpaid", "reward None, which is no finite number"),
    ],
)
def test_a_server_that_fails_costs_its_own_row(tmp_path, url, text, reason):
    options = {"url": url, "action": "message", "observation": "text"}
    batch = rows(2, extra_info=[digit(7), digit(text)])
    made = play(tmp_path, text, text, batch=batch, step_timeout=2 if text == "hang" else 60, **options)
    assert reason in made.non_tensor_batch["agent_error"][0] and made.non_tensor_batch["agent_error"][1] is None
    assert made.meta_info["metrics"]["rollout/agent/failed"].value == 1


@needs_openenv
def test_a_server_that_is_not_there_or_has_other_fields_is_named(tmp_path, url):
    with pytest.raises(RolloutError, match="Failed to connect"):
        play(tmp_path, "7", url=f"http://127.0.0.1:{free_port()}", action="message")
    with pytest.raises(RolloutError, match=r"no such field.*\n?.*text"):
        play(tmp_path, "7", url=url, action="message", observation="board")


@needs_openenv
def test_a_connection_lost_in_an_episode_is_no_new_episode(url):
    async def episode():
        environment = OpenEnv(url, action="message", observation="text")
        await environment.reset(seed=0)
        assert (await environment.step("drop"))[0] == "no"
        await environment._client._ws.wait_closed()
        try:
            await environment.step("7")
        finally:
            await environment.close()

    with pytest.raises(RuntimeError, match="began another session in the midst of the episode"):
        asyncio.run(episode())


def test_a_client_that_hides_its_connection_is_refused(monkeypatch):
    package = SimpleNamespace(GenericEnvClient=lambda **options: SimpleNamespace())
    monkeypatch.setitem(sys.modules, "openenv.core", package)
    with pytest.raises(ConfigError, match="hides its connection"):
        OpenEnv("http://localhost:1", action="message")


def test_a_price_of_invalid_actions_is_needed_without_a_field():
    with pytest.raises(ConfigError, match="texts that are no JSON need a reward"):
        OpenEnv("http://localhost:1")


@pytest.mark.skipif(HAS_OPENENV, reason="openenv is installed")
def test_without_the_package_openenv_the_refusal_says_what_to_install(tmp_path):
    with pytest.raises(RolloutError, match=r"openenv is not installed.*\n?.*pip install openenv"):
        play(tmp_path, "7", url="http://localhost:1", action="message")
