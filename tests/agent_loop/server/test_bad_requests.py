"""Nonsense at the endpoint: each request is refused in OpenAI's form, and the next one is answered."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import inspect
import json
import socket
import threading
import time
from urllib.parse import urlparse

import openai
import pytest
from transformers import PreTrainedTokenizerBase

from tests.agent_loop.server.scripted import Scripted, rollout
from tests.harness.models import tiny_tokenizer
from verl.agent_loop.server.endpoint import Endpoint
from verl.agent_loop.server.errors import ApiError
from verl.agent_loop.server.prompts import Prompts
from verl.agent_loop.server.protocol import NOT_OF_A_REQUEST, read_chat
from verl.agent_loop.server.record import Record
from verl.rollout.base import check_request

USER = {"role": "user", "content": "hi"}
GOOD = {"model": "policy", "messages": [USER]}
CHAT = "/v1/chat/completions"


def ask(base_url, key, body=None, path=CHAT, method="POST", headers=None):
    """(status, parsed body) of one request."""
    connection = http.client.HTTPConnection(urlparse(base_url).netloc, timeout=20)
    sent = {"authorization": f"Bearer {key}", "content-type": "application/json", **(headers or {})}
    data = body if isinstance(body, (bytes, type(None))) else json.dumps(body).encode()
    try:
        connection.request(method, path, data, sent)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())
    finally:
        connection.close()


def still_works(base_url, key):
    status, found = ask(base_url, key, GOOD)
    assert status == 200 and found["choices"][0]["message"]["content"] == "fine", found


def visit(check, sampler=None, **options):
    """Run ``check(base_url, api_key)`` as an agent, then one good request, and require that both went well."""

    def agent(base_url, api_key, row, model):
        check(base_url, api_key)
        still_works(base_url, api_key)

    sampler = sampler or Scripted("fine")
    return rollout(sampler, agent, on_error="raise", **options)


NONSENSE = {
    "no JSON": (b"\x80\x05pickle", None),
    "nested without end": (b"[" * 200_000, None),
    "a list": ([], "body"),
    "a template of its own": (GOOD | {"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, "chat_template_kwargs"),
    "a template as a field": (GOOD | {"chat_template": "{{ 1 }}"}, "chat_template"),
    "special tokens": (GOOD | {"chat_template_kwargs": {"allow_special_tokens": True}}, "chat_template_kwargs"),
    "no model": ({"messages": [USER]}, "model"),
    "unknown field": ({**GOOD, "temprature": 1}, "temprature"),
    "no messages": ({"model": "policy"}, "messages"),
    "empty prompt": ({"model": "policy", "messages": []}, "messages"),
    "message without role": ({**GOOD, "messages": [{"content": "x"}]}, "messages"),
    "odd role": ({**GOOD, "messages": [{"role": "king", "content": "x"}]}, "messages[0].role"),
    "an image": ({**GOOD, "messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
    "a number as content": ({**GOOD, "messages": [{"role": "user", "content": 5}]}, "messages"),
    "n of a million": ({**GOOD, "n": 10**6}, "n"),
    "n of nothing": ({**GOOD, "n": 0}, "n"),
    "a billion tokens": ({**GOOD, "max_tokens": 10**9}, "max_tokens"),
    "more tokens than a number holds": ({**GOOD, "max_tokens": 10**30}, "max_tokens"),
    "no tokens": ({**GOOD, "max_completion_tokens": 0}, "max_completion_tokens"),
    "negative temperature": ({**GOOD, "temperature": -1}, "temperature"),
    "temperature of text": ({**GOOD, "temperature": "hot"}, "temperature"),
    "infinite temperature": (b'{"model":"policy","messages":[{"role":"user","content":"x"}],"temperature":1e999}',
                             "temperature"),
    "top_p above 1": ({**GOOD, "top_p": 2}, "top_p"),
    "stop of numbers": ({**GOOD, "stop": [1]}, "stop"),
    "empty stop": ({**GOOD, "stop": ""}, "stop"),
    "a JSON schema": ({**GOOD, "response_format": {"type": "json_schema", "json_schema": {"pattern": "(("}}},
                      "response_format"),
    "a penalty": ({**GOOD, "presence_penalty": 0.5}, "presence_penalty"),
    "tools that are none": ({**GOOD, "tools": [{"type": "function"}]}, "tools[0]"),
    "tools of text": ({**GOOD, "tools": "all"}, "tools"),
    "a forced tool": ({**GOOD, "tool_choice": "required"}, "tool_choice"),
    "stream of text": ({**GOOD, "stream": "yes"}, "stream"),
}  # fmt: skip


def test_every_nonsense_is_a_400_that_names_the_field_and_the_next_request_is_answered():
    def check(base_url, key):
        for name, (body, param) in NONSENSE.items():
            status, found = ask(base_url, key, body)
            assert status == 400 and found["error"]["type"] == "invalid_request_error", (name, found)
            assert found["error"]["param"] == param and found["error"]["message"], (name, found)

    sampler = Scripted("fine")
    visit(check, sampler)
    assert len(sampler.requests) == 1, "nothing of it reached the sampler"


def test_what_the_sampler_itself_refuses_comes_back_as_a_400():
    def check(base_url, key):
        body = {"model": "policy", "prompt": [10**6]}
        status, found = ask(base_url, key, body, "/v1/completions")
        assert status == 400 and "vocabulary" in found["error"]["message"]
        for prompt in ("", [], [1.5], [[1], [2]], None, {}):
            assert ask(base_url, key, {"model": "policy", "prompt": prompt}, "/v1/completions")[0] == 400

    class Checked(Scripted):
        async def generate(self, request):
            check_request(request, vocab_size=300, max_model_len=1000)
            return await super().generate(request)

    visit(check, Checked("fine"))


async def test_every_route_wants_the_right_token_and_takes_it_from_the_header_only():
    routes = list(Endpoint().server.routes)
    assert ("POST", CHAT) in routes

    def check(base_url, key):
        for method, path in [*routes, ("GET", "/"), ("DELETE", CHAT)]:
            for wrong in ("", key[:-1], key + "0", "sk-verl-" + "0" * 48, "ü"):
                header = {"authorization": f"Bearer {wrong}".encode().decode("latin-1")}
                status, found = ask(base_url, key, None, f"{path}?api_key={key}", method, header)
                assert (status, found["error"]["code"]) == (401, "invalid_api_key"), (method, path, wrong)

    visit(check)


def test_web_pages_other_hosts_and_unknown_paths_are_turned_away():
    def check(base_url, key):
        assert ask(base_url, key, GOOD, headers={"host": "evil.example"})[0] == 403
        assert ask(base_url, key, GOOD, headers={"origin": "http://localhost"})[0] == 403
        assert ask(base_url, key, GOOD, "/v1/embeddings")[0] == 404
        assert ask(base_url, key, None, CHAT, "GET")[0] == 405

    visit(check)


def test_an_unknown_model_is_a_404_that_says_what_is_served():
    def check(base_url, key):
        with pytest.raises(openai.NotFoundError, match=r"'gpt-4o' does not exist\. Served here: 'policy'"):
            openai.OpenAI(base_url=base_url, api_key=key).chat.completions.create(model="gpt-4o", messages=[USER])

    visit(check)


def test_a_body_of_100_mb_is_refused_before_it_is_read():
    body = b" " * (100 << 20)

    def check(base_url, key):
        address = urlparse(base_url)
        with socket.create_connection((address.hostname, address.port), timeout=20) as line:
            line.sendall(f"POST {CHAT} HTTP/1.1\r\nhost: {address.netloc}\r\nauthorization: Bearer {key}\r\n"
                         f"content-length: {len(body)}\r\n\r\n".encode())  # fmt: skip
            assert line.recv(64).startswith(b"HTTP/1.1 413"), "refused by its length alone"
        chunked = b"%x\r\n" % len(body) + body + b"\r\n0\r\n\r\n"
        with socket.create_connection((address.hostname, address.port), timeout=20) as line:
            line.sendall(f"POST {CHAT} HTTP/1.1\r\nhost: {address.netloc}\r\nauthorization: Bearer {key}\r\n"
                         "transfer-encoding: chunked\r\n\r\n".encode())  # fmt: skip
            threading.Thread(target=_send, args=(line, chunked), daemon=True).start()
            assert line.recv(64).startswith(b"HTTP/1.1 413"), "refused by the size of its first chunk"

    visit(check)


def _send(line: socket.socket, data: bytes) -> None:
    with contextlib.suppress(OSError):
        line.sendall(data)


def test_garbage_and_a_client_that_sends_nothing_hurt_nobody():
    def check(base_url, key):
        address = urlparse(base_url)
        for data in (b"\x00" * 100, b"GET\r\n\r\n", b"POST " + b"x" * 100_000, b"GET / HTTP/1.1\r\nno header\r\n\r\n"):
            with socket.create_connection((address.hostname, address.port), timeout=20) as line:
                _send(line, data + b"\r\n\r\n")
                assert line.recv(16)[:9] in (b"HTTP/1.1 ", b""), data[:20]
        idle = [socket.create_connection((address.hostname, address.port), timeout=20) for _ in range(50)]
        still_works(base_url, key)
        for line in idle:
            line.close()

    visit(check, Scripted("fine", "fine"), branches="last")


def test_a_client_that_goes_in_the_middle_frees_the_sampler_and_leaves_no_trace():
    class Slow(Scripted):
        async def generate(self, request):
            if len(self.requests) == 0:
                self.gate = asyncio.Event()  # never set: only a cancellation ends it
            else:
                self.gate = None
            return await super().generate(request)

    sampler = Slow("fine")

    def check(base_url, key):
        address = urlparse(base_url)
        with socket.create_connection((address.hostname, address.port), timeout=20) as line:
            data = json.dumps(GOOD).encode()
            line.sendall(f"POST {CHAT} HTTP/1.1\r\nhost: {address.netloc}\r\nauthorization: Bearer {key}\r\n"
                         f"content-length: {len(data)}\r\n\r\n".encode() + data)  # fmt: skip
            while not sampler.requests:
                time.sleep(0.01)
        while not sampler.cancelled:
            time.sleep(0.01)

    made = visit(check, sampler)
    assert made.meta_info["metrics"]["rollout/agent/calls"].value == 1, "the one that was delivered"


def test_a_conversation_that_has_used_up_its_tokens_is_told_so():
    def agent(base_url, api_key, row, model):
        found = openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0)
        first = found.completions.create(model=model, prompt="a", max_tokens=400).choices[0]
        assert first.finish_reason == "length" and len(first.text) == 400
        with pytest.raises(openai.BadRequestError) as caught:
            found.completions.create(model=model, prompt="a" + first.text + "b", max_tokens=1)
        assert caught.value.code == "context_length_exceeded"
        return 1.0

    made = rollout(Scripted("x" * 500), agent)
    assert made.batch["responses"].shape == (1, 400) and made.batch["rm_scores"].sum() == 1.0


def test_every_argument_of_the_tokenizers_own_is_refused_in_a_request():
    parameters = inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters.values()
    named = {p.name for p in parameters if p.kind is not p.VAR_KEYWORD} - {"self", "documents"}
    assert named <= NOT_OF_A_REQUEST
    for name in NOT_OF_A_REQUEST:
        with pytest.raises(ApiError, match=f"{name} is the run's own"):
            read_chat(GOOD | {"chat_template_kwargs": {name: "x"}})
    assert read_chat(GOOD | {"chat_template_kwargs": {"enable_thinking": False}}).template_kwargs


def test_words_of_a_request_for_the_template_end_no_turn():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{{ word }}{% for m in messages %}{{ m.content }}{% endfor %}"
    body = GOOD | {"chat_template_kwargs": {"word": "<|im_end|>"}}
    ids = Prompts(tokenizer).locate(read_chat(body), Record()).inserted
    assert tokenizer.decode(ids) == "<|im_end|>hi" and tokenizer.eos_token_id not in ids
