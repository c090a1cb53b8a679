"""The one HTTP server: who gets in, how much one may take, and what becomes of those who come to do harm."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import stat
import threading
import time

import psutil
import pytest

from tests.harness.waiting import wait_until
from verl.errors import ConfigError
from verl.serving import HttpResponse, Server, ServerLimits, loopback, secret, unix
from verl.serving.client import Client, WireError
from verl.serving.listener import private_folder

KEY = "right"
WAIT = 45.0
"""Seconds for what happens at once unless something is broken; less than `visited` gives a visit."""
HEAD = f"POST /a HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {KEY}\r\n"


async def echo(asked):
    return HttpResponse(asked.json())


def server(**options) -> Server:
    return Server({("POST", "/a"): echo}, authorize=lambda token: token == KEY or None, **options)


def visited(visit, on=None, limits=None, **options):
    """What ``visit(server)`` returns in a thread of its own, while the server answers."""

    async def run():
        here = server(limits=limits or ServerLimits(), **options)
        await here.start(on)
        try:
            return await asyncio.wait_for(asyncio.to_thread(visit, here), 60)
        finally:
            await here.close()

    return asyncio.run(run())


def said(here: Server, data: bytes | str, ends: bool = False) -> bytes:
    """All that comes back for some bytes."""
    with socket.create_connection(("127.0.0.1", here.port), timeout=WAIT) as line:
        answer = b""
        try:
            line.sendall(data.encode("latin-1") if isinstance(data, str) else data)
            if ends:
                line.shutdown(socket.SHUT_WR)
            while piece := line.recv(1 << 16):
                answer += piece
        except OSError:  # a head that is too long may be ended by a reset
            if not ends:
                raise
        return answer


def works(here: Server) -> bool:
    answer = said(here, HEAD + "connection: close\r\ncontent-length: 2\r\n\r\n{}")
    return answer.startswith(b"HTTP/1.1 200") and answer.endswith(b"{}")


@pytest.mark.parametrize(
    "data",
    [
        b"\r\n\r\n",
        b"GET\r\n\r\n",
        b"\x00\xff\r\n\r\n",
        b"GET / HTTP/1.1\r\nno colon\r\n\r\n",
        HEAD + "content-length: ²\r\n\r\n",
        HEAD + "content-length: -1\r\n\r\n",
        HEAD + "content-length: 1e3\r\n\r\n",
        HEAD + "content-length: " + "9" * 5000 + "\r\n\r\n",
        HEAD + "content-length: 3\r\ncontent-length: 4\r\n\r\n",
        HEAD + "transfer-encoding: chunked, gzip\r\n\r\n",
        HEAD + "transfer-encoding: chunked\r\n\r\n-5\r\n",
        HEAD + "x: " + "y" * 200_000 + "\r\n\r\n",
        HEAD + "".join(f"x{i}: y\r\n" for i in range(20_000)) + "\r\n",
        HEAD + "upgrade: websocket\r\nconnection: upgrade\r\ncontent-length: 1\r\n\r\n[",
    ],
)
def test_what_is_no_request_gets_an_answer_and_the_next_one_is_served(data, caplog, capfd):
    def visit(here):
        answer = said(here, data, ends=True)
        assert not answer or answer.startswith((b"HTTP/1.1 400", b"HTTP/1.1 413", b"HTTP/1.1 501")), answer[:80]
        return works(here)

    assert visited(visit)
    assert not caplog.records and capfd.readouterr() == ("", ""), "strangers write no logs"


@pytest.mark.parametrize(
    "head, status",
    [
        ("host: evil.example\r\nauthorization: Bearer right\r\n", 403),
        ("host: localhost\r\norigin: http://localhost\r\nauthorization: Bearer right\r\n", 403),
        ("host: localhost\r\n", 401),
        ("host: localhost\r\nauthorization: Bearer wrong\r\n", 401),
        ("host: localhost\r\nauthorization: Basic right\r\n", 401),
        ("host: localhost\r\nauthorization: Bearer right\r\ncontent-length: 99999999999\r\n", 413),
    ],
)
def test_who_does_not_get_in_is_told_before_a_body_is_read_and_the_connection_ends(head, status):
    found = visited(lambda here: said(here, f"POST /a HTTP/1.1\r\n{head}\r\n"))
    assert found.startswith(f"HTTP/1.1 {status}".encode()) and b"connection: close" in found.lower()


def test_a_body_that_trickles_in_is_refused_and_its_sender_reads_why():
    found = visited(lambda here: said(here, HEAD + "content-length: 9\r\n\r\n{"), limits=ServerLimits(read_seconds=0.3))
    assert found.startswith(b"HTTP/1.1 408")


def test_a_sender_of_too_much_reads_the_refusal():
    body = b"%x\r\n" % (1 << 20) + b" " * (1 << 20) + b"\r\n0\r\n\r\n"
    found = visited(
        lambda here: said(here, (HEAD + "transfer-encoding: chunked\r\n\r\n").encode() + body),
        limits=ServerLimits(body=1000),
    )
    assert found.startswith(b"HTTP/1.1 413")


def test_heads_that_come_slowly_and_connections_that_say_nothing_are_ended():
    def visit(here):
        lines = [socket.create_connection(("127.0.0.1", here.port), timeout=WAIT) for _ in range(3)]
        lines[1].sendall(b"POST /a HT")
        lines[2].settimeout(0.05)
        end, last = time.monotonic() + WAIT, None
        while last is None and time.monotonic() < end:  # a byte now and then does not put the end off
            try:
                lines[2].send(b"x")
                last = lines[2].recv(10)
            except TimeoutError:
                continue
            except ConnectionError:  # a byte of it was on its way
                last = b""
        return [line.recv(10) for line in lines[:2]] + [last]

    assert visited(visit, limits=ServerLimits(head_seconds=0.6)) == [b""] * 3


def test_a_connection_between_two_requests_is_ended_after_a_while():
    def visit(here):
        with socket.create_connection(("127.0.0.1", here.port), timeout=WAIT) as line:
            line.sendall((HEAD + "content-length: 2\r\n\r\n{}").encode())
            found = line.recv(1000)
            while piece := line.recv(1000):
                found += piece
            return found

    found = visited(visit, limits=ServerLimits(idle_seconds=0.2))
    assert found.startswith(b"HTTP/1.1 200") and found.endswith(b"{}")


def test_programs_without_a_key_keep_nobody_out_and_take_few_descriptors():
    def visit(here):
        before = psutil.Process().num_fds()
        lines = [socket.create_connection(("127.0.0.1", here.port), timeout=WAIT) for _ in range(200)]
        assert works(here)
        wait_until(lambda: psutil.Process().num_fds() - before - len(lines) <= 20)
        assert works(here) and len(here.connections) == 20
        for line in lines:
            line.close()
        return True

    assert visited(visit, limits=ServerLimits(strangers=20, head_seconds=30.0))


@pytest.mark.parametrize("is_unix", [False, True])
def test_a_burst_of_requests_with_the_key_is_not_taken_for_programs_without_one(tmp_path, is_unix):
    """The server looks up only now and then, as beside an engine that computes; 400 come at once."""
    limits, where = ServerLimits(strangers=100, head_seconds=60.0), tmp_path / "own"
    where.mkdir(mode=0o700)

    def visit(here):
        client = Client(here.address, key=KEY)

        async def run():
            return await asyncio.gather(*(client.ask("POST", "/a", {"n": n}) for n in range(400)))

        return [reply.json()["n"] for reply in asyncio.run(run())]

    async def busy():
        while True:
            await asyncio.sleep(0.001)
            time.sleep(0.02)

    async def run():
        here = server(limits=limits, key=KEY)
        await here.start(unix(where / "socket") if is_unix else None)
        computing = asyncio.ensure_future(busy())
        try:
            return await asyncio.wait_for(asyncio.to_thread(visit, here), 60)
        finally:
            computing.cancel()
            await here.close()

    assert asyncio.run(run()) == list(range(400))


def test_a_request_over_a_connection_too_many_is_refused_until_one_ends():
    def visit(here):
        held = [socket.create_connection(("127.0.0.1", here.port), timeout=WAIT) for _ in range(2)]
        wait_until(lambda: len(here.connections) == 2)
        refused = said(here, HEAD + "connection: close\r\ncontent-length: 2\r\n\r\n{}")
        held.pop().close()
        wait_until(lambda: len(here.connections) == 1)
        held.pop().close()
        return refused, works(here)

    refused, served = visited(visit, limits=ServerLimits(connections=2))
    assert refused.startswith(b"HTTP/1.1 503") and served


def test_the_number_of_connections_follows_what_the_process_may_open(monkeypatch):
    monkeypatch.setattr("verl.serving.server.resource.getrlimit", lambda which: (1024, 4096))
    assert ServerLimits().most == 512 and ServerLimits(connections=7).most == 7


async def one_long_event():
    yield b"x" * (32 << 20)


@pytest.mark.parametrize(
    "answer", [lambda: HttpResponse("x" * (32 << 20)), lambda: HttpResponse(events=one_long_event())]
)
def test_a_client_that_leaves_its_answer_unread_is_dropped(answer):
    """In the middle of it, and when nothing but its end is left to send."""
    begun = threading.Event()

    async def long(request):
        begun.set()
        return answer()

    async def run():
        here = Server({("POST", "/a"): long}, authorize=lambda token: True, limits=ServerLimits(write_seconds=0.3))
        await here.start()
        try:
            return await asyncio.wait_for(asyncio.to_thread(unread, here), 60)
        finally:
            await here.close()

    def unread(here):
        with socket.create_connection(("127.0.0.1", here.port), timeout=WAIT) as line:
            line.sendall((HEAD + "content-length: 2\r\n\r\n{}").encode())
            assert begun.wait(WAIT)
            wait_until(lambda: not here.connections)
            return True

    assert asyncio.run(run())


def test_a_unix_socket_is_its_users_alone(tmp_path):
    folder = private_folder("verl-test-")
    try:
        place = folder / "socket"
        listener = unix(place)
        found = place.lstat()
        assert stat.S_ISSOCK(found.st_mode) and stat.S_IMODE(found.st_mode) == 0o600
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700 and found.st_uid == os.geteuid()

        def visit(here):
            assert here.address == f"unix:{place}"
            return asyncio.run(Client(here.address, key=KEY).ask("POST", "/a", {"b": 1}))

        assert visited(visit, on=listener, key=KEY).json() == {"b": 1}
        with pytest.raises(ConfigError, match="cannot listen there"):
            unix(place)  # somebody's already
    finally:
        (folder / "socket").unlink(missing_ok=True)
        folder.rmdir()
    tmp_path.chmod(0o755)
    with pytest.raises(ConfigError, match=r"only this user can enter.*chmod 700"):
        unix(tmp_path / "socket")


def test_a_client_may_be_earlier_than_the_socket_of_its_server(tmp_path):
    tmp_path.chmod(0o700)

    async def run():
        client = Client(f"unix:{tmp_path}/socket", key=KEY)
        for _ in range(2):
            with pytest.raises(FileNotFoundError):
                await client.ask("POST", "/a", {})
        here = server(key=KEY)
        await here.start(unix(tmp_path / "socket"))
        try:
            return (await client.ask("POST", "/a", {"b": 1})).json()
        finally:
            await here.close()

    assert asyncio.run(run()) == {"b": 1}


def test_a_client_of_a_unix_socket_that_reads_nothing_ends_no_other(tmp_path):
    tmp_path.chmod(0o700)

    async def answer(request):
        return HttpResponse("x" * (32 << 20) if request.json() else request.json())

    async def run():
        here = Server({("POST", "/a"): answer}, authorize=lambda token: True, limits=ServerLimits(write_seconds=0.2))
        await here.start(unix(tmp_path / "socket"))
        try:
            client = Client(here.address)
            await client.ask("POST", "/a", {})
            with socket.socket(socket.AF_UNIX) as line:
                line.connect(str(tmp_path / "socket"))
                line.sendall((HEAD + 'content-length: 8\r\n\r\n{"a": 1}').encode())
                is_given_up = lambda: any(one.transport.is_closing() for one in here.connections)
                await asyncio.to_thread(wait_until, is_given_up)
                assert (await client.ask("POST", "/a", {})).status == 200 and len(here.connections) == 2
        finally:
            await here.close()

    asyncio.run(run())


def test_a_port_that_is_taken_is_an_error():
    with loopback() as holder, pytest.raises(ConfigError, match="cannot listen there"):
        loopback(holder.getsockname()[1])


@pytest.mark.parametrize("port", [-1, 65_536])
def test_a_port_beyond_the_last_one_is_an_error(port):
    with pytest.raises(ConfigError, match="Allowed: 0 to 65535"):
        loopback(port)


def test_a_server_that_does_not_know_the_key_hears_nothing_of_it_and_is_not_believed():
    heard = []

    async def impostor(reader, writer):
        heard.append(await reader.readuntil(b"\r\n\r\n"))
        body = json.dumps({"proof": "0" * 64, "token_ids": [1]}).encode()
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        await writer.drain()
        writer.close()

    async def run():
        there = await asyncio.start_server(impostor, "127.0.0.1", 0)
        port = there.sockets[0].getsockname()[1]
        async with there:
            with pytest.raises(WireError, match="does not know the key: another program has its address"):
                await Client(f"http://127.0.0.1:{port}", key=KEY).ask("POST", "/a", {})

    asyncio.run(run())
    assert heard and KEY.encode() not in heard[0]


def test_a_server_that_comes_later_to_an_address_hears_nothing_of_the_key_and_is_not_believed():
    heard = []

    def lets_anybody_in(token):
        heard.append(token)
        return True

    async def run():
        first = server(key=KEY)
        await first.start()
        client = Client(first.address, key=KEY)
        assert (await client.ask("POST", "/a", {"c": 2})).json() == {"c": 2}
        await first.close()  # its connection is left in the client's pool
        other = Server({("POST", "/a"): echo}, authorize=lets_anybody_in, key="another one")
        await other.start(loopback(int(client.url.rpartition(":")[2])))
        try:
            for _ in range(2):
                with pytest.raises(WireError, match=r"not from a server that knows the key|does not know the key"):
                    await client.ask("POST", "/a", {})
        finally:
            await other.close()

    asyncio.run(run())
    assert heard == []


def test_a_server_that_was_started_again_proves_its_key_again():
    async def run():
        first = server(key=KEY)
        await first.start()
        client = Client(first.address, key=KEY)
        await client.ask("POST", "/a", {})
        await first.close()
        second = server(key=KEY)
        await second.start(loopback(int(client.url.rpartition(":")[2])))
        try:
            return (await client.ask("POST", "/a", {"c": 2})).json()
        finally:
            await second.close()

    assert asyncio.run(run()) == {"c": 2}


def test_a_body_is_hashed_once_and_a_long_one_not_on_the_event_loop(monkeypatch):
    hashed, digest = [], secret.digest

    def recorded(body):
        hashed.append((len(body), threading.current_thread() is threading.main_thread()))
        return digest(body)

    async def answer(request):
        return HttpResponse(len(request.body))

    async def run():
        here = Server({("POST", "/a"): answer}, authorize=lambda token: token == KEY or None, key=KEY)
        await here.start()
        try:
            client = Client(here.address, key=KEY)
            return [(await client.ask("POST", "/a", "x" * n)).json() for n in (98, 2 << 20)]
        finally:
            await here.close()

    monkeypatch.setattr(secret, "digest", recorded)
    lengths = [100, (2 << 20) + 2]
    assert asyncio.run(run()) == lengths
    assert [entry for entry in hashed if entry[0] in lengths] == [(100, True), (lengths[1], False)]


@pytest.mark.parametrize(
    "claim, head",
    [
        ({"run": "r", "proof": "\ud800"}, b""),
        ({"run": "\ud800", "proof": "0"}, b""),
        ({}, b"x-verl-proof: \xff\r\n"),
    ],
)
def test_a_proof_that_is_no_text_is_a_wrong_one(claim, head):
    async def answer(reader, writer):
        request = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        nonce = request.partition(f"{secret.NONCE}: ")[2].partition("\r\n")[0]
        body = json.dumps({"run": "r", "proof": secret.of_server(KEY, nonce, "r"), **claim}).encode()
        writer.write(b"HTTP/1.1 200 OK\r\n%bconnection: close\r\ncontent-length: %d\r\n\r\n" % (head, len(body)) + body)
        await writer.drain()
        writer.close()

    async def run():
        there = await asyncio.start_server(answer, "127.0.0.1", 0)
        async with there:
            with pytest.raises(WireError, match=r"not from a server that knows the key|does not know the key"):
                await Client(f"http://127.0.0.1:{there.sockets[0].getsockname()[1]}", key=KEY).ask("POST", "/a", {})

    asyncio.run(run())


def test_an_idle_clients_requests_all_reach_a_server_started_again():
    async def run():
        first = server(key=KEY)
        await first.start()
        client = Client(first.address, max_connections=8, key=KEY)
        await client.ask("POST", "/a", {})
        await first.close()
        second = server(key=KEY)
        await second.start(loopback(int(client.url.rpartition(":")[2])))
        try:
            return await asyncio.gather(*(client.ask("POST", "/a", {"n": n}) for n in range(30)))
        finally:
            await second.close()

    assert [(reply.status, reply.json()) for reply in asyncio.run(run())] == [(200, {"n": n}) for n in range(30)]


def signed(run: str, method="POST", target="/a", body=b"{}") -> str:
    """What a client signs for a run of a server, as text of a request to POST /a with the body {}."""
    proof = secret.of_request(KEY, run, "n", method, "localhost", target, secret.digest(body))
    lines = {"host": "localhost", secret.NONCE: "n", secret.DIGEST: secret.digest(body), secret.PROOF: proof,
             "content-length": "2", "connection": "close"}  # fmt: skip
    return "POST /a HTTP/1.1\r\n" + "".join(f"{name}: {value}\r\n" for name, value in lines.items()) + "\r\n{}"


@pytest.mark.parametrize(
    "other, status",
    [({}, 200), ({"method": "GET"}, 401), ({"target": "/b"}, 401), ({"body": b"[]"}, 400), ({"run": "other"}, 401)],
)
def test_a_signature_fits_one_request_and_one_run_which_takes_it_again(other, status):
    answers = visited(lambda here: [said(here, signed(**{"run": here._run, **other})) for _ in range(2)], key=KEY)
    assert all(answer.startswith(f"HTTP/1.1 {status}".encode()) for answer in answers)


def test_a_connection_that_was_told_the_proof_and_then_says_nothing_is_ended():
    def visit(here):
        return said(here, f"GET {secret.PATH} HTTP/1.1\r\nhost: localhost\r\n{secret.NONCE}: n\r\n\r\n")

    answer = visited(visit, limits=ServerLimits(head_seconds=2.0, idle_seconds=3600.0), key=KEY)
    claim = json.loads(answer.partition(b"\r\n\r\n")[2])
    assert claim["proof"] == secret.of_server(KEY, "n", claim["run"])


def test_a_proof_belongs_to_one_number_one_run_one_status_and_one_body():
    proofs = {
        secret.of_server(KEY, "n", "r"),
        secret.of_server(KEY, "m", "r"),
        secret.of_server(KEY, "n", "s"),
        secret.of_server("other", "n", "r"),
        secret.of_answer(KEY, "n", 200, b"a"),
        secret.of_answer(KEY, "n", 200, b"b"),
        secret.of_answer(KEY, "n", 400, b"a"),
    }
    assert len(proofs) == 7


def test_a_key_in_the_path_lets_in_and_its_absence_does_not():
    head = "HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: 2\r\n"

    def visit(here):
        paths = [f"/{KEY}/a", "/wrong/a", "/a", f"/{KEY}", f"/{KEY}/b", f"//{KEY}/a"]
        bearer = said(here, f"POST /wrong/a {head}authorization: Bearer {KEY}\r\n\r\n{{}}")
        return [said(here, f"POST {path} {head}\r\n{{}}") for path in paths], bearer

    answers, bearer = visited(visit, key_in_path=True)
    assert [answer[9:12] for answer in answers] == [b"200", b"401", b"401", b"404", b"404", b"401"]
    assert not any(KEY.encode() in answer for answer in answers), "no message repeats the key"
    assert bearer[9:12] == b"401", "a header does not replace it"
