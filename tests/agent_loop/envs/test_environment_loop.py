"""Episodes as rollouts: observations are masked user turns, actions are sampled, each step has its own reward."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace

import gymnasium
import pytest

from tests.agent_loop.envs import guess
from tests.agent_loop.envs.guess import Guess
from tests.agent_loop.server.scripted import END, TOKENIZER, Scripted, ids, rows, settings
from verl.agent_loop import AgentLoopManager
from verl.agent_loop.envs import adapter
from verl.agent_loop.envs.loop import EnvironmentAgentLoop, EnvironmentSettings, _seed
from verl.errors import ConfigError, RolloutError
from verl.metrics import notices

HERE = "tests.agent_loop.envs.guess"
START = ids("<|im_start|>user\nhi\n\nGuess a digit.<|im_end|>\n<|im_start|>assistant\n")


def play(folder: Path, *script: str, batch=None, ends=True, length=400, **options):
    """A batch of episodes in which the model writes the script; they are threads, so that tests see their objects."""
    entry = {"name": "game", "_target_": "verl.agent_loop.envs.loop.EnvironmentAgentLoop"}
    entry |= {"environment": f"{HERE}:Guess", "process": False, **options}
    (folder / "loops.yaml").write_text(json.dumps([entry]))
    agent = SimpleNamespace(default_agent_loop="game", agent_loop_config_path=str(folder / "loops.yaml"))
    Guess.made.clear()
    manager = AgentLoopManager(settings(agent=agent, response_length=length), Scripted(*script, ends=ends), TOKENIZER)
    return manager.generate_sequences(batch if batch is not None else rows(extra_info=[info(digit=7)]))


def info(**options) -> dict:
    return {"index": 0, "environment_options": options}


def test_an_episode_is_one_row_with_masked_observations_and_a_reward_on_the_end_of_each_action(tmp_path):
    made = play(tmp_path, "3", "9", "7")
    low, high = (ids(f"\n<|im_start|>user\n{word}<|im_end|>\n<|im_start|>assistant\n") for word in ("higher", "lower"))
    assert made.batch["prompts"][0].tolist() == START
    assert made.batch["responses"][0].tolist() == [*ids("3"), END, *low, *ids("9"), END, *high, *ids("7"), END]
    mask = [1, 1, *[0] * len(low), 1, 1, *[0] * len(high), 1, 1]
    assert made.batch["response_mask"][0].tolist() == mask
    scores = made.batch["rm_scores"][0]
    places = [1, 3 + len(low), 5 + len(low) + len(high)]
    assert scores.nonzero().flatten().tolist() == places and scores[places].tolist() == [-0.25, -0.25, 1.0]
    columns = made.non_tensor_batch
    assert columns["reward_score"].tolist() == [0.5] and columns["ended"].tolist() == ["terminated"]
    assert columns["step_rewards"][0] == [-0.25, -0.25, 1.0]
    assert [piece["text"] for piece in columns["trajectory"][0]] == ["Guess a digit.", "3", "higher", "9", "lower", "7"]
    assert made.meta_info["metrics"]["rollout/environment/steps"].value == 3
    assert Guess.made[0].closed


def test_the_state_of_each_action_is_its_observation_or_what_info_names(tmp_path):
    (states,) = play(tmp_path, "3", "2", "7").non_tensor_batch["turn_states"]
    second = 2 + len(ids("\n<|im_start|>user\nhigher<|im_end|>\n<|im_start|>assistant\n"))
    assert [place for place, _ in states] == [0, second, 2 * second]
    first, higher, again = (state for _, state in states)
    assert higher == again and first != higher
    (named,) = play(tmp_path, "3", "2", "7", environment=f"{HERE}:Named").non_tensor_batch["turn_states"]
    assert [state for _, state in named] == ["start", "1", "2"]
    with pytest.raises(RolloutError, match=r"reset returned info\['state'\] \[\]; it is a text or a finite number"):
        play(tmp_path, "3", environment=f"{HERE}:Named", environment_kwargs={"broken": "state"})


def test_an_episode_ends_where_the_environment_or_the_settings_cut_it(tmp_path):
    made = play(tmp_path, "1", "2", "3", environment_kwargs={"limit": 2})
    assert made.non_tensor_batch["ended"].tolist() == ["truncated"]
    assert made.non_tensor_batch["reward_score"].tolist() == [-0.5]
    made = play(tmp_path, "1", "2", "3", max_turns=1)
    assert made.non_tensor_batch["ended"].tolist() == ["max_turns"]
    assert made.batch["responses"][0].tolist() == [*ids("1"), END]


def test_an_action_that_fills_the_response_is_not_played_and_a_turn_of_limited_length_is(tmp_path):
    made = play(tmp_path, "12345", length=3, ends=False)
    assert made.non_tensor_batch["ended"].tolist() == ["length"] and Guess.made[0].guesses == 0
    assert made.non_tensor_batch["finish_reason"].tolist() == ["length"]
    made = play(tmp_path, "712", max_tokens_per_turn=1)
    assert made.non_tensor_batch["ended"].tolist() == ["terminated"], "'7' alone is right"
    made = play(tmp_path, "1", length=10)
    assert made.non_tensor_batch["ended"].tolist() == ["length"], "the next observation does not fit"
    assert made.batch["response_mask"].tolist() == [[1, 1]]


def test_a_long_observation_is_cut_before_it_is_rendered(tmp_path):
    """30 MB of text would take 1 GB to tokenise, and seconds in which no signal is answered."""
    made = play(tmp_path, "1", "7", environment=f"{HERE}:Flood", max_observation_length=9, batch=rows())
    shown = [piece["text"] for piece in made.non_tensor_batch["trajectory"][0] if piece["role"] == "user"]
    assert shown == ["xxxxxxxxx...(truncated)"] * 2
    assert made.meta_info["metrics"]["rollout/environment/truncated_observations"].value == 2
    assert "an observation of 30000000 characters is cut" in notices()[f"the environment {HERE}:Flood"]


def test_all_samples_of_a_prompt_meet_the_same_episode(tmp_path):
    batch = rows(3, uid=["a", "a", "b"])
    play(tmp_path, *["x"] * 15, batch=batch)
    one, same, other = (made.seed for made in sorted(Guess.made, key=lambda made: made.seed != _seed("a")))
    assert one == same == _seed("a") and other == _seed("b") != one


@pytest.mark.parametrize("name, word", [("Older", "a"), ("Asynchronous", "b")])
def test_older_and_asynchronous_environments_work_too(tmp_path, name, word):
    made = play(tmp_path, word, environment=f"{HERE}:{name}", batch=rows())
    assert made.batch["rm_scores"].sum().item() == 1.0 and made.non_tensor_batch["ended"].tolist() == ["terminated"]


def test_an_environment_made_by_gymnasium_works(tmp_path):
    class Parrot(gymnasium.Env):
        observation_space = gymnasium.spaces.Text(20, min_length=0)
        action_space = gymnasium.spaces.Text(20, min_length=0)

        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            self.word = str(self.np_random.integers(10))
            return self.word, {}

        def step(self, action):
            return "", float(action == self.word), True, False, {}

    if "test/Parrot-v0" not in gymnasium.registry:
        gymnasium.register("test/Parrot-v0", entry_point=Parrot)
    word = gymnasium.make("test/Parrot-v0").reset(seed=_seed("u0"))[0]
    made = play(tmp_path, word, environment="gymnasium:make", environment_kwargs={"id": "test/Parrot-v0"}, batch=rows())
    assert TOKENIZER.decode(made.batch["prompts"][0]).count(f"hi\n\n{word}<|im_end|>") == 1
    assert made.batch["rm_scores"].sum().item() == 1.0


def place(words: str) -> str:
    """Where the environment's file says so."""
    lines = Path(guess.__file__).read_text().splitlines()
    return f"{guess.__file__}, line {next(n for n, line in enumerate(lines, start=1) if words in line)})"


@pytest.mark.parametrize(
    "broken, said",
    [
        ("raise", "step raised ValueError: the board is gone (" + place("the board is gone")),
        ("reset", "column 1 (char 0) (" + place("no board")),
        ("exit", "SystemExit: 2"),
        ("hang", "step took longer than 2 s and was given up; its thread stays (process: true ends it)"),
        ("shape", "step returned 'x', not (observation, reward"),
        ("nan", "step returned the reward nan"),
        ("bytes", "observation of type bytes"),
        ("digits", "step returned a number that cannot be written as text"),
        ("novel", "step raised ValueError: " + "x" * 1000),
    ],
)
def test_a_broken_environment_costs_its_own_row(tmp_path, broken, said):
    extra = [{**info(digit=1), "environment_kwargs": {"broken": broken}}, info(digit=1)]
    made = play(tmp_path, "1", "1", batch=rows(2, extra_info=extra), step_timeout=2 if broken == "hang" else 20)
    assert said in made.non_tensor_batch["agent_error"][0]
    assert len(made.non_tensor_batch["agent_error"][0]) < 2100
    assert made.non_tensor_batch["agent_error"][1] is None
    assert made.non_tensor_batch["finish_reason"].tolist() == ["abort", "stop"]
    assert made.meta_info["metrics"]["rollout/agent/failed"].value == 1
    assert made.batch["rm_scores"].sum(-1).tolist() == [0.0, 1.0]


@pytest.fixture
def expires(monkeypatch):
    """In which method of a class the time of an episode is over: it does not return, and the clock plays no part."""
    limits, timeout = [], asyncio.timeout

    def recorded(seconds):
        limits.append(timeout(seconds))
        return limits[-1]

    async def hang(*_):
        limits[-1].reschedule(asyncio.get_running_loop().time())
        await asyncio.Event().wait()

    monkeypatch.setattr(asyncio, "timeout", recorded)
    return lambda owner, method: monkeypatch.setattr(owner, method, hang)


@pytest.mark.parametrize(
    "place", [(adapter.Environment, "step"), (EnvironmentAgentLoop, "_sample")], ids=["step", "answer"]
)
def test_an_episode_over_its_time_is_scored_by_the_rewards_it_had(tmp_path, expires, place):
    expires(*place)
    made = play(tmp_path, "1", batch=rows(extra_info=[info(digit=1)]), timeout=60, on_error="raise")
    assert made.non_tensor_batch["ended"].tolist() == ["timeout"] and made.batch["rm_scores"].sum() == 0
    assert made.non_tensor_batch["finish_reason"].tolist() == ["stop"]
    assert made.batch["response_mask"].any() == (place[1] == "step")
    assert made.meta_info["metrics"]["rollout/environment/timeout"].value == 1


def test_an_episode_whose_time_is_over_before_its_reset_has_failed(tmp_path, expires):
    expires(adapter.Environment, "reset")
    with pytest.raises(RolloutError, match="first observation took longer than the timeout, 60"):
        play(tmp_path, "1", batch=rows(extra_info=[info(digit=1)]), timeout=60, on_error="raise")


@pytest.mark.parametrize(
    "options, said",
    [
        ({"environment": ""}, "what to play"),
        ({"environment": "tests.agent_loop.envs.guess:Gues"}, "Did you mean 'Guess'"),
        ({"max_turn": 3}, "Did you mean 'max_turns'"),
        ({"max_turns": -1}, "max_turns"),
        ({"step_timeout": "long"}, "step_timeout"),
        ({"on_error": "skip"}, "on_error"),
    ],
)
def test_a_setting_that_cannot_work_is_refused_by_name(tmp_path, options, said):
    with pytest.raises((ConfigError, RolloutError), match=said):
        play(tmp_path, "1", **options)


def test_a_process_per_episode_is_refused_where_there_is_no_linux(monkeypatch):
    monkeypatch.setattr("sys.platform", "darwin")
    with pytest.raises(ConfigError, match=r"process: .*Linux"):
        EnvironmentSettings.read({"environment": "a:b", "process": True})
    assert isinstance(EnvironmentSettings.read({"environment": f"{HERE}:Guess"}).maker(), type)


def test_the_settings_have_defaults_that_need_only_the_environment():
    settings = EnvironmentSettings.read({"environment": "a:b"})
    assert (settings.max_turns, settings.step_timeout, settings.on_error) == (None, 60.0, "mask")


def test_what_an_environment_does_before_its_reset_has_no_time_limit(monkeypatch):
    limits, calls = [], []

    class Recorder:
        async def run(self, make, timeout=None):
            limits.append(timeout)
            return await make()

    class Checked(Guess):
        def before_reset(self):
            calls.append("before_reset")

    monkeypatch.setattr(adapter, "runner", Recorder)
    asyncio.run(adapter.Environment(Checked, {}, 3.0).make())
    assert limits == [3.0, None] and calls == ["before_reset"]


@pytest.mark.parametrize(("attributes", "limit"), [({}, 3.0), ({"bounds_its_steps": True}, None)], ids=str)
def test_steps_have_the_loop_s_limit_unless_they_bound_themselves(monkeypatch, attributes, limit):
    limits = []

    class Recorder:
        async def run(self, work, timeout=None):
            limits.append(timeout)
            return await work()

    async def play_a_step():
        environment = adapter.Environment(type("Bounded", (Guess,), attributes), {}, 3.0)
        await environment.make()
        await environment.reset(1, None)
        await environment.step("1")

    monkeypatch.setattr(adapter, "runner", Recorder)
    asyncio.run(play_a_step())
    assert limits == [3.0, 3.0, limit]
