"""Calibration: what it recovers from a machine whose shares are known, and the file that it writes of this one."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.harness.ranks import run_cells
from verl.cli.planning import main
from verl.errors import ConfigError
from verl.planner.hardware import Cluster, Device, device, read_device
from verl.planner.ranges import EFFICIENCY, Reached
from verl.planner.seconds import seconds_of
from verl.trainer.planning import calibrate
from verl.trainer.planning.calibrate import MeasuredSizes, MeasuredStep

TINY = MeasuredSizes((16, 32), 2, ((2, 16), (4, 32)), (1, 4), 4, product=64, copied=1024)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Device:
    """A CPU on which every phase takes what its share and latency say."""
    shares = {"train": (0.5, 3e-4), "infer": (0.6, 2e-4), "prefill": (0.6, 2e-4),
              "decode built in": (0.2, 4e-4), "decode built in flops": (0.1, 4e-4)}  # fmt: skip
    reached = {name: Reached(share, share, share, "", latency) for name, (share, latency) in shares.items()}
    # 2 x 1000^3 operations and 2 x 1e8 bytes in a second: one row is bound by bytes, 512 rows by operations.
    figures = {"bf16_flops": 2e9, "memory_bandwidth": 2e8, "reached": {**EFFICIENCY, **reached}}
    made = Cluster(replace(device("CPU"), **figures), 1)

    def measured(work: Callable[[], object], kind: str) -> float:
        return 1.0

    def steps(make: Callable[..., list[MeasuredStep]]) -> Callable[..., list[MeasuredStep]]:
        """The same steps, with the seconds of that machine."""
        return lambda *where: [
            step._replace(seconds=seconds_of(step.plan, step.shape, step.work, made).phase(step.phase).likely)
            for step in make(*where)
        ]

    monkeypatch.setattr(calibrate, "_timed", measured)
    for name in ("_trained", "_sampled"):
        monkeypatch.setattr(calibrate, name, steps(getattr(calibrate, name)))
    sizes = TINY._replace(requests=(1, 512), product=1000, copied=25_000_000)
    monkeypatch.setattr(calibrate, "ON_CPU", sizes)
    return made.device


def test_the_shares_of_a_machine_are_recovered_from_its_seconds(machine):
    measured = calibrate.calibrated("cpu")
    assert (measured.bf16_flops, measured.memory_bandwidth, measured.is_cpu) == (2e9, 2e8, True)
    for name, share in measured.reached.items():
        there = machine.reached[name]
        assert (share.likely, share.latency) == pytest.approx((there.likely, there.latency), rel=1e-6), name


def test_models_that_do_not_fit_are_not_measured(machine, monkeypatch):
    """Of width 4,096, two layers and embeddings of 4,096 tokens have 436 million weights, of 16 bytes each."""
    write = calibrate.write_random_model

    def write_small(model: dict[str, object], path: Path) -> None:
        assert model["hidden_size"] != 4096
        write(model, path)

    monkeypatch.setattr(calibrate, "write_random_model", write_small)
    monkeypatch.setattr(calibrate, "free_host_memory", lambda: 1e9)
    monkeypatch.setattr(calibrate, "ON_CPU", calibrate.ON_CPU._replace(hidden=(16, 32, 4096)))
    assert calibrate.calibrated("cpu").reached["train"].likely == pytest.approx(0.5, rel=1e-6)


def test_a_calibration_of_this_machine_is_a_file_that_reads_back(tmp_path, monkeypatch, capsys):
    clock = itertools.count(1)

    def each(work: Callable[[], object], kind: str) -> list[float]:
        """The work is done, and takes longer than that before it."""
        work()
        return [float(next(clock))]

    monkeypatch.setattr(calibrate, "_each", each)
    monkeypatch.setattr(calibrate, "ON_CPU", TINY)
    monkeypatch.setattr(calibrate, "resolve_device", lambda name: "cpu")
    file = tmp_path / "cpu.json"
    assert main(["calibrate", str(file)]) == 0
    measured = read_device(file)
    assert next(clock) == 15  # a product, a copy, and of two models three phases with two sizes each
    assert (measured.name, measured.bf16_flops, measured.memory_bandwidth) == ("CPU", 2 * 64**3, 2 * 4 * 1024 / 2)
    assert measured.reached["train"].source.startswith("measured") and measured.reached["link"] == EFFICIENCY["link"]
    assert "0.0005243 GFLOP/s" in capsys.readouterr().out
    assert main(["calibrate", str(file), "trainer.nnodes=2"]) == 2
    assert "no configuration" in capsys.readouterr().err


@pytest.mark.parametrize(("vendors_name", "name"), [
    ("NVIDIA H100 80GB HBM3", "H100"), ("NVIDIA H200", "H200"), ("NVIDIA A100-SXM4-80GB", "A100-80GB"),
    ("NVIDIA GeForce RTX 4090", "RTX4090"), ("NVIDIA A100-SXM4-40GB", "A100-40GB"), ("AMD Instinct MI300X", "MI300X"),
])  # fmt: skip
def test_the_entry_of_a_gpu_is_read_off_its_vendors_name(vendors_name, name):
    assert calibrate.listed_device(vendors_name).name == name


@pytest.mark.parametrize("vendors_name", ["Tesla T4", "NVIDIA GH200 480GB", "NVIDIA GB200", "NVIDIA H100 PCIe",
                                          "NVIDIA H100 NVL", "NVIDIA A100-PCIE-40GB"])  # fmt: skip
def test_a_gpu_without_an_entry_is_refused(vendors_name):
    with pytest.raises(ConfigError, match=f"unknown device.*{vendors_name}"):
        calibrate.listed_device(vendors_name)


def test_links_of_several_machines_are_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match=r"LOCAL_WORLD_SIZE: .*several"):
        calibrate.with_links(device("CPU"))


@pytest.mark.parametrize(("kind", "vendors_name"), [("cpu", ""), ("cuda", "NVIDIA H200")])
def test_links_of_another_device_are_refused(monkeypatch, kind, vendors_name):
    monkeypatch.setattr(calibrate, "resolve_device", lambda name: kind)
    monkeypatch.setattr(calibrate, "device_name", lambda kind: vendors_name)
    with pytest.raises(ConfigError, match=r"another device.*H100"):
        calibrate.with_links(device("H100"))


def links_of(ranks: object, folder: Path) -> tuple[list[int], float, list[float]]:
    clock = iter([[0.003, 0.002, 0.001], [4.0, 1.0, 2.0]] * 2)

    def each(work: Callable[[], object], kind: str) -> list[float]:
        work()
        return next(clock)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calibrate, "_each", each)
        measured, larger = (calibrate.with_links(replace(device("CPU"), node=node)) for node in (1, 8))
    link = measured.reached["link"]
    return [measured.node, larger.node], measured.node_link, [link.low, link.likely, link.high, link.latency]


def test_ranks_measure_the_links_between_them(tmp_path):
    """A ring of two sends as many bytes as the block has, 4 for each of 2^24 values, in 2 s."""
    answer = [[2, 8], 4 * 2**24 / 2, [0.5, 1.0, 2.0, 0.002]]
    assert run_cells(2, [links_of], tmp_path)["links_of"] == [answer, answer]
