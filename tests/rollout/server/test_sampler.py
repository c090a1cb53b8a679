"""The sampler over an HTTP server: what it asks, what it makes of the answers, and what happens when they are wrong."""

from __future__ import annotations

import asyncio
import socket
from types import SimpleNamespace

import pytest

from tests.harness.models import tiny_model_dir
from tests.harness.servers import Hangup, Silence, completion, raw, serving
from verl.errors import ConfigError, RolloutError
from verl.metrics import notices, reset_notices
from verl.rollout import Request, SamplingParams
from verl.rollout.lost import EngineLostError
from verl.rollout.server.sampler import ServerSampler, addresses

PATH = "/v1/completions"
ASKED = Request("a", (40, 41, 42), SamplingParams(max_tokens=4, seed=3), uid="row", sample_index=1)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(tiny_model_dir(tmp_path_factory.mktemp("model"), max_positions=64))


def over(server, model, **options):
    given = {"timeout": 60.0, "max_attempts": 3, "retry_delay": 0.01, "max_start_wait": 0.5, "cooldown": 0.1, **options}
    return ServerSampler(server.url, model=model, **given)


def ask(sampler, *requests, seconds=120):
    async def run():
        tasks = [sampler.generate(request) for request in requests or (ASKED,)]
        return await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), seconds)

    return asyncio.run(run())


def test_a_request_goes_out_as_token_ids_and_comes_back_as_token_ids(model):
    with serving({PATH: completion((7, 8), (-0.5, -0.25))}) as server:
        sampler = over(server, model, api_key="secret")
        (done,) = ask(sampler)
        (payload,) = server.payloads(PATH)
    assert (done.token_ids, done.log_probs, done.finish_reason) == ((7, 8), (-0.5, -0.25), "stop")
    assert done.token_versions == (0, 0) and sampler.max_model_len == 64
    expected = {"model": "tiny", "prompt": [40, 41, 42], "max_tokens": 4, "temperature": 1.0, "top_p": 1.0,
                "top_k": -1, "stop_token_ids": [2], "ignore_eos": False, "return_token_ids": True}  # fmt: skip
    assert {name: payload[name] for name in expected} == expected
    assert server.headers[-1]["authorization"] == "Bearer secret"


def test_the_seed_of_a_request_is_the_same_wherever_and_whenever_it_is_sent(model):
    with serving({PATH: completion()}) as one, serving({PATH: completion()}) as two:
        ask(over(one, model))
        ask(over(two, model), Request("other", (9,), ASKED.sampling, uid="row", sample_index=1), ASKED)
        seeds = [payload["seed"] for payload in one.payloads(PATH) + two.payloads(PATH)]
    assert len(set(seeds)) == 1


def test_token_ids_are_read_from_the_log_probs_of_older_servers(model):
    with serving({PATH: completion((7, 8), token_ids=None)}) as server:
        assert ask(over(server, model))[0].token_ids == (7, 8)


def test_a_prefix_is_part_of_the_prompt_and_counts_against_the_budget(model):
    with serving({PATH: completion((7, 8))}) as server:
        ask(over(server, model), Request("a", (40,), ASKED.sampling, generated_prefix=(41, 42)))
        (payload,) = server.payloads(PATH)
    assert payload["prompt"] == [40, 41, 42] and payload["max_tokens"] == 2


NONSENSE = {
    "html": raw(200, "x").replace(b'"x"', b"<x>"),
    "no choices": (200, {"choices": []}),
    "a number": (200, 5),
    "no log-probs": (200, {"choices": [{"text": "x", "token_ids": [7], "finish_reason": "stop"}]}),
    "two choices": (200, {"choices": 2 * completion()[1]["choices"]}),
    "half a token": completion((7.5,), (-0.1,)),
    "a token without end": completion((float("inf"),), (-0.1,)),
    "digits for tokens": completion("78", (-0.1, -0.1)),
    "other counts": completion((7, 8), (-0.1,)),
    "too many tokens": completion((7,) * 5, (-0.1,) * 5),
    "outside the vocabulary": completion((7, 300)),
    "a probability above 1": completion((7,), (0.7,)),
    "not a number": completion((7,), (float("nan"),)),
    "no token": completion((), ()),
    "an unknown end": completion(reason="because"),
    "not http": b"hello\r\n\r\n",
    "half an answer": Hangup(raw(200, {"choices": []})[:-5]),
    "a hang-up": Hangup(),
    "an endless head": b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 20000,
    "a wrong length": b"HTTP/1.1 200 OK\r\ncontent-length: -5\r\n\r\n",
    "a wrong chunk": b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
}


@pytest.mark.parametrize("case", NONSENSE)
def test_nonsense_is_asked_again_a_few_times_and_then_an_error(model, case):
    with serving({PATH: NONSENSE[case]}) as server:
        (error,) = ask(over(server, model))
        assert server.count(PATH) == 3
    assert isinstance(error, EngineLostError) and "tried 3 times" in str(error) and server.url in str(error)


@pytest.mark.parametrize("case", NONSENSE)
def test_nonsense_that_passes_does_no_harm(model, case):
    with serving({PATH: [NONSENSE[case], completion()]}) as server:
        sampler = over(server, model)
        assert ask(sampler)[0].token_ids == (7, 8)
    assert sampler.stats()["retries"] == 1


@pytest.mark.parametrize("status", [500, 502, 503, 429])
def test_a_server_that_is_ill_or_busy_is_asked_again(model, status):
    with serving({PATH: [(status, {"error": {"message": "ill"}}), completion()]}) as server:
        assert ask(over(server, model))[0].token_ids == (7, 8)
        assert server.count(PATH) == 2


def test_a_refused_request_is_not_asked_again_and_says_what_the_server_said(model):
    with serving({PATH: (400, {"error": {"message": "logprobs is too large"}})}) as server:
        (error,) = ask(over(server, model))
        assert server.count(PATH) == 1
    assert isinstance(error, RolloutError) and not isinstance(error, EngineLostError)
    assert "refuses the request (400): logprobs is too large" in str(error)


def test_a_silent_server_is_given_up_in_time(model):
    with serving({PATH: Silence()}) as server:
        (error,) = ask(over(server, model, timeout=1.0, max_start_wait=60, api="vllm", served_model="tiny"))
        assert server.count(PATH) == 3
    assert "did not answer within 1 s (tried 3 times)" in str(error), "it is silent for an hour"


def test_one_request_without_an_answer_does_not_hold_up_the_others(model):
    def answer(payload):
        return Silence() if payload["prompt"] == [50] else completion()

    async def run():
        sent = [Request("silent", (50,), ASKED.sampling), *(Request(str(i), (40,), ASKED.sampling) for i in range(20))]
        tasks = [asyncio.ensure_future(sampler.generate(request)) for request in sent]
        for request, task in zip(sent, tasks):
            task.add_done_callback(lambda _, name=request.id: ended.append(name))
        return await asyncio.gather(*tasks, return_exceptions=True)

    ended: list[str] = []
    with serving({PATH: answer}) as server:
        sampler = over(server, model, timeout=5.0, max_attempts=1, max_start_wait=60)
        done = asyncio.run(run())
    assert isinstance(done[0], EngineLostError) and all(one.token_ids == (7, 8) for one in done[1:])
    assert ended[-1] == "silent" and len(ended) == 21


def test_a_run_that_waits_for_a_server_says_so(model, monkeypatch):
    monkeypatch.setattr("verl.rollout.server.sampler.SILENT_SECONDS", 0.0)
    reset_notices()
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{held.getsockname()[1]}"
        ask(over(SimpleNamespace(url=url), model))
    said = notices()[url]
    assert said.startswith("no server answers yet (") and "server.max_start_wait_time" in said


def test_a_server_that_is_not_there_is_named_with_its_address(model):
    with socket.socket() as held:  # nobody else can take its place
        held.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{held.getsockname()[1]}"
        (error,) = ask(over(SimpleNamespace(url=url), model))
    assert isinstance(error, EngineLostError) and f"no server answers at {url}" in str(error)


def test_a_server_that_died_leads_to_an_error_for_every_request_and_not_to_a_hang(model):
    with serving({PATH: completion()}) as server:
        sampler = over(server, model)
        assert ask(sampler)[0].token_ids == (7, 8)
    found = ask(sampler, *(Request(str(i), (40,), ASKED.sampling) for i in range(10)))
    assert all(isinstance(error, EngineLostError) for error in found)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (Request("a", (), ASKED.sampling), "the prompt is empty"),
        (Request("a", (259,), ASKED.sampling), "outside the vocabulary"),
        (Request("a", (5,), SamplingParams(max_tokens=10**9)), "longer than the model's context"),
        (Request("a", (5,), SamplingParams(temperature=float("nan"))), "not a temperature"),
    ],
)
def test_an_absurd_request_never_reaches_the_server(model, asked, said):
    with serving({PATH: completion()}) as server:
        (error,) = ask(over(server, model), asked)
        assert server.count(PATH) == 0
    assert isinstance(error, RolloutError) and said in str(error)


def test_log_probs_of_another_distribution_are_refused_or_left_out(model):
    """This server says -2.0 whatever the temperature, so it cannot be the probability of what it drew at 0.7."""
    scaled = Request("a", (40,), SamplingParams(max_tokens=2, temperature=0.7))
    with serving({PATH: completion((7,), (-2.0,))}) as server:
        (error,) = ask(over(server, model), scaled)
        assert "--logprobs-mode processed_logprobs" in str(error)
        assert ask(over(server, model, wants_log_probs=False), scaled)[0].log_probs == ()
        assert ask(over(server, model), ASKED)[0].log_probs == (-2.0,)
        assert ask(over(server, model, logprobs_mode="raw_logprobs"), scaled)[0].log_probs == (-2.0,)


def test_log_probs_of_the_distribution_that_is_drawn_from_are_taken(model):
    def answer(payload):
        return completion((7,), (-2.0 if payload["temperature"] == 0 else -0.01,))

    with serving({PATH: answer}) as server:
        scaled = Request("a", (40,), SamplingParams(max_tokens=2, temperature=0.7))
        assert ask(over(server, model), scaled)[0].log_probs == (-0.01,)
        (error,) = ask(over(server, model, logprobs_mode="raw_logprobs"), scaled)
        assert "--logprobs-mode raw_logprobs" in str(error)


def test_an_aborted_request_returns_what_the_server_had(model):
    async def late():
        while not server.count("/abort_requests"):
            await asyncio.sleep(0.01)
        return completion((7,), (-0.1,), "abort")

    async def run():
        task = asyncio.ensure_future(sampler.generate(ASKED))
        while not server.count(PATH):
            await asyncio.sleep(0.01)
        assert await sampler.abort(["a"]) == 1
        return await asyncio.wait_for(task, 60)

    with serving({PATH: lambda payload: late(), "/abort_requests": (200, {})}) as server:
        sampler = over(server, model, timeout=60)
        done = asyncio.run(run())
    assert (done.token_ids, done.finish_reason) == ((7,), "abort")
    assert server.payloads("/abort_requests") == [{"request_ids": ["cmpl-a-0"]}]


def test_a_server_without_a_call_to_abort_ends_the_request_with_nothing(model):
    async def run():
        task = asyncio.ensure_future(sampler.generate(ASKED))
        while not server.count(PATH):
            await asyncio.sleep(0.01)
        assert await sampler.abort() == 1
        return await asyncio.wait_for(task, 60)

    with serving({PATH: Silence()}) as server:
        sampler = over(server, model, timeout=60)
        assert asyncio.run(run()).finish_reason == "abort"


def test_a_request_that_is_aborted_between_two_attempts_is_not_sent_again(model, monkeypatch):
    aborted = []

    async def pause(seconds):
        aborted.append(await sampler.abort())

    with serving({PATH: (503, {}), "/abort_requests": (200, {})}) as server:
        sampler = over(server, model)
        monkeypatch.setattr("verl.rollout.server.client.asyncio.sleep", pause)
        (done,) = ask(sampler)
        assert done.finish_reason == "abort" and aborted == [1] and server.count(PATH) == 1


def test_the_same_sampler_works_from_one_event_loop_after_another(model):
    with serving({PATH: completion()}) as server:
        sampler = over(server, model)
        assert [ask(sampler)[0].token_ids for _ in range(3)] == [(7, 8)] * 3


def test_a_server_of_another_kind_takes_text_and_gives_no_log_probs(model):
    reset_notices()
    text = (200, {"choices": [{"text": "no", "finish_reason": "stop"}]})
    with serving({PATH: text, "/version": (404, {})}) as server:
        sampler = over(server, model, wants_log_probs=False)
        (done,) = ask(sampler)
        (payload,) = server.payloads(PATH)
        assert "gives no log-probs" in str(ask(over(server, model))[0])
    assert payload["prompt"] == sampler._text().decode([40, 41, 42]) and "top_k" not in payload
    assert done.token_ids == tuple(sampler._text().encode("no")) and done.log_probs == ()
    assert any("takes text" in said for said in notices().values())


def test_wrong_settings_are_refused_with_their_key():
    with pytest.raises(ConfigError, match=r"server.url: .*Set actor_rollout_ref"):
        addresses(None)
    with pytest.raises(ConfigError, match=r"server.url: not the address of a server"):
        ServerSampler("ftp://x", model="m")
    with pytest.raises(ConfigError, match=r"server.api: unknown kind of server"):
        ServerSampler("http://x", model="m", api="vlm")
