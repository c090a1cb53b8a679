"""Devices that a plan can name: from `hardware.yaml`, with sources, or from a file of `calibrate`."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from verl.errors import ConfigError, suggest
from verl.json_text import JsonObject, read_json
from verl.planner.ranges import EFFICIENCY, Reached

FILE = Path(__file__).parent / "hardware.yaml"
VERSION = 1
"""Of the files that `calibrate` writes."""


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
        is_cpu: no accelerator.
        reached: what phases of a step reach of these figures; of a device that was not calibrated, assumptions.
    """

    name: str
    memory: float
    bf16_flops: float
    memory_bandwidth: float
    node_link: float
    network: float
    node: int
    is_cpu: bool = False
    reached: Mapping[str, Reached] = field(default_factory=lambda: EFFICIENCY, hash=False)


@dataclass(frozen=True)
class Cluster:
    """Several devices of one kind, in machines of `Device.node` each."""

    device: Device
    devices: int

    @classmethod
    def parse(cls, text: str, calibrated: Device | None = None) -> Cluster:
        """``64xH100``: a number, an x, a name; the name alone is one device.

        Args:
            calibrated: this one is meant, and a CPU's memory is divided by its processes; None: one of `hardware.yaml`.

        Raises:
            ConfigError: another form, no device, an unknown name, or another one than the calibrated device's.
        """
        match = re.fullmatch(r"(?:(\d+)\s*[x*]\s*)?(\S+)", text.strip())
        if match is None or (match[1] is not None and int(match[1]) < 1):
            raise ConfigError("this names no devices", key="--devices", got=text, allowed="64xH100, or H100 for one")
        if calibrated is not None and _form(match[2]) != _form(calibrated.name):
            raise ConfigError("the file of --hardware is of another device", key="--devices", got=match[2],
                              allowed=calibrated.name, fix="Calibrate on a machine with these devices.")  # fmt: skip
        devices = int(match[1] or 1)
        if calibrated is not None and calibrated.is_cpu:
            calibrated = replace(calibrated, memory=calibrated.memory / devices)
        return cls(calibrated or device(match[2]), devices)

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


def to_json(entry: Device) -> JsonObject:
    """What `read_device` reads."""
    return {"version": VERSION, **asdict(replace(entry, reached={})), "reached": {
        name: asdict(share) for name, share in entry.reached.items()}}  # fmt: skip


def read_device(path: Path) -> Device:
    """A device from a file of `calibrate`.

    Raises:
        ConfigError: the file cannot be read or has another version; else all fields that are missing, unknown or bad.
    """
    try:
        entry = read_json(path.read_bytes(), strict=True)
    except (OSError, ValueError) as error:
        raise ConfigError(f"the file cannot be read: {error}", key="--hardware", got=str(path)) from error
    version = entry.pop("version", None) if isinstance(entry, dict) else None
    if version != VERSION:
        raise ConfigError("no file of calibrate, or one of another version", key="--hardware", got=version,
                          allowed=[VERSION], fix="Calibrate again.")  # fmt: skip
    problems, phases = [*_problems(Device, entry, "")], entry.get("reached")
    if not isinstance(phases, dict) or phases.keys() != EFFICIENCY.keys():
        phases = {}
        problems.append(ConfigError("this lists all phases", key="reached", allowed=list(EFFICIENCY)))
    for name, phase in phases.items():
        problems += _problems(Reached, phase if isinstance(phase, dict) else {}, f"reached.{name}.")
    if problems:
        refusal = ConfigError("; ".join(map(str, problems)), key=f"--hardware {path}")
        refusal.problems = tuple(problems)
        raise refusal
    return Device(**entry | {"reached": {name: Reached(**phase) for name, phase in phases.items()}})


_TYPES: dict[object, tuple[type, ...]] = {"str": (str,), "bool": (bool,), "int": (int,), "float": (int, float)}


def _problems(kind: type[Device | Reached], entry: JsonObject, above: str) -> Iterator[ConfigError]:
    """By the fields of a dataclass: numbers are above zero, a latency may be zero."""
    types = {part.name: _TYPES[part.type] for part in fields(kind) if part.type in _TYPES}
    for name in sorted(entry.keys() - {part.name for part in fields(kind)}):
        yield ConfigError("no such field", key=above + name, allowed=list(types), fix=suggest(name, types))
    for name, allowed in types.items():
        value: Any = entry.get(name)
        is_one = isinstance(value, allowed) and isinstance(value, bool) == (bool in allowed)
        if not is_one or (int in allowed and (value < 0 or (value == 0 and name != "latency"))):
            names = " or ".join(one.__name__ for one in allowed) + " above zero" * (int in allowed)
            yield ConfigError("this field is missing, or its value is none", key=above + name, got=value, allowed=names)
    shares: list[Any] = [entry.get(name) for name in ("low", "likely", "high") if name in types]
    if all(isinstance(share, int | float) for share in shares) and shares != sorted(shares):
        yield ConfigError("low, likely and high are in order", key=above + "likely", got=shares)
