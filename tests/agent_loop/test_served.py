"""Servers that are started beside each other do not share a GPU."""

import pytest

from verl import device
from verl.agent_loop.served import devices_of_server
from verl.errors import ConfigError


@pytest.mark.parametrize(
    ("visible", "number", "each", "expected"),
    [("", 0, 1, "0"), ("", 3, 1, "3"), ("", 1, 2, "2,3"), ("4,6,5,7", 1, 2, "5,7"), ("GPU-a,GPU-b", 1, 1, "GPU-b")],
)
def test_a_server_sees_the_gpus_that_follow_those_of_the_server_before(monkeypatch, visible, number, each, expected):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(device, "device_count", lambda kind: 4)
    assert devices_of_server(number, each, "cuda") == {"CUDA_VISIBLE_DEVICES": expected}
    assert devices_of_server(number, each, "cpu") == {}


def test_a_server_without_gpus_of_its_number_is_refused(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6,7")
    with pytest.raises(ConfigError, match=r"server 1 would have the GPUs 2 to 3 .*Allowed: 3 GPU\(s\) in all"):
        devices_of_server(1, 2, "cuda")
