"""Episodes in processes of their own: the rows of episodes in threads, and faults that cost an episode alone."""

from __future__ import annotations

import asyncio
import os
import signal
import sys

import numpy as np
import pytest
import torch

from tests.agent_loop.envs import rough
from tests.agent_loop.envs.test_environment_loop import HERE, info, play
from tests.agent_loop.server.scripted import rows
from tests.harness.waiting import wait_until
from verl import lifeline
from verl.agent_loop.envs import adapter
from verl.agent_loop.envs.adapter import EnvironmentFailure
from verl.agent_loop.envs.hosted import EnvironmentHost, HostedEnvironment, host_of
from verl.agent_loop.envs.loop import EnvironmentSettings
from verl.errors import ConfigError, RolloutError
from verl.metrics import notices, reset_notices
from verl.tools.runner import TimeLimit, runner

ROUGH = f"{rough.__name__}:Rough"


def is_running(process: int) -> bool:
    try:
        with open(f"/proc/{process}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def host_process(host: EnvironmentHost) -> int:
    """The process below its guard."""
    (process,) = lifeline.children(host._process.pid)
    return process


@pytest.mark.parametrize("name, script", [("Guess", "397"), ("Named", "327"), ("Older", "a"), ("Asynchronous", "b")])
def test_an_episode_in_a_process_is_the_row_of_one_in_a_thread(tmp_path, name, script):
    batch = {} if name in ("Older", "Asynchronous") else {"extra_info": [info(digit=7)]}
    in_thread, in_process = (
        play(tmp_path, *script, batch=rows(**batch), environment=f"{HERE}:{name}", process=process)
        for process in (False, True)
    )
    for column in ("prompts", "responses", "response_mask", "rm_scores"):
        assert torch.equal(in_thread.batch[column], in_process.batch[column]), column
    for column in ("turn_states", "step_rewards", "ended", "agent_error"):
        assert list(in_thread.non_tensor_batch[column]) == list(in_process.non_tensor_batch[column]), column


@pytest.mark.parametrize(
    "how, said",
    [
        ("exit", "step ended its process (exit code 3)"),
        ("exit early", "making it ended its process (exit code 4)"),
        ("crash", "step ended its process (signal 11, SIGSEGV)"),
        ("raise", f"step raised ValueError: the board is gone ({rough.__file__}, line "),
        ("object", "step returned what cannot be sent from its process: a value of type object"),
        ("digits", "step returned what cannot be sent from its process: Exceeds the limit"),
    ],
)
def test_whatever_an_environment_does_costs_its_own_row(tmp_path, how, said):
    extra = [{"index": 0, "environment_kwargs": {"how": how}}, {"index": 1}]
    made = play(tmp_path, "1", "1", batch=rows(2, extra_info=extra), environment=ROUGH, process=True)
    assert said in made.non_tensor_batch["agent_error"][0]
    assert made.non_tensor_batch["agent_error"][1] is None
    assert made.non_tensor_batch["finish_reason"].tolist() == ["abort", "stop"]
    assert made.batch["rm_scores"].sum(-1).tolist() == [0.0, 1.0]


@pytest.fixture
def impatient(monkeypatch, tmp_path):
    """The time of a call is over as soon as the environment says that it hangs."""

    class Impatient:
        async def run(self, work, timeout=None):
            call = asyncio.ensure_future(runner().run(work))
            await asyncio.to_thread(wait_until, lambda: call.done() or (tmp_path / "hangs").exists())
            if call.done():
                return call.result()
            call.cancel()
            raise TimeLimit(timeout)

    monkeypatch.setattr(adapter, "runner", Impatient)


@pytest.mark.parametrize("how", ["hang", "fork", "daemon"])
def test_nothing_is_left_of_an_episode_and_what_it_started(tmp_path, impatient, how):
    host, notes = EnvironmentHost(ROUGH), tmp_path / ("hangs" if how == "hang" else "number")

    async def episode():
        environment = HostedEnvironment(host, {"how": how, "notes": str(notes)}, 60.0, seed=1)
        await environment.make()
        await environment.reset(1, None)
        processes = below(host_process(host))
        if how == "hang":
            with pytest.raises(EnvironmentFailure, match=r"step took longer than 60 s and was given up$"):
                await environment.step("1")
        else:
            assert (await environment.step("1")).reward == 1.0
        if how == "daemon":
            wait_until(lambda: notes.read_text().endswith("\n"))
            processes.append(int(notes.read_text()))
        await environment.close()
        return processes

    processes = asyncio.run(episode())
    assert len(processes) == (3 if how == "daemon" else 2), "a keeper and its episode"
    wait_until(lambda: not any(map(is_running, processes)) and not below(host_process(host)))
    host.close()


def below(process: int) -> list[int]:
    children = lifeline.children(process)
    return [*children, *(one for child in children for one in below(child))]


def test_a_host_that_is_killed_is_started_again_for_the_next_episode():
    host = EnvironmentHost(ROUGH)

    async def score() -> float:
        environment = HostedEnvironment(host, {}, 60.0, seed=1)
        await environment.make()
        await environment.reset(1, None)
        step = await environment.step("1")
        await environment.close()
        return step.reward

    assert asyncio.run(score()) == 1.0
    first = host_process(host)
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: not is_running(first))
    assert asyncio.run(score()) == 1.0
    assert host_process(host) != first
    host.close()
    wait_until(lambda: not is_running(first))


def test_generators_of_python_and_numpy_follow_from_the_prompt_alone(tmp_path):
    made = play(tmp_path, *"111", batch=rows(3, uid=["a", "a", "b"]), environment=ROUGH, process=True)
    first, same, other = (turns[0]["text"] for turns in made.non_tensor_batch["trajectory"])
    assert first == same and not set(first.split()) & set(other.split())


def test_pictures_arrive_as_they_were():
    async def shown():
        environment = HostedEnvironment(host_of(f"{HERE}:Discs"), {}, 60.0, seed=1)
        await environment.make()
        first = await environment.reset(1, None)
        second = (await environment.step("blue")).observation
        await environment.close()
        return first, second

    first, second = asyncio.run(shown())
    blue = np.asarray(first.images[0])
    assert first.text == "Which colour?" and blue.shape == (56, 56, 3) and (blue == [0, 0, 255]).all()
    red = second.images[0]
    assert red.mode == "RGB" and red.size == (84, 56) and red.getpixel((5, 5)) == (255, 0, 0)


@pytest.mark.skipif(sys.platform != "linux", reason="episodes are processes on Linux alone")
def test_a_users_environment_has_a_process_by_default_and_ours_a_thread():
    assert isinstance(EnvironmentSettings(ROUGH).maker(), EnvironmentHost)
    assert EnvironmentSettings(ROUGH, process=False).maker() is rough.Rough
    task = "verl.agent_loop.adapters.harbor_task:HarborTask"
    assert isinstance(EnvironmentSettings(task).maker(), type)
    assert isinstance(EnvironmentSettings(task, process=True).maker(), EnvironmentHost)


@pytest.mark.parametrize("process, kind", [(True, EnvironmentHost), (None, type)])
def test_a_file_that_starts_threads_is_named_and_by_default_in_this_process(tmp_path, process, kind):
    reset_notices()
    (tmp_path / "busy.py").write_text(
        "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\nclass Busy: ...\n"
    )
    path = f"{tmp_path}/busy.py:Busy"
    assert isinstance(EnvironmentSettings(path, process=process).maker(), kind)
    said = "start them in its __init__" if process else "its episodes are threads (process: false)"
    assert "starts 1 thread(s), which processes forked from it do not have" in notices()[f"the environment {path}"]
    assert said in notices()[f"the environment {path}"]


SCARCE = f"""
import os
from {rough.__name__} import Rough
fork = os.fork
def limited():
    if os.path.exists(FULL):
        raise BlockingIOError(11, "Resource temporarily unavailable")
    return fork()
os.fork = limited
"""


def test_an_episode_without_a_free_process_waits_for_one_that_ends(tmp_path):
    reset_notices()
    (tmp_path / "scarce.py").write_text(SCARCE.replace("FULL", repr(f"{tmp_path}/full")))
    path = f"{tmp_path}/scarce.py:Rough"
    host = EnvironmentHost(path)

    async def episodes():
        first, second, third = (HostedEnvironment(host, {}, 60.0, seed=1) for _ in range(3))
        await first.make()
        (tmp_path / "full").touch()
        started = asyncio.create_task(second.make())
        await asyncio.to_thread(wait_until, lambda: f"the environment {path}" in notices())
        assert not started.done()
        (tmp_path / "full").unlink()
        await first.close()
        await started
        await second.reset(1, None)
        assert (await second.step("1")).reward == 1.0
        await second.close()
        (tmp_path / "full").touch()
        with pytest.raises(EnvironmentFailure, match=r"starting its process failed: .*temporarily unavailable"):
            await third.make()

    asyncio.run(episodes())
    assert "1 of its episodes run, others wait until one ends" in notices()[f"the environment {path}"]
    host.close()


def test_a_file_that_cannot_be_loaded_is_named(tmp_path):
    (tmp_path / "busy.py").write_text("class Busy: ...\n")
    with pytest.raises(ConfigError, match=r"cannot be loaded in its process.*has no 'Lazy'"):
        EnvironmentHost(f"{tmp_path}/busy.py:Lazy").start()
    (tmp_path / "gone.py").write_text("import os\nos._exit(1)\n")
    with pytest.raises(ConfigError, match=r"gone.py:Gone cannot be loaded in its process: the process ended"):
        play(tmp_path, "1", environment=f"{tmp_path}/gone.py:Gone", process=True)
    with pytest.raises((ConfigError, RolloutError), match="process"):
        play(tmp_path, "1", process="yes")
