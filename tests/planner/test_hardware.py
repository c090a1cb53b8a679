"""The table of devices, and how a person names them."""

from __future__ import annotations

import pytest
import yaml

from verl.errors import ConfigError
from verl.planner.hardware import FILE, Cluster, all_devices, device


@pytest.mark.parametrize("written", ["RTX 4090", "rtx-4090", "RTX4090"])
def test_a_device_is_named_in_any_usual_form(written):
    assert device(written).name == "RTX4090"


def test_a_gpu_of_two_sizes_needs_its_size():
    with pytest.raises(ConfigError, match=r"A100-40GB.*A100-80GB"):
        device("A100")
    assert device("A100-80").memory == 80e9


def test_an_unknown_device_is_answered_with_all_and_the_nearest():
    with pytest.raises(ConfigError, match=r"MI300X.*Did you mean 'H100'") as error:
        device("H1000")
    assert error.value.allowed == list(all_devices())


def test_every_figure_has_a_source():
    text = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    sources = {source for figures in text["devices"].values() for _, source in figures.values()}
    assert sources == text["sources"].keys()


def test_devices_beyond_one_machine_speak_over_the_network():
    cluster = Cluster.parse("64xH100")
    assert cluster.devices == 64
    assert cluster.link(8) == 450e9
    assert cluster.link(16) == 50e9
    assert Cluster.parse("H200").devices == 1


@pytest.mark.parametrize("text", ["0xH100", "8x", "8 H100 H100"])
def test_a_cluster_of_another_form_is_refused(text):
    with pytest.raises(ConfigError, match="--devices"):
        Cluster.parse(text)
