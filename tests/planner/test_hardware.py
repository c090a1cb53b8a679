"""The table of devices, and how a person names them."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import yaml

from verl.errors import ConfigError
from verl.planner.hardware import FILE, Cluster, all_devices, device, read_device, to_json


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


def test_a_calibrated_device_reads_back_and_takes_its_name(tmp_path):
    measured = replace(device("H200"), bf16_flops=7e14)
    file = tmp_path / "h200.json"
    file.write_text(json.dumps(to_json(measured)))
    assert read_device(file) == measured
    assert Cluster.parse("8xh-200", read_device(file)) == Cluster(measured, 8)
    with pytest.raises(ConfigError, match=r"another device.*Allowed: H200"):
        Cluster.parse("8xH100", measured)


def test_processes_share_the_memory_of_a_calibrated_cpu():
    machine = replace(device("CPU"), memory=32e9)
    assert Cluster.parse("4xCPU", machine) == Cluster(replace(machine, memory=8e9), 4)
    assert Cluster.parse("4xCPU").device.memory == 16e9, "the table has figures of one device"


def test_every_bad_field_of_a_calibration_is_named(tmp_path):
    entry = to_json(device("CPU"))
    del entry["memory"]
    entry |= {"node": True, "node_lnk": 1.0, "network": 0}
    entry["reached"]["train"] |= {"low": 2, "likely": 1.0, "high": 3.0, "latency": -1}
    entry["reached"]["infer"]["latency"] = 0
    file = tmp_path / "cpu.json"
    file.write_text(json.dumps(entry))
    with pytest.raises(ConfigError, match="Did you mean 'node_link'") as error:
        read_device(file)
    keys = [problem.key for problem in error.value.problems]
    assert keys == ["node_lnk", "memory", "network", "node", "reached.train.latency", "reached.train.likely"]


@pytest.mark.parametrize(
    ("text", "words"),
    [("{", "cannot be read"), ('{"version": 2}', "another version"), ("[1]", "another version"),
     ('{"version": 1, "reached": {"train": {}}}', "reached: this lists all phases")],
)  # fmt: skip
def test_a_file_that_is_no_calibration_is_refused(tmp_path, text, words):
    file = tmp_path / "cpu.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match=words):
        read_device(file)


def test_the_cpu_alone_has_no_accelerator():
    assert [name for name, entry in all_devices().items() if entry.is_cpu] == ["CPU"]
