"""Weights on their way from one rank of the actor to the replicas that it feeds."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

from torch import Tensor

from verl.config import ActorRolloutRefConfig, RolloutConfig
from verl.config.schema.model import HFModelConfig
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


@dataclass(frozen=True)
class FeedChange:
    """How the replicas that one rank of the actor feeds change between two versions.

    Args:
        leave: names of those that get no further versions.
        join: name -> sampler of those that get every version from the next one on.
        catch_up: name -> sampler of those that get the last version again, now; of the first rank, which keeps it.
    """

    leave: tuple[str, ...] = ()
    join: Mapping[str, Sampler] = field(default_factory=dict)
    catch_up: Mapping[str, Sampler] = field(default_factory=dict)


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
    senders = []
    for rank, (fed, host) in enumerate(zip(feeds, hosts, strict=True)):
        hosted = {name: fed_sampler(policy, device, replicas[name], host) for name in fed}
        keeps = rank == 0 and policy.rollout.max_replacements > 0
        senders.append(WeightSender(policy.rollout, policy.model, hosted, keeps))
    return senders


def fed_sampler(policy: ActorRolloutRefConfig, device: str, replica: Handle, host: str | None) -> HostedSampler:
    """A replica in another pool as the rank of the actor sees it that feeds it; arguments as of `senders`."""
    kind, begin = transport_of(policy.rollout, policy.model, device, is_separate=True, host=host)
    return HostedSampler(replica, kind, begin)


class WeightSender:
    """Sends one rank's export to its replicas: made once, and each replica gets it bucket by bucket.

    Args:
        rollout, model: sections of the configuration.
        replicas: name -> sampler. None at all is fine: the export is collective, so this rank makes it all the same.
        shares: the engine's parameters may become the sampler's, as no request runs while they change.
        keeps: hold a copy of the last version in the host's memory, for replicas that join between two versions, when
            the model is on its way to the next one.
    """

    def __init__(
        self,
        rollout: RolloutConfig,
        model: HFModelConfig,
        replicas: Mapping[str, Sampler],
        keeps: bool = False,
        shares: bool = False,
    ):
        self.rollout, self.model, self.replicas, self.keeps = rollout, model, dict(replicas), keeps
        self.shares = shares
        self._kept: list[WeightChunk] = []
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
        is_live = self.shares and alone is None and engine.exports_itself
        chunks = chunk_weights(self._counted(weights), bucket_bytes, version, is_live)
        if self.shares and alone is not None and all(sampler.shares_base for sampler in self.replicas.values()):
            base = WeightChunk(version, list(engine.export_base().items()), last=False, is_live=True)
            chunks = chain([base], chunks)
        if self.keeps:
            chunks = self._copied(chunks)
        before = {name: sampler.stats() for name, sampler in self.replicas.items()}
        # A replica that stops early must not stop the collective export of all ranks: it cannot close the
        # stream, and the rest is exported anyway.
        errors = asyncio.run(deliver(list(self.replicas.values()), map(_as_it_is, chunks), version))
        deque(chunks, maxlen=0)
        if self._broken is not None:
            raise self._broken
        failed = {name: portable(error) for name, error in zip(self.replicas, errors) if error is not None}
        return SyncResult(max((self._bytes_of(name, before[name]) for name in self.replicas), default=0.0), failed)

    def change(self, change: FeedChange) -> SyncResult:
        """Feed other replicas from here on; those that catch up have the last version afterwards, or failed.

        Not collective: nothing is exported. Transports connect one rank to one replica, so no other replica notices.
        """
        for name in change.leave:
            gone = self.replicas.pop(name, None)
            if isinstance(gone, HostedSampler):
                gone.forget_transport()
        self.replicas.update(change.join)
        if not self._kept:  # nothing was sent so far
            return SyncResult()
        late, version = change.catch_up, self._kept[0].version
        errors = asyncio.run(deliver(list(late.values()), map(_as_it_is, self._kept), version))
        for sampler in late.values():
            if isinstance(sampler, HostedSampler):
                sampler.forget_transport()
        return SyncResult(0.0, {name: portable(error) for name, error in zip(late, errors) if error is not None})

    def _copied(self, chunks: Iterable[WeightChunk]) -> Iterator[WeightChunk]:
        """The chunks as they are, and once all are there copies of them in `_kept`."""
        copies, self._kept = list[WeightChunk](), []  # the copy of the last version goes before the next one is made
        for chunk in chunks:
            tensors = [(name, tensor.detach().to("cpu", copy=True)) for name, tensor in chunk.tensors]
            copies.append(replace(chunk, tensors=tensors))
            yield chunk
            del chunk, tensors  # before the next one is made
        self._kept = copies

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
        except Exception as error:  # boundary: raised by `send`, once the receivers have released the stream
            self._broken = error
            raise
