"""Bytes per device of a role in every phase of a step."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True)
class PhaseMemory:
    """Bytes per device that one role takes in one phase.

    Args:
        phase: ``idle``, ``infer``, ``update``, ``generate`` or ``sync``.
        weights, gradients, optimizer: of the model's shard, and of copies in other precisions.
        activations: what the backward pass needs, and the largest layer's working values.
        logits: of the head: logits and their gradient, or the chunks of a fused head.
        kv_cache: of a sampler.
        transient: chunks and gathered tensors of a weight sync, of resharding, of FSDP.
    """

    phase: str
    weights: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    activations: float = 0.0
    logits: float = 0.0
    kv_cache: float = 0.0
    transient: float = 0.0

    @property
    def terms(self) -> dict[str, float]:
        """Bytes by name."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name != "phase"}

    @property
    def total(self) -> float:
        return sum(self.terms.values())

    @property
    def dominant(self) -> str:
        """The largest term."""
        return max(self.terms.items(), key=lambda term: term[1])[0]


@dataclass(frozen=True)
class Memory:
    """Bytes of a role.

    Args:
        role: its name.
        phases: per device; ``idle`` first.
        host: bytes of host memory per process.
        checkpoint: bytes of one checkpoint of the role, all processes together.
    """

    role: str
    phases: tuple[PhaseMemory, ...]
    host: float = 0.0
    checkpoint: float = 0.0

    def phase(self, name: str) -> PhaseMemory:
        """A phase by its name; ``idle`` where the role has no such phase."""
        return next((phase for phase in self.phases if phase.phase == name), self.phases[0])

    @property
    def peak(self) -> PhaseMemory:
        """The largest phase."""
        return max(self.phases, key=lambda phase: phase.total)

    @property
    def total(self) -> float:
        """Bytes per device in the largest phase."""
        return self.peak.total
