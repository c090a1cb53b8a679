"""What one setting says about another that is not given, as upstream's trainers read it; a notice each."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

NULL = ("data_loader_seed", "min_lr_ratio")
"""Last names of settings that are null in files of upstream's older releases, and mean their default."""


@dataclass(frozen=True)
class Implied:
    """A value that follows: of ``key``, because of the setting ``source``, and why."""

    key: str
    value: Any
    source: str
    why: str


def implied(given: Mapping[str, Any], usual: Callable[[str], Any]) -> Iterator[Implied]:
    """All of an RL run: without group filtering a step trains on what it samples, so one number says both.

    Args:
        given: raw value of every setting that somebody set.
        usual: the default of a setting.
    """
    streamed = _streamed(given, usual)
    if streamed is not None:
        if str(given.get("data.train_batch_size")) != str(streamed.value):
            yield streamed
        return
    gen, train, switch = "data.gen_batch_size", "data.train_batch_size", "algorithm.filter_groups.enable"
    size = given.get(gen)
    if size is None or "${" in str(size) or not _is_off(given.get(switch, usual(switch))):
        return
    if str(size) != str(given.get(train, usual(train))):
        why = f"every step samples and trains on these prompts, without {switch}=true, and {train} has no effect"
        yield Implied(train, size, gen, why)


def _streamed(given: Mapping[str, Any], usual: Callable[[str], Any]) -> Implied | None:
    """fully_async: what a step trains on; the number of prompts says so in no other schedule."""
    mode, train = "trainer.v1.trainer_mode", "data.train_batch_size"
    if str(given.get(mode, usual(mode))) != "fully_async":
        return None
    factors = (
        "async_training.trigger_parameter_sync_step",
        "async_training.require_batches",
        "actor_rollout_ref.actor.ppo_mini_batch_size",
    )
    numbers = [str(given.get(key, usual(key))) for key in factors]
    if not all(number.isdigit() for number in numbers):
        return None
    size = math.prod(int(number) for number in numbers)
    why = f"a step of fully_async trains on {' x '.join(numbers)} = {size} prompts ({', '.join(factors)})"
    return Implied(train, size, mode, why)


def left_open(given: Mapping[str, Any], usual: Callable[[str], Any]) -> list[str]:
    """Settings that say nothing: ``???``, which asks for a value, below an ``enable`` that is off, and `NULL` ones."""
    null = [key for key, value in given.items() if value is None and key.rpartition(".")[2] in NULL]
    return null + [key for key, value in given.items() if value == "???" and _is_below_off(key, given, usual)]


def _is_below_off(key: str, given: Mapping[str, Any], usual: Callable[[str], Any]) -> bool:
    parts = key.split(".")
    switches = [f"{'.'.join(parts[:cut])}.enable" for cut in range(1, len(parts))]
    return any(_is_off(given.get(switch, usual(switch))) for switch in switches)


def _is_off(value: Any) -> bool:
    return str(value).lower() in ("false", "no", "off", "0")
