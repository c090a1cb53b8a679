"""Conversations with a tool have the same tokens, masks and numbers on Ray as in one process."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.harness.every_answer import SETTINGS
from tests.trainer.on_ray.conftest import Run
from tests.trainer.on_ray.test_same_numbers import agree

pytestmark = pytest.mark.slow


def pieces(run: Run) -> list[list]:
    """Every sample's text, mask and conversation, without the seconds that its calls took."""
    found = []
    for sample in (sample for step in run.samples for sample in step):
        for piece in sample["trajectory"]:
            for call in piece.get("calls", ()):
                call.pop("seconds", None)
        found.append([sample["output"], sample["mask_runs"], sample["trajectory"], sample["score"]])
    return found


def test_conversations_on_ray_are_those_of_this_process(train: Callable[..., Run]):
    local = train("talk_local", 2, *SETTINGS, "trainer.runtime=local", "trainer.save_freq=2")
    ray = train("talk_ray", 2, *SETTINGS, "trainer.runtime=ray", "trainer.save_freq=2")
    assert pieces(ray) == pieces(local) and pieces(local)[0][1][1][0] == 0, "what the tool says has mask 0"
    ours, theirs = ray.weights(2), local.weights(2)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)
    two = train("talk_two", 2, *SETTINGS, "trainer.n_gpus_per_node=2")
    assert pieces(two) == pieces(local)
    agree(two, local)
