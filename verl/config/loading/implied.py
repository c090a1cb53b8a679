"""What one setting says about another that is not given, as upstream's trainers read it; a notice each."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

_MODE, _GEN, _TRAIN = "trainer.v1.trainer_mode", "data.gen_batch_size", "data.train_batch_size"
_HYBRID, _NODES = "actor_rollout_ref.hybrid_engine", "actor_rollout_ref.rollout.nnodes"
NULL = ("data_loader_seed", "min_lr_ratio")
"""Last names of settings that are null in files of upstream's older releases, and mean their default."""
QUEUES = ("colocate_async", "separate_async")
"""Schedules that take prompts one by one out of what is drawn at once, besides fully_async."""


@dataclass(frozen=True)
class Implied:
    """A value that follows: of ``key``, because of the setting ``source``, and why."""

    key: str
    value: Any
    source: str
    why: str


def implied(settings: Mapping[str, Any], usual: Callable[[str], Any]) -> Iterator[Implied]:
    """All of an RL run.

    Args:
        settings: raw value of every setting that somebody set.
        usual: the default of a setting.
    """
    mode = str(settings.get(_MODE, usual(_MODE)))
    if mode == "separate_async":
        yield from _separate(settings, usual)
    if mode == "fully_async":
        yield from _streamed(settings, usual)
    elif mode not in QUEUES:
        yield from _sampled(settings, usual)


def _sampled(settings: Mapping[str, Any], usual: Callable[[str], Any]) -> Iterator[Implied]:
    """Without group filtering a step trains on what it samples, so one number says both; a queue has the two apart."""
    size, switch = settings.get(_GEN), "algorithm.filter_groups.enable"
    if size is None or "${" in str(size) or not _is_off(settings.get(switch, usual(switch))):
        return
    if str(size) != str(settings.get(_TRAIN, usual(_TRAIN))):
        why = f"every step samples and trains on these prompts, without {switch}=true, and {_TRAIN} has no effect"
        yield Implied(_TRAIN, size, _GEN, why)


def _separate(settings: Mapping[str, Any], usual: Callable[[str], Any]) -> Iterator[Implied]:
    """separate_async: nodes of the samplers are a pool of their own; other schedules also need the switch."""
    nodes = str(settings.get(_NODES, usual(_NODES)))
    if nodes.isdigit() and int(nodes) > 0 and not _is_off(settings.get(_HYBRID, usual(_HYBRID))):
        yield Implied(_HYBRID, False, _NODES, f"under separate_async they are the samplers' own: {_HYBRID}=false")


def _streamed(settings: Mapping[str, Any], usual: Callable[[str], Any]) -> Iterator[Implied]:
    """fully_async: what a step trains on; the number of prompts says so in no other schedule."""
    factors = (
        "async_training.trigger_parameter_sync_step",
        "async_training.require_batches",
        "actor_rollout_ref.actor.ppo_mini_batch_size",
    )
    numbers = [str(settings.get(key, usual(key))) for key in factors]
    if not all(number.isdigit() for number in numbers):
        return
    size = math.prod(int(number) for number in numbers)
    if str(settings.get(_TRAIN)) != str(size):
        why = f"a step of fully_async trains on {' x '.join(numbers)} = {size} prompts ({', '.join(factors)})"
        yield Implied(_TRAIN, size, _MODE, why)


def left_open(settings: Mapping[str, Any], usual: Callable[[str], Any]) -> list[str]:
    """Settings that say nothing: ``???``, which asks for a value, below an ``enable`` that is off, and `NULL` ones."""
    null = [key for key, value in settings.items() if value is None and key.rpartition(".")[2] in NULL]
    return null + [key for key, value in settings.items() if value == "???" and _is_below_off(key, settings, usual)]


def _is_below_off(key: str, settings: Mapping[str, Any], usual: Callable[[str], Any]) -> bool:
    parts = key.split(".")
    switches = [f"{'.'.join(parts[:cut])}.enable" for cut in range(1, len(parts))]
    return any(_is_off(settings.get(switch, usual(switch))) for switch in switches)


def _is_off(value: Any) -> bool:
    return str(value).lower() in ("false", "no", "off", "0")
