"""What an engine gives to be saved: tensors by name and JSON, in three sections.

Tensor names start with their section: ``model/<hugging face name>``, ``optimizer/<parameter>/<key>``, ``extra/<name>``
(random number generators). ``scalars`` has one JSON object per section. A checkpoint may hold any of the sections, and
whoever loads one takes what is there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

SECTIONS = ("model", "optimizer", "extra")


@dataclass(frozen=True)
class EngineState:
    """Everything that decides what an engine does next.

    Args:
        tensors: section-prefixed name -> tensor; they may share the engine's memory: save or copy before training on.
        scalars: section -> JSON object.

    Example:
        >>> EngineState({"model/lm_head.weight": w, "extra/rng/cpu": rng}, {"extra": {"scheduler_step": 3}})
    """

    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    scalars: Mapping[str, Any] = field(default_factory=dict)

    def section(self, name: str) -> dict[str, Tensor]:
        """The tensors of one section, without its prefix."""
        prefix = f"{name}/"
        return {key[len(prefix) :]: tensor for key, tensor in self.tensors.items() if key.startswith(prefix)}

    def only(self, sections: Iterable[str]) -> EngineState:
        """The same state with these sections alone."""
        keep = set(sections)
        return EngineState(
            {key: tensor for key, tensor in self.tensors.items() if key.split("/", 1)[0] in keep},
            {key: value for key, value in self.scalars.items() if key in keep},
        )


def prefixed(section: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Names with the section in front."""
    return {f"{section}/{name}": tensor for name, tensor in tensors.items()}
