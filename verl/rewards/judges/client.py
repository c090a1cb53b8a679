"""Requests to a judge: cached, a few at once, repeated while its server is busy, and within a budget.

Left out on purpose: reading a verdict (`verl.rewards.judges.verdicts`), and starting the judge's server.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import random
import re
import threading
from collections import OrderedDict
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Literal

from verl.errors import ConfigError, RewardError
from verl.json_text import Json, JsonObject
from verl.outcomes import on_error
from verl.rewards.gate import CallGate
from verl.serving.client import LONGEST_DELAY, Client, Reply, WireError

SHOWN = 300
"""Characters of a refusal that an error shows."""
OF_TEXT = re.compile(
    rb"context.?(length|size|window)|too long|`inputs` (tokens|must have)|content.?(filter|management)", re.IGNORECASE
)
"""In a refusal of a prompt that is too long (OpenAI, vLLM, SGLang, TGI, llama.cpp, ours) or that a filter rejects."""


class JudgeError(RewardError):
    """The judge could not be used: its server, its settings or its budget are at fault. The sample has no score."""


class JudgeVerdictError(JudgeError):
    """The judge read the text and gave no verdict in form, or its server refuses the text. A policy can cause that.

    Attributes:
        calls, tokens: what the reply took, where no `JudgeReply` says it.
    """

    calls = tokens = 0

    def spending(self, calls: int, tokens: int = 0) -> JudgeVerdictError:
        """The same error with what the reply took."""
        error = JudgeVerdictError(self.message, key=self.key, got=self.got, allowed=self.allowed, fix=self.fix)
        error.calls, error.tokens = calls, tokens
        return error


class JudgeBudgetError(JudgeError):
    """The client has spent what it may spend."""


@dataclass(frozen=True)
class JudgeReply:
    """What the judge wrote, and what that took: nothing if it comes from the cache.

    Args:
        calls: requests, repeated ones included.
        tokens: of prompt and reply, as the server counts them.
    """

    text: str
    calls: int = 0
    tokens: int = 0


class JudgeClient:
    """A language model at an OpenAI-compatible address. Safe between threads and event loops.

    Make one per reward file: cache, budget and places are the client's. They hold for a run, which calls its async
    reward function in one process; a resumed run begins with them empty. With the managers ``prime`` and ``remote``,
    and in a function that is no coroutine, each child process has a client, and each its cache, budget and places.

    Args:
        address: ``reward_router_address``, or a URL such as ``https://api.openai.com/v1``.
        model: the name in requests.
        api_key: sent as a bearer token.
        options: further fields of requests; they replace ``temperature`` 0 and ``max_tokens`` 1024.
        timeout: seconds for a reply, all attempts together, not counting the wait for a place. Keep it below
            ``reward.timeout``, which ends the call with everything in it.
        max_concurrent: requests at once; the wait for a place uses up ``reward.timeout``. That for one of
            ``reward.max_concurrent`` does not.
        max_cached: replies that are stored; the least recently used one is dropped.
        budget_calls: most requests, repeated ones included.
        budget_tokens: tokens of prompts and replies after which no request is sent; requests in flight still count.
        budget_cost: the same in the currency of ``price``.
        price: of 1,000 tokens.
        retry_seconds: the longest wait before the second attempt; it doubles with each further one.

    Raises:
        ConfigError: no address, a number out of range, or a budget of costs without a price.
    """

    def __init__(
        self,
        address: str | None,
        model: str = "judge",
        *,
        api_key: str | None = None,
        options: JsonObject | None = None,
        timeout: float = 25.0,
        max_concurrent: int = 256,
        max_cached: int = 10_000,
        budget_calls: int | None = None,
        budget_tokens: float | None = None,
        budget_cost: float | None = None,
        price: float | None = None,
        retry_seconds: float = 1.0,
    ):
        if not address:
            fix = "Set reward.reward_model.enable=true and its rollout, or give the URL of a server."
            raise ConfigError("a judge needs the address of its server", key="address", got=address, fix=fix)
        if budget_cost is not None and not price:
            raise ConfigError("a budget of costs needs the price of 1,000 tokens", key="price", got=price)
        _check("above 0", timeout=timeout)
        _check("0 or more", retry_seconds=retry_seconds, max_cached=max_cached, price=price, budget_calls=budget_calls,
               budget_tokens=budget_tokens, budget_cost=budget_cost)  # fmt: skip
        _check("1 or more", max_concurrent=max_concurrent)
        url = address.rstrip("/").removesuffix("/chat/completions").removesuffix("/v1")
        headers = {"authorization": f"Bearer {api_key}"} if api_key else None
        self._client = Client(url, max_concurrent, headers, setting="address")
        self._options: JsonObject = {"model": model, "temperature": 0.0, "max_tokens": 1024, **(options or {})}
        self.timeout, self.max_cached, self.retry_seconds = timeout, max_cached, retry_seconds
        self.budget_calls, self.budget_tokens, self.budget_cost = budget_calls, budget_tokens, budget_cost
        self.price, self.calls, self.tokens = price or 0.0, 0, 0
        self._gate, self._random = CallGate(max_concurrent), random.Random()
        # Threads whose event loops judge; held for a change of cache and counters, never while waiting.
        self._lock = threading.Lock()
        self._replies: OrderedDict[str, Future[JudgeReply | None]] = OrderedDict()

    @property
    def cost(self) -> float:
        """Spent until now, in the currency of ``price``."""
        return self.tokens * self.price / 1000

    async def ask(self, prompt: str) -> JudgeReply:
        """The judge's reply to a prompt; the same prompt is sent once, also by several samples at the same time.

        Raises:
            JudgeVerdictError: an empty or cut reply, or a prompt that is too long or filtered.
            JudgeBudgetError: the budget is used up. JudgeError: no reply in time, or another refusal.
        """
        body = {**self._options, "messages": [{"role": "user", "content": prompt}]}
        key = _digest(body)
        while True:
            with self._lock:
                stored = self._replies.get(key)
                if stored is None:
                    pending = self._replies[key] = Future()
                    pending.set_running_or_notify_cancel()  # a sample that waits for it cannot cancel it
                self._replies.move_to_end(key)
                while len(self._replies) > self.max_cached:
                    self._replies.popitem(last=False)
            if stored is None:
                return await self._first(key, pending, body)
            reply = await asyncio.wrap_future(stored)
            if reply is not None:  # else the sample that sent the prompt was cancelled
                return replace(reply, calls=0, tokens=0)

    async def _first(self, key: str, pending: Future[JudgeReply | None], body: JsonObject) -> JudgeReply:
        """Send a prompt that no other sample has sent."""

        def give_up(error: BaseException) -> None:
            with self._lock:
                if self._replies.get(key) is pending:
                    del self._replies[key]
            if isinstance(error, JudgeVerdictError):
                pending.set_exception(error.spending(0))
            elif isinstance(error, Exception):
                pending.set_exception(error)
            else:
                pending.set_result(None)

        with on_error(give_up):
            place = self._gate.place()
            try:
                await place.reached()
                reply = await self._requested(body)
            finally:
                place.free()
        pending.set_result(reply)
        return reply

    async def _requested(self, body: JsonObject) -> JudgeReply:
        """The reply after as many attempts as there is time for."""
        clock = asyncio.get_running_loop().time
        end, calls, failure = clock() + self.timeout, 0, "it did not answer"
        for attempt in itertools.count():
            self._begin_call()
            calls += 1
            delay = min(LONGEST_DELAY, self.retry_seconds * 2**attempt) * self._random.uniform(0.5, 1.0)
            try:
                reply = await self._client.ask("POST", "/v1/chat/completions", body, max(0.0, end - clock()))
            except (OSError, WireError) as error:
                if not isinstance(error, TimeoutError) or clock() < end:  # a connect may time out earlier
                    failure = f"{type(error).__name__}: {error}"
            else:
                if reply.status == 200:
                    return self._read(reply, calls)
                failure = f"status {reply.status}: {reply.body[:SHOWN].decode(errors='replace')}"
                if reply.status == 413 or (reply.status in (400, 422) and OF_TEXT.search(reply.body)):
                    fix = "If it is too long, raise the judge's context or lower data.max_response_length."
                    raise JudgeVerdictError(f"the judge refuses the text with {failure}", fix=fix).spending(calls)
                if reply.status != 429 and reply.status < 500:
                    raise JudgeError(f"the judge refuses the request with {failure}", fix="Check model and options.")
                delay = max(delay, reply.retry_after)
            if clock() + delay >= end:
                break
            await asyncio.sleep(delay)
        fix = "The judge's timeout sets the time, its max_concurrent how many requests share the server."
        raise JudgeError(f"the judge gave no reply within {self.timeout:g} s, in {calls} attempts; {failure}", fix=fix)

    def _begin_call(self) -> None:
        with self._lock:
            spent = (
                ("budget_calls", self.budget_calls, self.calls),
                ("budget_tokens", self.budget_tokens, self.tokens),
                ("budget_cost", self.budget_cost, self.cost),
            )
            for name, budget, used in spent:
                if budget is not None and used >= budget:
                    fix = f"Raise {name} of the JudgeClient. Samples without a verdict have no score."
                    raise JudgeBudgetError(f"the judge's budget is used up: {used:g} of {budget:g}", key=name, fix=fix)
            self.calls += 1

    def _read(self, reply: Reply, calls: int) -> JudgeReply:
        try:
            answer = reply.json()
            choice, usage = answer["choices"][0], answer.get("usage") or {}
            text, reason, tokens = choice["message"]["content"], choice.get("finish_reason"), usage.get("total_tokens")
        except (WireError, LookupError, TypeError, AttributeError) as error:
            shown = reply.body[:SHOWN].decode(errors="replace")
            raise JudgeError("the judge's server did not answer in the form of OpenAI's", got=shown) from error
        spent = tokens if isinstance(tokens, int) and tokens >= 0 else 0
        with self._lock:
            self.tokens += spent
        if not spent and (self.budget_tokens is not None or self.budget_cost is not None):
            raise JudgeError(
                "the judge's server does not count tokens, which a budget needs",
                key="usage.total_tokens", got=tokens, fix="Set budget_calls instead.",
            )  # fmt: skip
        if reason == "length":
            fix = "Raise options={'max_tokens': ...} of the JudgeClient."
            raise JudgeVerdictError("the judge's reply was cut before its verdict", fix=fix).spending(calls, spent)
        if not isinstance(text, str) or not text.strip():
            raise JudgeVerdictError("the judge's reply is empty", got=text).spending(calls, spent)
        return JudgeReply(text, calls, spent)


def _check(allowed: Literal["above 0", "0 or more", "1 or more"], **settings: float | None) -> None:
    least = 1 if allowed == "1 or more" else 0
    for key, value in settings.items():
        if value is not None and not (value > 0 if allowed == "above 0" else value >= least):
            raise ConfigError("out of range", key=key, got=value, allowed=allowed)


def _digest(value: Json) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
