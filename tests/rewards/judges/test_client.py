"""A judge's client against a real HTTP server: what it sends, keeps, spends, repeats and gives up."""

from __future__ import annotations

import asyncio
import errno
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.harness.judges import PATH
from tests.harness.servers import Hangup, Silence, raw, serving
from tests.harness.waiting import wait_until
from verl.errors import ConfigError
from verl.rewards.judges import JudgeBudgetError, JudgeClient, JudgeError, JudgeReply, JudgeVerdictError
from verl.rewards.scoring import SAMPLE_TIMEOUT


def says(text: object = "fine", tokens: object = 7, reason: str = "stop", status: int = 200):
    """What an OpenAI-compatible server answers."""
    choice = {"message": {"role": "assistant", "content": text}, "finish_reason": reason}
    return status, {"choices": [choice], "usage": {"total_tokens": tokens}}


BUSY = raw(429, {"error": "slow down"})


async def test_a_request_has_prompt_model_and_options():
    with serving({f"/secret/judges{PATH}": says()}) as server:
        address = f"127.0.0.1:{server.port}/secret/judges/"
        client = JudgeClient(address, "m", api_key="k1", options={"seed": 3, "max_tokens": 5})
        assert await client.ask("Is it?") == JudgeReply("fine", 1, 7)
    ((_, _, body),) = server.seen
    message = {"role": "user", "content": "Is it?"}
    assert body == {"model": "m", "temperature": 0.0, "max_tokens": 5, "seed": 3, "messages": [message]}
    assert server.headers[0]["authorization"] == "Bearer k1"


@pytest.mark.parametrize("end", ["", "/", "/v1", "/v1/", PATH])
async def test_an_address_may_end_as_openai_writes_it(end):
    with serving({PATH: says()}) as server:
        assert (await JudgeClient(server.url + end).ask("a")).text == "fine"


async def test_the_same_prompt_is_sent_once():
    with serving({PATH: [says("first"), says("second"), says("third")]}) as server:
        client = JudgeClient(server.url, max_cached=1)
        assert await client.ask("a") == JudgeReply("first", 1, 7)
        assert await client.ask("a") == JudgeReply("first", 0, 0)
        assert (await client.ask("b")).text == "second", "for which the reply to a is dropped"
        assert (await client.ask("a")).text == "third"
        assert (client.calls, client.tokens) == (3, 21)
        assert (await JudgeClient(server.url, options={"seed": 1}).ask("a")).text == "third"
    assert server.count(PATH) == 4, "other settings are another request"


def test_samples_of_two_event_loops_share_one_request():
    go_on = threading.Event()

    async def late():
        await asyncio.to_thread(go_on.wait)
        return says("late")

    with serving({PATH: lambda payload: late()}) as server, ThreadPoolExecutor(2) as threads:
        client = JudgeClient(server.url)

        async def both():
            return await asyncio.gather(client.ask("a"), client.ask("a"))

        loops = [threads.submit(asyncio.run, both()) for _ in range(2)]
        wait_until(lambda: server.count(PATH) == 1)
        go_on.set()
        replies = [reply for loop in loops for reply in loop.result()]
    assert server.count(PATH) == 1 and sorted(reply.calls for reply in replies) == [0, 0, 0, 1]
    assert {reply.text for reply in replies} == {"late"}


async def test_a_sample_that_is_cancelled_leaves_its_prompt_to_others():
    with serving({PATH: [Silence(), says("again")]}) as server:
        client = JudgeClient(server.url)
        first, second = (asyncio.ensure_future(client.ask("a")) for _ in range(2))
        await asyncio.to_thread(wait_until, lambda: server.count(PATH) == 1)
        first.cancel()
        assert await second == JudgeReply("again", 1, 7)
        assert first.cancelled()


@pytest.mark.parametrize("fault", [BUSY, raw(500, {}), raw(503, {}), Hangup(), Hangup(b"HTTP/1.1 200 X\r\ncon")])
async def test_a_busy_or_broken_server_is_tried_again(fault):
    with serving({PATH: [fault, fault, says()]}) as server:
        client = JudgeClient(server.url, retry_seconds=0.001)
        assert await client.ask("a") == JudgeReply("fine", 3, 7)
        assert client.calls == 3, "requests that were repeated count"


async def test_waits_double_and_a_server_can_lengthen_them(monkeypatch):
    waits: list[float] = []

    async def note(seconds, *rest):
        waits.append(seconds)
        loop = asyncio.get_running_loop()
        turn = loop.create_future()
        loop.call_soon(turn.set_result, None)  # others have their turn, as in a real wait
        await turn

    monkeypatch.setattr("verl.rewards.judges.client.asyncio.sleep", note)
    longer = raw(429, {}, **{"retry-after": "20"})
    with serving({PATH: [BUSY, BUSY, BUSY, longer, says()]}) as server:
        await JudgeClient(server.url, retry_seconds=2.0).ask("a")
    monkeypatch.undo()
    assert [1 <= waits[0] <= 2, 2 <= waits[1] <= 4, 4 <= waits[2] <= 8, waits[3] == 20.0] == [True] * 4


async def test_a_refused_request_is_not_repeated():
    with serving({PATH: says(status=401)}) as server, pytest.raises(JudgeError, match="status 401"):
        await JudgeClient(server.url).ask("a")
    assert server.count(PATH) == 1


@pytest.mark.parametrize("answer", [Silence(), BUSY, Hangup()])
async def test_a_judge_without_a_reply_in_time_is_an_error(answer):
    with serving({PATH: answer}) as server, pytest.raises(JudgeError, match=r"no reply within 0\.3 s, in [1-9]"):
        await JudgeClient(server.url, timeout=0.3, retry_seconds=0.01).ask("a")


async def test_a_wait_beyond_the_deadline_is_not_begun():
    patient = raw(429, {}, **{"retry-after": "3600"})
    with serving({PATH: patient}) as server, pytest.raises(JudgeError, match="in 1 attempts; status 429"):
        await JudgeClient(server.url).ask("a")


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ((200, {"choices": []}), "in the form of OpenAI"),
        ((200, ["no"]), "in the form of OpenAI"),
        (b"HTTP/1.1 200 X\r\ncontent-length: 2\r\n\r\n{]", "in the form of OpenAI"),
    ],
)
async def test_an_unusable_reply_is_an_error_and_is_not_kept(answer, words):
    with serving({PATH: [answer, says("better")]}) as server:
        client = JudgeClient(server.url)
        with pytest.raises(JudgeError, match=words) as raised:
            await client.ask("a")
        assert not isinstance(raised.value, JudgeVerdictError), "the server is at fault, not the text"
        assert (await client.ask("a")).text == "better"


def refuses(message: str, status: int = 400, code: object = None):
    return raw(status, {"error": {"message": message, "code": code}})


@pytest.mark.parametrize(
    ("answer", "words", "tokens"),
    [
        (says(""), "is empty", 7),
        (says(" \n"), "is empty", 7),
        (says(None), "is empty", 7),
        (says("VERDICT: 10", reason="length"), "was cut", 7),
        (refuses("It is used up.", code="context_length_exceeded"), "refuses the text with status 400", 0),
        (refuses("This model's maximum context length is 64 tokens."), "refuses the text", 0),
        (refuses("The input (99 tokens) is longer than the model's context length."), "refuses the text", 0),
        (refuses("`inputs` tokens + `max_new_tokens` must be <= 64. Given: 99", 422), "refuses the text", 0),
        (refuses("The response was filtered", code="content_filter"), "refuses the text", 0),
        (refuses("no", 413), "refuses the text", 0),
    ],
)
async def test_a_text_that_leaves_no_verdict_is_an_error_of_its_kind(answer, words, tokens):
    with serving({PATH: [answer, says("better")]}) as server:
        client = JudgeClient(server.url)
        first, second = await asyncio.gather(client.ask("a"), client.ask("a"), return_exceptions=True)
        assert isinstance(first, JudgeVerdictError) and isinstance(second, JudgeVerdictError)
        assert words in str(first) and words in str(second)
        assert (first.calls, first.tokens, second.calls, second.tokens) == (1, tokens, 0, 0), "counted once"
        assert (await client.ask("a")).text == "better"


@pytest.mark.parametrize("fault", [refuses("max_tokens is too large: 9"), refuses("no such model", 404)])
async def test_a_refusal_of_the_settings_is_none_of_the_text(fault):
    with serving({PATH: fault}) as server, pytest.raises(JudgeError, match="refuses the request") as raised:
        await JudgeClient(server.url).ask("a")
    assert not isinstance(raised.value, JudgeVerdictError)


async def test_a_connect_that_times_out_is_tried_again(monkeypatch):
    with serving({PATH: says()}) as server:
        client = JudgeClient(server.url, retry_seconds=0.001)
        exchange, faults = client._client._exchange, [TimeoutError(errno.ETIMEDOUT, "Connection timed out")]

        async def lossy(*request):
            if faults:
                raise faults.pop()
            return await exchange(*request)

        monkeypatch.setattr(client._client, "_exchange", lossy)
        assert await client.ask("a") == JudgeReply("fine", 2, 7)


@pytest.mark.parametrize(
    ("budget", "shown"),
    [
        ({"budget_calls": 2}, "budget_calls: the judge's budget is used up: 2 of 2"),
        ({"budget_tokens": 13}, "budget_tokens: the judge's budget is used up: 14 of 13"),
        ({"budget_cost": 0.028, "price": 2.0}, "budget_cost: the judge's budget is used up: 0.028 of 0.028"),
    ],
)
async def test_a_budget_that_is_used_up_ends_requests_but_not_the_cache(budget, shown):
    with serving({PATH: says()}) as server:
        client = JudgeClient(server.url, **budget)
        await client.ask("a")
        await client.ask("b")
        with pytest.raises(JudgeBudgetError) as raised:
            await client.ask("c")
        assert shown in str(raised.value)
        assert await client.ask("a") == JudgeReply("fine", 0, 0)
        assert client.cost == pytest.approx(0.014 * budget.get("price", 0.0))
    assert server.count(PATH) == 2


async def test_retries_use_the_budget_up_too():
    with serving({PATH: BUSY}) as server, pytest.raises(JudgeBudgetError):
        await JudgeClient(server.url, budget_calls=3, retry_seconds=0.001).ask("a")
    assert server.count(PATH) == 3


async def test_a_budget_of_tokens_needs_a_server_that_counts_them():
    with serving({PATH: says(tokens=None)}) as server:
        assert await JudgeClient(server.url).ask("a") == JudgeReply("fine", 1, 0)
        with pytest.raises(JudgeError, match="does not count tokens"):
            await JudgeClient(server.url, budget_tokens=100).ask("a")


async def test_as_many_requests_as_are_allowed_are_at_the_server():
    now, most = [0], [0]
    meeting = asyncio.Barrier(2)

    async def answer():
        now[0] += 1
        most[0] = max(most[0], now[0])
        await meeting.wait()  # alone at the server, a request would stay for ever
        now[0] -= 1
        return says()

    with serving({PATH: lambda payload: answer()}) as server:
        client = JudgeClient(server.url, max_concurrent=2)
        await asyncio.gather(*(client.ask(str(i)) for i in range(12)))
    assert most[0] == 2 and server.count(PATH) == 12


@pytest.mark.parametrize(
    ("address", "settings", "words"),
    [
        (None, {}, "needs the address"),
        ("ftp://h", {}, "not the address of a server"),
        ("h:1", {"budget_cost": 1.0}, "needs the price"),
        ("h:1", {"max_concurrent": 0}, "max_concurrent: out of range. Got 0. Allowed: 1 or more"),
        ("h:1", {"budget_calls": -1}, "budget_calls: out of range. Got -1. Allowed: 0 or more"),
        ("h:1", {"budget_tokens": -1.0}, "budget_tokens: out of range"),
        ("h:1", {"budget_cost": float("nan"), "price": 1.0}, "budget_cost: out of range. Got nan"),
        ("h:1", {"price": -1.0}, "price: out of range"),
        ("h:1", {"max_cached": -1}, "max_cached: out of range"),
        ("h:1", {"retry_seconds": -1}, "retry_seconds: out of range"),
        ("h:1", {"timeout": 0}, "timeout: out of range. Got 0. Allowed: above 0"),
    ],
)
def test_a_client_that_cannot_work_is_refused(address, settings, words):
    with pytest.raises(ConfigError, match=words):
        JudgeClient(address, **settings)


def test_a_client_gives_up_before_the_call_that_waits_for_it():
    assert JudgeClient("h:1").timeout < SAMPLE_TIMEOUT
