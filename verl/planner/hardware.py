"""Devices that a plan can name, from `hardware.yaml`: what each has, with the source of every figure."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import yaml

from verl.errors import ConfigError, suggest

FILE = Path(__file__).parent / "hardware.yaml"


@dataclass(frozen=True)
class Device:
    """One accelerator of a machine, or the CPU of one.

    Args:
        name: as in `hardware.yaml`.
        memory: bytes.
        bf16_flops: dense bf16 operations per second, a multiply-add counts two; of a CPU, float32.
        memory_bandwidth: bytes per second.
        node_link: bytes per second to the other devices of its machine, in one direction.
        network: bytes per second to other machines, per device and in one direction.
        node: devices of one machine.
    """

    name: str
    memory: float
    bf16_flops: float
    memory_bandwidth: float
    node_link: float
    network: float
    node: int


@dataclass(frozen=True)
class Cluster:
    """Several devices of one kind, in machines of `Device.node` each."""

    device: Device
    devices: int

    @classmethod
    def parse(cls, text: str) -> Cluster:
        """``64xH100``: a number, an x, a name; the name alone is one device.

        Raises:
            ConfigError: another form, no device, or an unknown name.
        """
        match = re.fullmatch(r"(?:(\d+)\s*[x*]\s*)?(\S+)", text.strip())
        if match is None or (match[1] is not None and int(match[1]) < 1):
            raise ConfigError("this names no devices", key="--devices", got=text, allowed="64xH100, or H100 for one")
        return cls(device(match[2]), int(match[1] or 1))

    def link(self, devices: int) -> float:
        """Bytes per second and device of a collective over neighbours: the network once a machine is full."""
        return self.device.node_link if devices <= self.device.node else self.device.network


@functools.cache
def all_devices() -> Mapping[str, Device]:
    """All of `hardware.yaml` by name."""
    entries = yaml.safe_load(FILE.read_text(encoding="utf-8"))["devices"]
    return MappingProxyType(
        {name: Device(name, **{key: value for key, (value, _) in figures.items()}) for name, figures in entries.items()}
    )


def device(name: str) -> Device:
    """A device by its name, upper or lower case; the name's dashes, spaces and ``GB`` may be left out.

    Raises:
        ConfigError: no such device, or one of several sizes of memory is meant.
    """
    by_form = {_form(key): entry for key, entry in all_devices().items()}
    entry = by_form.get(_form(name))
    if entry is not None:
        return entry
    fix = suggest(name.upper(), all_devices()) or "Add an entry with the figures of its data sheet to " + str(FILE)
    raise ConfigError("unknown device", key="--devices", got=name, allowed=list(all_devices()), fix=fix)


def _form(name: str) -> str:
    return re.sub(r"[\s_-]|GB$", "", name.upper())
