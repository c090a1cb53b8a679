"""One conversation of an agent: checked requests become calls of the sampler, and what is delivered is recorded."""

from __future__ import annotations

import asyncio
import bisect
import inspect
import secrets
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from verl.agent_loop.batch import MOST_RESPONSES, MOST_TRAJECTORIES
from verl.agent_loop.client import SamplerClient, within_response
from verl.agent_loop.server.errors import ApiError, bad, refused, unknown_model
from verl.agent_loop.server.prompts import Located, Prompts
from verl.agent_loop.server.protocol import CompletionRequest
from verl.agent_loop.server.record import Answer, Record
from verl.errors import DataError, RolloutError
from verl.json_text import JsonObject, object_of
from verl.metrics import notice
from verl.rollout.base import Completion
from verl.rollout.lost import EngineLostError

ANY_MODEL = "*"


@dataclass(frozen=True)
class ToolCall:
    """A call as the client gets it; ``arguments`` is JSON text as far as the model wrote JSON."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class Choice:
    """One answer to a request, with what a client is shown of it; ``stop`` is the stop text that ended it."""

    answer: Answer
    text: str
    calls: tuple[ToolCall, ...]
    finish_reason: str
    stop: str | None = None


@dataclass(frozen=True)
class ModelReply:
    """All answers to a request; `Conversation.delivered` records them."""

    ask: CompletionRequest
    choices: tuple[Choice, ...]
    prompt_tokens: int


@dataclass(eq=False)
class Conversation:
    """What one agent samples under its own key.

    Args:
        client: the sampler as this trajectory sees it.
        sampling: parameters of the run.
        budget: most tokens after the first prompt.
        context: most tokens with the prompt; None: what the sampler takes.
        prompts: messages to tokens.
        models: names under which the policy is served; ``*`` takes any.
        follows_request: whether temperature, top_p, top_k and seed of a request count, or the run's own.
        limit: the setting that ``budget`` comes from, for messages.
        parser: finds tool calls in an answer: ``extract_tool_calls(token_ids, tools) -> (text, calls)``.
        key: what authorizes a client.
        responses: name of a response -> the messages up to and with it.
        trains_on_all: every branch is a row, so that they have limits together.
        in_flight: of each request that is sampled, its parent, the number of its answers and most tokens of these.
        is_full: a request was refused because nothing is left.
    """

    client: SamplerClient
    sampling: Mapping[str, Any]
    budget: int
    prompts: Prompts
    context: int | None = None
    models: tuple[str, ...] = ("policy",)
    follows_request: bool = False
    limit: str = "data.max_response_length"
    parser: Any = None
    key: str = field(default_factory=lambda: f"sk-verl-{secrets.token_hex(24)}")
    record: Record = field(default_factory=Record)
    lost: EngineLostError | None = None
    overridden: int = 0
    responses: dict[str, list[JsonObject]] = field(default_factory=dict)
    trains_on_all: bool = False
    in_flight: list[tuple[Answer | None, int, int]] = field(default_factory=list)
    is_full: bool = False

    @property
    def sees(self) -> bool:
        """Whether the model takes images."""
        return self.client.seen.processor is not None

    async def answer(self, ask: CompletionRequest) -> ModelReply:
        """Sample the answers to a request.

        Raises:
            ApiError: it cannot be followed, or the rollout is over.
        """
        prompt = self.prompt_of(ask)
        parent, inserted = prompt.parent, prompt.inserted
        parameters = self._parameters(ask, parent, len(inserted))
        before, seen = ((), []) if parent is None else (parent.tokens, parent.seen)
        reserved = (parent, ask.n, ask.n * (parameters["max_tokens"] + (len(inserted) if parent else 0)))
        self.in_flight.append(reserved)
        try:
            dones = await self._sample([*before, *inserted], [*seen, *prompt.images], parameters, ask.n)
            if any(done.finish_reason == "abort" for done in dones):
                raise ApiError(410, "The rollout has ended: enough samples of this batch are done.", "rollout_over")
            choices = [
                await self._choice(ask, Answer(parent, inserted, done, None, 0, images=prompt.images)) for done in dones
            ]
        finally:
            self.in_flight.remove(reserved)
        return ModelReply(ask, tuple(choices), prompt.length)

    def prompt_of(self, ask: CompletionRequest) -> Located:
        """The prompt of a request: images loaded, their placeholders expanded.

        Raises:
            ApiError: an unknown model, or messages that cannot be templated.
        """
        if ask.model not in self.models and ANY_MODEL not in self.models:
            raise unknown_model(ask.model, self.models)
        try:
            located = self.prompts.locate(ask, self.record)
            images = tuple(self.client.seen.load(located.images, "messages")) if located.images else ()
            inserted = tuple(self.client.seen.expanded(located.inserted, images))
        except (DataError, RolloutError) as error:
            raise bad("messages" if ask.messages is not None else "prompt", str(error)) from error
        return Located(located.parent, inserted, images)

    def delivered(self, reply: ModelReply) -> None:
        """Record answers that go to the client; what never arrives is no part of its conversation."""
        for choice in reply.choices:
            self.record.add(choice.answer)

    def undelivered(self, reply: ModelReply) -> None:
        """Forget answers whose client has gone before it got them: it will ask again."""
        for choice in reply.choices:
            self.record.drop(choice.answer)

    async def _sample(
        self, prompt: Sequence[int], images: Sequence[Any], parameters: Mapping[str, Any], n: int
    ) -> list[Completion]:
        def generate() -> Coroutine[Any, Any, Completion]:
            return self.client.generate("agent", prompt_ids=prompt, sampling_params=parameters, image_data=images)

        tasks = [asyncio.ensure_future(generate()) for _ in range(n)]
        try:
            return list(await asyncio.gather(*tasks))
        except EngineLostError as error:
            self.lost = error
            raise ApiError(503, "The sampler is gone; the rollout has ended.", "sampler_lost") from error
        except RolloutError as error:
            raise refused(error) from error
        finally:
            for task in tasks:
                task.cancel()

    def _parameters(self, ask: CompletionRequest, parent: Answer | None, inserted: int) -> dict[str, Any]:
        used = 0 if parent is None else parent.response_length + inserted
        left = self.budget - used
        if self.context is not None:
            before = inserted if parent is None else len(parent.tokens) + inserted
            left = min(left, self.context - before)
        if self.trains_on_all:
            left = min(left, self._left_of_all(ask.n, parent, inserted))
        if ask.max_tokens is not None and ask.max_tokens > self.budget:
            raise bad("max_tokens", f"max_tokens={ask.max_tokens} is more than the {self.budget} tokens that a whole "
                      f"rollout may have after its first prompt ({self.limit}).")  # fmt: skip
        if left < 1:
            context = "" if self.context is None else f" of {self.context}"
            most = f", or its {MOST_TRAJECTORIES} branches, or their {MOST_RESPONSES * self.budget} tokens"
            context += most if self.trains_on_all else ""
            self.is_full = True
            raise ApiError(
                400,
                f"This conversation has used up its {self.budget} tokens after the first prompt "
                f"({self.limit}; {used} are sampled or inserted), or the model's context length{context}.",
                "context_length_exceeded",
                "messages" if ask.messages is not None else "prompt",
            )
        parameters = {**within_response(self.sampling, used), "max_tokens": min(left, ask.max_tokens or left)}
        stops = [ids[0] for ids in map(self._ids, ask.stops) if len(ids) == 1]
        if ask.parses_calls and self.parser is not None:
            stops += self.parser.stop_token_ids
        if stops:
            parameters["stop_token_ids"] = tuple(stops)
        return {**parameters, **self._asked(ask)}

    def _left_of_all(self, n: int, parent: Answer | None, inserted: int) -> int:
        """Tokens that all branches have left for each of ``n`` answers; none where these would be too many branches.

        Requests in flight count with the most that they may sample.
        """
        leaves, answers, requests = self.record.leaves, self.record.answers, [*self.in_flight, (parent, n, 0)]
        ended = {one for one, *_ in requests}.intersection(leaves)
        if len(leaves) - len(ended) + sum(count for _, count, _ in requests) > MOST_TRAJECTORIES:
            return 0
        used = sum(len(one.done.token_ids) + (len(one.inserted) if one.parent else 0) for one in answers)
        used += sum(tokens for *_, tokens in requests)
        return (MOST_RESPONSES * self.budget - used) // n - (inserted if parent else 0)

    def _asked(self, ask: CompletionRequest) -> dict[str, Any]:
        """What of the request's own sampling counts."""
        if self.follows_request:
            return ask.sampling
        other = {k: v for k, v in ask.sampling.items() if k in self.sampling and self.sampling[k] != v}
        if other:
            self.overridden += 1
            named = ", ".join(f"{name}={value}" for name, value in sorted(other.items()))
            notice(
                "the agent's requests",
                f"ask for {named}; sampled is with the run's own settings, whose log-probs are trained on. "
                "sampling: request in the loop's YAML lets the requests decide.",
            )
        return {}

    def _ids(self, text: str) -> list[int]:
        return self.prompts.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

    async def _choice(self, ask: CompletionRequest, answer: Answer) -> Choice:
        answer.done, text, stop = cut_at(answer.done, ask.stops, self.prompts.text)
        done = answer.done
        calls: tuple[ToolCall, ...] = ()
        if ask.parses_calls and self.parser is not None:
            text, calls = await self._calls(done.token_ids, ask.tools, text)
        answer.key = self.prompts.key(ask, text, [(call.name, call.arguments) for call in calls])
        reason = "tool_calls" if calls and done.finish_reason == "stop" else done.finish_reason
        answer.num_messages = 2 * len(answer.path)
        if ask.messages is not None:
            answer.num_messages = sum(message["role"] != "system" for message in ask.messages) + 1
            answer.place = len(ask.messages)
            shown_calls = [(call.id, call.name, call.arguments) for call in calls]
            answer.message = self.prompts.message(done.token_ids, text, shown_calls)
        return Choice(answer, text, calls, reason, stop)

    async def _calls(self, tokens: Sequence[int], tools: Sequence[Any], text: str) -> tuple[str, tuple[ToolCall, ...]]:
        try:
            extracted = self.parser.extract_tool_calls(list(tokens), list(tools))
            rest, calls = await extracted if inspect.isawaitable(extracted) else extracted
        except Exception as error:  # boundary: a user's parser
            name = type(self.parser).__name__
            notice(f"the tool-call parser {name}", f"failed: {type(error).__name__}: {error}. The answer is its text.")
            return text, ()
        if not calls or not all(isinstance(object_of(str(call.arguments)), Mapping) for call in calls):
            return text, ()  # what looks like a broken call stays visible
        numbered = (ToolCall(f"call_{secrets.token_hex(12)}", str(call.name), str(call.arguments)) for call in calls)
        return rest, tuple(numbered)


def cut_at(
    done: Completion, stops: Sequence[str], text_of: Callable[[Sequence[int]], str]
) -> tuple[Completion, str, str | None]:
    """The completion up to the token that completes the first stop text, its text without that, and the stop text."""
    text = text_of(done.token_ids)
    places = [text.find(stop) for stop in stops]
    cuts = [(place, stop) for place, stop in zip(places, stops) if place >= 0]
    if not cuts:
        return done, text, None
    place, stop = min(cuts)
    end = place + len(stop)

    def is_complete(count: int) -> bool:
        return text_of(done.token_ids[:count])[:end] == text[:end]

    count = 1 + bisect.bisect_left(range(1, len(done.token_ids)), True, key=is_complete)
    cut = replace(
        done,
        token_ids=done.token_ids[:count],
        log_probs=done.log_probs[:count],
        token_versions=done.token_versions[:count],
        finish_reason="stop",
    )
    return cut, text[:place], stop
