"""Retries, the circuit breaker, and HTTP on the wire."""

from __future__ import annotations

import asyncio
import gc
import threading

import pytest

from tests.harness.servers import Hangup, completion, raw, serving
from tests.harness.waiting import wait_until
from verl.errors import RolloutError
from verl.rollout.lost import EngineBusyError, EngineLostError
from verl.rollout.server.client import Breaker, HttpClient, Retrying, checked_json
from verl.serving import HttpResponse, Server, ServerLimits
from verl.serving.client import _OPEN, Client, Reply, ServerBusyError, WireError


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


async def echo(request):
    return HttpResponse(request.json())


@pytest.fixture
def pauses(monkeypatch):
    """Every pause, none of which is waited for."""
    found = []

    async def sleep(seconds):
        found.append(seconds)

    monkeypatch.setattr("verl.rollout.server.client.asyncio.sleep", sleep)
    return found


def attempts(*outcomes):
    left = list(outcomes)

    async def attempt():
        outcome = left.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    return attempt


def test_pauses_grow_and_are_of_random_length(pauses):
    lost = [EngineLostError("gone")] * 4
    for _ in range(20):
        assert asyncio.run(Retrying(5, 2.0, Breaker(threshold=99)).run(attempts(*lost, "there"))) == "there"
    for number, usual in enumerate((2.0, 4.0, 8.0, 16.0)):
        found = pauses[number::4]
        assert all(usual * 0.5 <= pause <= usual * 1.5 for pause in found) and len(set(found)) == 20


def test_no_pause_is_longer_than_half_a_minute_and_a_server_may_ask_for_longer_ones(pauses):
    asyncio.run(Retrying(9, 2.0, Breaker(threshold=99)).run(attempts(*[EngineLostError("gone")] * 8, 1)))
    assert max(pauses) == 30.0
    pauses.clear()
    asyncio.run(Retrying(2, 0.01).run(attempts(EngineBusyError("later", got=7.0), 1)))
    assert pauses == [7.0]


def test_the_last_failure_is_the_error_with_the_number_of_attempts(pauses):
    with pytest.raises(EngineLostError, match=r"second \(tried 2 times\)"):
        asyncio.run(Retrying(2, 0.1).run(attempts(EngineLostError("first"), EngineLostError("second"))))


def test_a_refusal_is_final_and_shows_that_the_server_lives(pauses):
    retrying = Retrying(3, 0.1, Breaker(threshold=2))
    with pytest.raises(EngineLostError):
        asyncio.run(Retrying(1, 0.1, retrying.breaker).run(attempts(EngineLostError("x"))))
    with pytest.raises(RolloutError, match="too long"):
        asyncio.run(retrying.run(attempts(RolloutError("too long"))))
    assert not retrying.breaker.is_open and not pauses


def test_an_open_breaker_lets_one_request_try_after_its_cooldown():
    clock = Clock()
    breaker = Breaker(threshold=2, cooldown=10.0, clock=clock)
    breaker.failed()
    assert breaker.seconds_to_wait() == 0
    breaker.failed()
    assert breaker.is_open and breaker.seconds_to_wait() == 10.0
    clock.now += 10.0
    assert breaker.seconds_to_wait() == 0, "one may try"
    assert breaker.seconds_to_wait() == 10.0, "the others wait for what becomes of it"
    breaker.failed()
    clock.now += 9.0
    assert breaker.seconds_to_wait() == 1.0
    breaker.succeeded()
    assert breaker.seconds_to_wait() == 0 and not breaker.is_open


def test_while_the_breaker_is_open_no_attempt_is_made(pauses):
    clock = Clock()
    breaker = Breaker(threshold=1, cooldown=5.0, clock=clock)
    breaker.failed()
    with pytest.raises(EngineLostError, match="left alone for a while"):
        asyncio.run(Retrying(2, 0.1, breaker).run(attempts()))
    assert len([pause for pause in pauses if pause >= 5.0]) == 2


def test_who_makes_one_attempt_only_does_not_wait_for_an_open_breaker(pauses):
    breaker = Breaker(threshold=1, cooldown=5.0, clock=Clock())
    breaker.failed()
    with pytest.raises(EngineLostError, match="left alone for a while"):
        asyncio.run(Retrying(1, 0.1, breaker).run(attempts()))
    assert pauses == []


@pytest.mark.parametrize("status", [408, 429, 500, 503])
def test_these_answers_are_asked_again(status):
    with pytest.raises(EngineLostError, match=f"there answered {status}: ill"):
        checked_json(Reply(status, {}, b'{"error": {"message": "ill"}}'), "there")


def test_a_server_with_too_many_connections_is_busy_and_no_impostor():
    async def run():
        limits = ServerLimits(connections=2)
        here = Server({("POST", "/a"): echo}, lambda token: token == "k" or None, limits, key="k")
        await here.start()
        try:
            known, new = (HttpClient(here.address, key="k") for _ in range(2))
            await known.ask("POST", "/a", {})  # its connection stays open
            lines = [await asyncio.open_connection("127.0.0.1", here.port) for _ in range(2)]
            await asyncio.to_thread(wait_until, lambda: len(here.connections) == 3)
            for work in (known.ask("POST", "/a", {}), new.ask("POST", "/a", {}), new.proves("k")):
                with pytest.raises(EngineBusyError, match="as many connections as it takes"):
                    await work
            for _, writer in lines:
                writer.close()
            await asyncio.to_thread(wait_until, lambda: not here.connections)
            return [(await client.ask("POST", "/a", {"n": 1})).json() for client in (known, new)]
        finally:
            await here.close()

    assert asyncio.run(run()) == [{"n": 1}] * 2


@pytest.mark.parametrize(("status", "kind"), [(503, ServerBusyError), (200, WireError), (429, WireError)])
def test_nothing_but_the_503_of_an_unsigned_answer_is_used(status, kind):
    async def run(server):
        client = Client(server.url, key="k")
        client._pool().run = "r"  # as if the server had proved its key
        with pytest.raises(WireError) as caught:
            await client.ask("POST", "/a", {})
        assert type(caught.value) is kind and "ill" not in str(caught.value) and client._pool().run is None

    with serving({"/a": raw(status, {"error": "ill"}, **{"retry-after": "9999"})}) as server:
        asyncio.run(run(server))


def test_the_seconds_that_a_busy_server_asks_for_are_read():
    with pytest.raises(EngineBusyError) as caught:
        checked_json(Reply(503, {"retry-after": "12"}), "there")
    assert caught.value.got == 12.0


def test_a_connection_is_used_again_unless_the_server_closes_it():
    async def run(client):
        for _ in range(3):
            assert (await client.ask("GET", "/a", timeout=60)).status == 200

    with serving({"/a": (200, {})}) as server:
        asyncio.run(run(HttpClient(server.url)))
        assert server.num_connections == 1
    with serving({"/a": raw(200, {}, connection="close")}) as server:
        asyncio.run(run(HttpClient(server.url)))
        assert server.num_connections == 3


def test_no_connection_outlives_its_event_loop_and_nothing_complains(caplog, recwarn):
    with serving({"/a": (200, {})}) as server:
        client = HttpClient(server.url)
        for _ in range(2):
            assert asyncio.run(client.ask("GET", "/a", timeout=60)).status == 200
        del client
        gc.collect()
    assert server.num_connections == 2 and not caplog.records and not recwarn.list


def test_a_client_in_a_cycle_closes_its_connections_when_it_is_collected(caplog):
    """While its event loop runs, as that of a run in one process does."""
    loop, others = asyncio.new_event_loop(), set(_OPEN)
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        with serving({"/a": (200, {})}) as server:
            for _ in range(5):
                client = HttpClient(server.url)
                reply = asyncio.run_coroutine_threadsafe(client.ask("GET", "/a", timeout=60), loop).result()
                assert reply.status == 200 and len(set(_OPEN) - others) == 1
                client.cycle = client
                del client
                gc.collect()
                wait_until(lambda: not set(_OPEN) - others)
            assert server.num_connections == 5
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
    assert not caplog.records


def test_no_more_connections_are_open_than_allowed():
    open_now, most = 0, 0

    async def answer():
        nonlocal open_now, most
        open_now += 1
        most = max(most, open_now)
        while most < 3:
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.02)  # for a fourth, if there were one
        open_now -= 1
        return completion()

    async def run(client):
        return await asyncio.gather(*(client.ask("POST", "/a", {}, 60) for _ in range(12)))

    with serving({"/a": lambda payload: answer()}) as server:
        assert len(asyncio.run(run(HttpClient(server.url, max_connections=3)))) == 12
    assert most == 3


def answered(data: bytes):
    """What a client makes of these bytes."""
    with serving({"/a": Hangup(data)}) as server:
        return asyncio.run(Client(server.url).ask("GET", "/a"))


def test_bodies_with_a_length_in_chunks_and_up_to_the_end_of_the_connection():
    assert answered(raw(200, "body")).body == b'"body"'
    chunked = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4;x=y\r\nbody\r\n1\r\n!\r\n0\r\n\r\n"
    assert answered(chunked).body == b"body!"
    assert answered(b"HTTP/1.0 200 OK\r\n\r\nall of it").body == b"all of it"


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"HTTP/1.1 2",
        b"SSH-2.0-OpenSSH\r\n\r\n",
        b"HTTP/1.1 abc\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nno colon\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 99\r\n\r\nshort",
        b"HTTP/1.1 200 OK\r\ncontent-length: 99999999999\r\n\r\n",
        "HTTP/1.1 200 OK\r\ncontent-length: ²\r\n\r\n".encode("latin-1"),
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n-1\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nffffffffff\r\n",
    ],
)
def test_what_is_no_whole_message_is_an_error_and_nothing_else(data):
    with pytest.raises(WireError):
        answered(data)
