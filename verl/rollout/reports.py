"""What replicas have drawn of requests in work, as they report it: a request whose replica is lost resumes from there.

Consumes: nothing but answers of the replica to `Sampler.drawn`. Waits for: that answer, in a task of its own, which
holds no lock and no slot; no caller waits for it. Unblocked by: the answer, or the replica's loss.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

from verl.errors import VerlError
from verl.metrics import notice
from verl.rollout.base import Completion, Moved, Request, Sampler
from verl.rollout.lost import LOSSES
from verl.rollout.resume import join_attempts


@dataclass(frozen=True)
class ReplicaState:
    """A replica as the service sees it.

    Args:
        requests: ids of those that it has.
        broken: the error by which its engine was lost; empty otherwise.
        reported: tokens that it has drawn of these requests, by its last report.
    """

    requests: tuple[str, ...] = ()
    broken: str = ""
    reported: int = 0


@dataclass(frozen=True)
class ServiceState:
    """All replicas by name; every request that moved to another one, once for each time."""

    replicas: Mapping[str, ReplicaState]
    moved: tuple[Moved, ...]


class AttemptReport:
    """What one attempt at a request has drawn, as far as its replica has said.

    Args:
        request: as the replica got it.
    """

    def __init__(self, request: Request):
        self.request = request
        self._parts: list[Completion] = []
        self.count = len(request.generated_prefix)
        """Tokens of the response that are known, with those that the request came with."""

    def add(self, part: Completion) -> None:
        """Tokens behind those that are known; some without log-probs could not be trained on, and are not kept."""
        if len(part.log_probs) == len(part.token_ids) == len(part.token_versions):
            self._parts.append(part)
            self.count += len(part.token_ids)

    def drawn(self) -> Completion | None:
        """Everything that was reported."""
        return join_attempts(self._parts) if self._parts else None


class DrawnReports:
    """Polls a replica as long as it has requests in flight.

    Args:
        name: of the replica.
        sampler: the replica.
    """

    def __init__(self, name: str, sampler: Sampler):
        self._name, self._sampler = name, sampler
        self._attempts: dict[str, AttemptReport] = {}
        self._task: asyncio.Task[None] | None = None

    def begin(self, report: AttemptReport, seconds: float) -> None:
        """From here on the report gets what is drawn, every ``seconds``."""
        self._attempts[report.request.id] = report
        if self._task is None or self._task.done():
            self._task = asyncio.ensure_future(self._ask(seconds))

    def end(self, report: AttemptReport) -> None:
        """The attempt is over; its report stays as it is, but for an answer that is on its way."""
        self._attempts.pop(report.request.id, None)

    @property
    def num_drawn(self) -> int:
        """Tokens that are known of attempts in work."""
        return sum(report.count - len(report.request.generated_prefix) for report in self._attempts.values())

    async def _ask(self, seconds: float) -> None:
        while self._attempts:
            await asyncio.sleep(seconds)
            attempts = dict(self._attempts)
            try:
                news = await self._sampler.drawn({name: report.count for name, report in attempts.items()})
            except LOSSES:
                return  # its requests hear of it themselves
            except VerlError as error:
                return notice(
                    f"rollout, {self._name}, reports",
                    f"it does not report what it draws, so a request that it loses starts from its prompt: {error}",
                )
            for name, part in news.items():
                if self._attempts.get(name) is attempts[name]:
                    attempts[name].add(part)
