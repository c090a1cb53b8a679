"""From Python a run is the run of the command line: same bits, same refusals; and its folder is all that it leaves."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import verl
from tests.harness.models import tiny_model_dir
from verl.api import start
from verl.api.methods import METHODS
from verl.cli.main import main
from verl.errors import CheckpointError, ConfigError, DataError, ModelError

ROWS = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(4)]
SHORT = {"data.max_prompt_length": 64, "data.max_response_length": 4, "trainer.total_training_steps": 2}
SUPERVISED = {"data.max_length": 64, "trainer": {"total_training_steps": 2}}
PAIRS = [{"prompt": "a", "chosen": "b", "rejected": "c"}, {"prompt": "d", "chosen": "ee", "rejected": "f"}]


def score(solution_str, ground_truth):
    return len(solution_str.strip()) / 4 + float(ground_truth in solution_str)


@pytest.fixture
def here(workplace: Path) -> Path:
    tiny_model_dir("model")
    return workplace


def numbers(run: verl.Run) -> pd.DataFrame:
    """What does not depend on the clock."""
    clock = ("timing", "perf/", "time(s)")
    return run.metrics[[key for key in run.metrics.columns if not any(word in key for word in clock)]]


def test_a_run_from_python_has_the_bits_of_its_command_line(here):
    run = verl.train("grpo", model="model", data=ROWS, reward=score, **SHORT)
    assert run.stopped == "" and run.steps == 2 and run.checkpoint == run.folder / "global_step_2"
    words = run.command.replace(f"{run.folder} ", "again ", 1).split()
    assert words[:3] == ["verl", "train", "grpo"] and "actor_rollout_ref.rollout.n=8" not in words
    assert main(words[1:]) == 0
    again = verl.open_run("again")
    pd.testing.assert_frame_equal(numbers(run), numbers(again), check_exact=True)
    saved = [one.model().state_dict() for one in (run, again)]
    assert all(torch.equal(tensor, saved[1][name]) for name, tensor in saved[0].items())
    assert {"critic/score/mean", "actor/pg_loss"} <= {*run.metrics.columns}


@pytest.mark.parametrize(("rows", "batch"), [(1, 1), (16, 16), (17, 8), (30, 15), (31, 15), (1600, 16)])
def test_a_batch_is_chosen_so_that_hardly_a_row_is_left_over(here, rows, batch):
    method = METHODS["grpo"]
    given = start._data(method, Path("run"), ["a"] * rows, None, None)
    assert given["data.train_batch_size"] == given["actor_rollout_ref.actor.ppo_mini_batch_size"] == batch
    assert "actor_rollout_ref.actor.ppo_mini_batch_size" not in start._data(
        METHODS["dpo"], Path("run"), PAIRS, None, None
    )


def test_a_run_leaves_the_callers_random_numbers_and_event_loop_as_they_were(here):
    """A notebook runs its cells inside an event loop."""
    random.seed(1), np.random.seed(2), torch.manual_seed(3)
    expected = random.random(), np.random.rand(), torch.rand(1).item()
    random.seed(1), np.random.seed(2), torch.manual_seed(3)

    async def cell():
        loop = asyncio.get_running_loop()
        verl.train(model="model", data=ROWS, reward=score, **SHORT)
        assert await asyncio.to_thread(len, ROWS) == 4, "the loop works as before"
        return asyncio.get_running_loop() is loop

    assert asyncio.run(cell())
    assert (random.random(), np.random.rand(), torch.rand(1).item()) == expected
    assert "VERL_FILE_LOGGER_PATH" not in os.environ


def test_a_loaded_model_is_copied_and_stays_as_it_is(here):
    model, tokenizer = AutoModelForCausalLM.from_pretrained("model"), AutoTokenizer.from_pretrained("model")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    optim = {"actor_rollout_ref": {"actor": {"optim": {"lr": 1e-2}}}}
    run = verl.train(model=model, tokenizer=tokenizer, data=ROWS, reward=score, **SHORT, **optim)
    trained = run.model().state_dict()
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in before.items())
    assert any(not torch.equal(trained[name], tensor) for name, tensor in before.items())


@pytest.mark.parametrize(
    "start, data",
    [
        (verl.sft, [{"prompt": "a", "response": "b"}] * 4),
        (verl.dpo, PAIRS),
        (verl.reward_model, PAIRS),
    ],
)
def test_supervised_runs_train_resume_and_load(here, start, data):
    run = start(model="model", data=data, **SUPERVISED)
    assert run.steps == 2 and run.metrics["train/loss"].notna().all()
    assert run.model().config.model_type == "qwen2"
    run = verl.resume(run.folder, trainer={"total_training_steps": 3})
    assert run.steps == 3 and [*run.metrics.index] == [1, 2, 3]


def test_answers_are_sampled_and_scored(here):
    frame = verl.generate("model", ROWS, n=3, rollout={"prompt_length": 64, "response_length": 4})
    assert [len(answers) for answers in frame["responses"]] == [3] * 4
    report = verl.evaluate(frame, score)
    by_hand = np.mean([score(text, row["answer"]) for row, texts in zip(ROWS, frame["responses"]) for text in texts])
    assert report["test_score/rows"] == pytest.approx(by_hand)


def test_a_signal_saves_ends_the_run_and_it_goes_on(here):
    rewards = Path("stopping.py")
    rewards.write_text(
        "import os, pathlib, signal\n"
        "def score(solution_str, ground_truth):\n"
        "    try:\n"
        "        pathlib.Path('sent').touch(exist_ok=False)\n"
        f"        os.kill({os.getpid()}, signal.SIGINT)\n"
        "    except FileExistsError:\n"
        "        pass\n"
        "    return len(solution_str) / 4\n"
    )
    before = signal.getsignal(signal.SIGINT)
    run = verl.train(model="model", data=ROWS, reward="stopping.py:score", **SHORT)
    assert run.stopped.startswith("SIGINT: ") and signal.getsignal(signal.SIGINT) is before
    assert run.resume().steps == 2


@pytest.mark.parametrize(
    "given, error, said",
    [
        ({"trainer": {"total_epoch": 3}}, ConfigError, "trainer.total_epoch"),
        ({"method": "grpp"}, ConfigError, "unknown method. Got 'grpp'"),
        ({"model": "nowhere"}, ModelError, "nowhere"),
        ({"model": 3}, ConfigError, "model: a model is a hub name, a folder, or a model of transformers"),
        ({"data": []}, DataError, "there are no rows"),
        ({"data": [{"question": "1+1"}]}, DataError, "data.prompt_key"),
    ],
)
def test_what_is_wrong_is_said_as_on_the_command_line_and_leaves_no_folder(here, given, error, said):
    with pytest.raises(error) as caught:
        verl.train(**{"model": "model", "data": ROWS, "reward": score, **SHORT, **given})
    assert said in str(caught.value) and not any(Path("runs").glob("*"))


def test_a_place_that_cannot_be_written_is_named(here):
    Path("runs").touch()
    with pytest.raises(ConfigError, match=r"trainer\.default_local_dir: no folder for the run can be made here"):
        verl.train(model="model", data=ROWS, reward=score, **SHORT)


def test_a_folder_without_a_run_and_a_run_without_a_model_say_what_is_missing(here):
    with pytest.raises(CheckpointError, match=r"holds no run .* It has a run\.json"):
        verl.open_run("model")
    run = verl.train(model="model", data=ROWS, reward=score, **SHORT, **{"trainer.save_freq": -1})
    assert run.checkpoint is None
    with pytest.raises(CheckpointError, match=r"has saved nothing\. .* Set trainer\.save_freq"):
        run.model()
