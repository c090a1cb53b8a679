"""Servers that are started beside each other do not share a GPU."""

import pytest

from verl.agent_loop.served import devices_of_server


@pytest.mark.parametrize(
    ("visible", "number", "each", "expected"),
    [("", 0, 1, "0"), ("", 3, 1, "3"), ("", 1, 2, "2,3"), ("4,6,5,7", 1, 2, "5,7"), ("GPU-a,GPU-b", 1, 1, "GPU-b")],
)
def test_a_server_sees_the_gpus_that_follow_those_of_the_server_before(monkeypatch, visible, number, each, expected):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert devices_of_server(number, each, "cuda") == {"CUDA_VISIBLE_DEVICES": expected}
    assert devices_of_server(number, each, "cpu") == {}
