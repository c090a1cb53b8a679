"""Weights on their way from one rank of the actor to the replicas that it feeds."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from verl.config import ActorRolloutRefConfig, RolloutConfig
from verl.engines.base import Engine
from verl.errors import portable
from verl.rollout.adapters import separate_adapter
from verl.rollout.base import Sampler
from verl.rollout.hosted import HostedSampler
from verl.rollout.place import transport_of
from verl.single_controller.base.handle import Handle
from verl.weight_sync import WeightChunk, chunk_weights, deliver

BYTES_SENT = "weight_bytes_sent"
"""What a sampler counts that weights reach by a transport; others see the tensors themselves."""


@dataclass(frozen=True)
class SyncResult:
    """The result of sending one version.

    Args:
        num_bytes: that one replica was sent.
        failed: name of a replica -> why it does not have the version.
    """

    num_bytes: float = 0.0
    failed: Mapping[str, Exception] = field(default_factory=dict)

    @classmethod
    def by_all(cls, ranks: Iterable[SyncResult]) -> SyncResult:
        """What all ranks of the actor sent together."""
        parts = list(ranks)
        failed = {name: error for part in parts for name, error in part.failed.items()}
        return cls(max((part.num_bytes for part in parts), default=0.0), failed)


def _as_it_is(chunk: WeightChunk) -> WeightChunk:
    return chunk


def senders(
    policy: ActorRolloutRefConfig,
    device: str,
    replicas: Mapping[str, Handle],
    feeds: Sequence[Sequence[str]],
    hosts: Sequence[str | None],
) -> list[WeightSender]:
    """The transports by which each actor rank sends weights to its replicas in another pool.

    Args:
        device: of the actors.
        replicas: name -> handle on its `ReplicaWorker`.
        feeds: names of the replicas of each rank.
        hosts: address of each rank's machine; None where all processes are on one machine.
    """
    made = []
    for fed, host in zip(feeds, hosts, strict=True):
        kind, begin = transport_of(policy.rollout, policy.model, device, is_apart=True, host=host)
        hosted = {name: HostedSampler(replicas[name], kind, begin) for name in fed}
        made.append(WeightSender(policy.rollout, policy.model, hosted))
    return made


class WeightSender:
    """Sends one rank's export to its replicas: made once, and each replica gets it bucket by bucket.

    Args:
        rollout, model: sections of the configuration.
        replicas: name -> sampler. None at all is fine: the export is collective, so this rank makes it all the same.
    """

    def __init__(self, rollout: RolloutConfig, model: Any, replicas: Mapping[str, Sampler]):
        self.rollout, self.model, self.replicas = rollout, model, dict(replicas)
        self._exported = 0.0
        self._broken: Exception | None = None

    def send(self, engine: Engine, version: int) -> SyncResult:
        """Called by all ranks of the actor in the same order, because the export is collective.

        Raises:
            Exception: an error of the export itself, not of a replica.
        """
        bucket_bytes = self.rollout.checkpoint_engine.update_weights_bucket_megabytes << 20
        alone = separate_adapter(self.rollout, self.model)
        weights = engine.export_weights() if alone is None else engine.export_adapter()
        chunks = chunk_weights(self._counted(weights), bucket_bytes, version=version)
        before = {name: sampler.stats() for name, sampler in self.replicas.items()}
        # A replica that stops half-way must not stop the collective export of all ranks: it cannot close the
        # stream, and the rest is exported anyway.
        errors = asyncio.run(deliver(list(self.replicas.values()), map(_as_it_is, chunks), version))
        deque(chunks, maxlen=0)
        if self._broken is not None:
            raise self._broken
        failed = {name: portable(error) for name, error in zip(self.replicas, errors) if error is not None}
        return SyncResult(max((self._bytes_of(name, before[name]) for name in self.replicas), default=0.0), failed)

    def _bytes_of(self, name: str, before: Mapping[str, float]) -> float:
        after = self.replicas[name].stats()
        return after[BYTES_SENT] - before.get(BYTES_SENT, 0.0) if BYTES_SENT in after else self._exported

    def _counted(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        self._exported, self._broken = 0.0, None
        try:
            for name, tensor in weights:
                self._exported += tensor.nbytes
                yield name, tensor
                del tensor  # before the next one is made
        except Exception as error:  # boundary: raised by `send`, once the receivers have let go of the stream
            self._broken = error
            raise
