"""Which replica drew which tokens of a request with which weights, and how a request draws them again.

A request is known by its id, which its prompt, its sample and its turn determine. A span is a number of its tokens,
drawn with one version at one replica. A request that follows spans waits until the service has a span's version, and
draws as many tokens as the span says before it waits for the next one. With a sampler whose tokens are a function of
weights, prompt and key (``rollout.full_determinism``) the tokens are those of the record, whatever replica draws them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby

from verl.errors import ReplayError
from verl.journal.schedule import Draws, Notes, Span
from verl.rollout.base import Completion, Request
from verl.rollout.change import ChangeEvent
from verl.rollout.resume import continued, join_attempts

Serve = Callable[[Request], Awaitable[Completion]]


def spans_of(replica: str, versions: Sequence[int]) -> list[Span]:
    """One attempt at a request as spans."""
    return [(replica, version, len(list(same))) for version, same in groupby(versions)]


class RequestSpans:
    """The spans of a service's requests: of conversations that are noted, and of those that follow a record.

    Args:
        version: of the weights that the service samples with.
    """

    def __init__(self, version: Callable[[], int]):
        self._version = version
        self._noted: dict[str, dict[str, Notes]] = {}
        self._spans: dict[str, Draws] = {}
        self._follows: set[str] = set()
        self._drawn: dict[str, int] = {}
        self._work: dict[str, asyncio.Future[Completion]] = {}
        """Requests that follow spans, until their conversation is over."""
        self._change = ChangeEvent()

    def note(self, conversations: Sequence[str]) -> None:
        """Note the requests of these conversations (``<uid>-<sample>``) from here on."""
        self._noted |= {name: {} for name in conversations}

    def notes(self, conversations: Sequence[str]) -> dict[str, Notes]:
        """Request -> its notes, of these conversations, which are noted no longer."""
        ended = {*conversations}
        for name in [name for name in self._work if _conversation(name) in ended]:
            self._work.pop(name).cancel()
        return {name: notes for prefix in conversations for name, notes in self._noted.pop(prefix, {}).items()}

    def follow(self, conversations: Sequence[str], spans: Mapping[str, Draws]) -> None:
        """The requests of these conversations draw what the spans say; one that has none there is an error."""
        self._follows |= set(conversations)
        self._spans |= spans

    async def until_drawn(self, counts: Mapping[str, int]) -> None:
        """Return once each of these requests has as many tokens."""
        while any(self._drawn.get(name, 0) < count for name, count in counts.items()):
            await self._change.wait()

    def has(self, request: Request) -> bool:
        """Whether the request follows spans."""
        return _conversation(request.id) in self._follows

    async def follow_up(self, request: Request, serve: Serve) -> Completion:
        """The answer to a request that follows spans.

        Args:
            serve: samples a request, with whatever weights there are.
        """
        work = self._work.get(request.id)
        if work is None:
            if request.id not in self._spans:
                raise ReplayError(
                    f"request {request.id} is one that the recorded run did not make",
                    fix="Its agent loop, tools or environment went on in another way than then; without "
                    "trainer.replay_from the run decides itself.",
                )
            work = asyncio.ensure_future(self._follow(request, self._spans.pop(request.id), serve))
            self._work[request.id] = work
        # Where the process of its loop was lost, the request comes again, when its weights may be gone: it gets the
        # answer to the first one, which continues even if its waiters are cancelled.
        return await asyncio.shield(work)

    async def _follow(self, request: Request, spans: Draws, serve: Serve) -> Completion:
        parts: list[Completion] = []
        counts = list(spans.counts)
        if spans.tokens:
            parts.append(_taken(request, spans))
            self.add("", parts[0])
            counts = counts[len(_covered(spans)) :]
            request = continued(request, parts[0])
            self._drew(request)
        for number, (version, count) in enumerate(counts, start=1):
            await self._has(version, request)
            is_last = number == len(counts)
            part = await serve(request if is_last else _at_most(request, count))
            drew, end = [span[1:] for span in spans_of("", part.token_versions)], spans.finish if is_last else "length"
            if drew != [(version, count)] or part.finish_reason != end:
                raise ReplayError(f"request {request.id} drew (version, tokens) {drew} and ended with "
                                  f"{part.finish_reason}; the recorded run drew {(version, count)}, ended with "
                                  f"{end}")  # fmt: skip
            parts.append(part)
            request = continued(request, part)
            self._drew(request)
        return join_attempts(parts)

    async def _has(self, version: int, request: Request) -> None:
        """Return once the service has these weights."""
        while self._version() < version:
            await self._change.wait()
        if self._version() > version:
            raise ReplayError(f"request {request.id} is to draw tokens of version {version}, and the weights are "
                              f"those of version {self._version()}")  # fmt: skip

    def published(self) -> None:
        """The service has other weights."""
        self._change.tell()

    def add(self, replica: str, done: Completion) -> None:
        """A replica (empty: the record) answered an attempt."""
        noted = self._noted.get(_conversation(done.request_id))
        if noted is not None:
            notes = noted.setdefault(done.request_id, Notes([]))
            notes.spans += spans_of(replica, done.token_versions)
            notes.finish = done.finish_reason

    def restart(self, request: Request) -> None:
        """A request that comes again restarts its conversation: the process of its agent loop was lost."""
        noted = self._noted.get(_conversation(request.id), {})
        if request.id in noted:
            for name in [name for name in noted if _turn(name) >= _turn(request.id)]:
                del noted[name]

    def _drew(self, request: Request) -> None:
        self._drawn[request.id] = len(request.generated_prefix)
        self._change.tell()


def _conversation(request_id: str) -> str:
    return request_id.rpartition("-")[0]


def _turn(request_id: str) -> int:
    return int(request_id.rpartition("-")[2])


def _covered(spans: Draws) -> list[tuple[int, int]]:
    """The spans whose tokens are given."""
    covered, left = [], len(spans.tokens)
    for version, count in spans.counts:
        if left <= 0:
            break
        covered.append((version, count))
        left -= count
    return covered


def _taken(request: Request, spans: Draws) -> Completion:
    """The tokens that are given, as the completion of the attempts that drew them."""
    versions = tuple(version for version, count in _covered(spans) for _ in range(count))
    return Completion(request.id, spans.tokens, spans.log_probs, spans.finish, versions)  # type: ignore[arg-type]


def _at_most(request: Request, count: int) -> Request:
    """The request with room for ``count`` further tokens."""
    room = len(request.generated_prefix) + count
    shortest = min(request.sampling.min_tokens, room)
    return replace(request, sampling=replace(request.sampling, max_tokens=room, min_tokens=shortest))
