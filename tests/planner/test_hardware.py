"""The table of devices, and how a person names them."""

from __future__ import annotations

import pytest

from verl.errors import ConfigError
from verl.models.flops import PEAK_BF16
from verl.planner.hardware import Cluster, all_devices, device


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


def test_every_figure_has_a_source_and_peaks_are_those_of_the_runs_mfu():
    for entry in all_devices().values():
        figures = {"memory", "bf16_flops", "memory_bandwidth", "node_link", "network", "node"}
        assert figures <= entry.sources.keys()
        assert all(entry.sources.values())
    peaks = {name: PEAK_BF16[name] for name in all_devices() if name in PEAK_BF16}
    assert peaks.keys() == {"H100", "H200", "H20", "B200", "MI300X", "L40S"}
    assert all(device(name).bf16_flops == pytest.approx(peak, rel=1e-3) for name, peak in peaks.items())


def test_devices_beyond_one_machine_speak_over_the_network():
    cluster = Cluster.parse("64xH100")
    assert (cluster.devices, cluster.nodes) == (64, 8)
    assert cluster.link(8) == 450e9
    assert cluster.link(16) == 50e9
    assert Cluster.parse("H200").devices == 1


@pytest.mark.parametrize("text", ["0xH100", "8x", "8 H100 H100"])
def test_a_cluster_of_another_form_is_refused(text):
    with pytest.raises(ConfigError, match="--devices"):
        Cluster.parse(text)
