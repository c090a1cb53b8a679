"""The controller's generators as JSON values."""

from __future__ import annotations

import json
import random

import numpy as np
import torch

from verl.trainer import rng


def draw() -> list[float]:
    return [
        random.random(),
        random.gauss(0, 1),
        float(np.random.rand()),
        float(np.random.randn()),
        torch.rand(1).item(),
    ]


def test_all_generators_go_on_where_they_were():
    random.gauss(0, 1), np.random.randn()  # each keeps the second number of a pair
    state = json.loads(json.dumps(rng.rng_state()))
    expected = draw()
    draw()
    rng.set_rng_state(state)
    assert draw() == expected


def test_those_of_the_host_may_go_back_alone():
    state = rng.rng_state()
    expected = draw()
    torch.manual_seed(123)
    following = torch.rand(1).item()
    torch.manual_seed(123)
    rng.set_host_rng_state(state)
    assert draw() == [*expected[:4], following]
