"""Log-probs of prompts from servers of each kind, and answers that cannot be used."""

from __future__ import annotations

import asyncio
import os
import signal
import time

import psutil
import pytest
import torch

from tests.harness.models import tiny_model_dir
from tests.harness.prompt_log_probs import sglang_answer, table_of, vllm_answer
from tests.harness.servers import Hangup, raw, serving
from tests.harness.waiting import HANGS
from verl.config import HFModelConfig, RolloutConfig
from verl.errors import NotBuiltError, RolloutError
from verl.metrics import notices
from verl.models import load_causal_lm
from verl.outcomes import run_now
from verl.rollout.hf.sampler import HFSampler
from verl.rollout.lost import EngineLostError
from verl.rollout.scores import ScoreRequest
from verl.rollout.server.child import host_process
from verl.rollout.server.host import Host
from verl.rollout.server.sampler import ServerSampler
from verl.rollout.server.scoring import MAX_RESTARTS, ScoringPool, ScoringReplica, WatchedHost
from verl.rollout.threaded import threaded
from verl.serving import loopback

VOCABULARY, PLACES = 259, 4
ROW = ScoreRequest("row 3 of the batch of step 7", (40, 41, 42, 43, 44), 2, top_k=VOCABULARY)
SAMPLED = ScoreRequest("row 3 of the batch of step 7", (40, 41, 42, 43, 44), 2)
PATHS = {"vllm": "/v1/completions", "sglang": "/generate"}
ANSWERS = {"vllm": vllm_answer, "sglang": sglang_answer}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tiny_model_dir(tmp_path_factory.mktemp("model"), initializer_range=0.3))


@pytest.fixture(scope="module")
def model(folder):
    return load_causal_lm(folder, torch.float32).eval()


def pool(folder, *urls, **settings):
    options = {"max_attempts": 1, "retry_delay": 0.0, **settings}
    replicas = [ScoringReplica(url, ServerSampler(url, model=folder, api_key=options.pop("key", None))) for url in urls]
    return ScoringPool(replicas, options.pop("vocabulary", VOCABULARY), PLACES, **options)


class FullServer:
    """Answers once there are as many rows as the server has places.

    Attributes:
        replica: the server as the pool knows it.
        most: rows that the pool had there at once.
    """

    replica: ScoringReplica

    def __init__(self, model):
        self.model, self.most, self._full = model, 0, asyncio.Barrier(PLACES)

    async def answer(self, payload):
        self.most = max(self.most, self.replica.load)
        await self._full.wait()
        return vllm_answer(self.model, payload)


def ask(folder, paths, request, **settings):
    """The answer of a server with these paths."""
    with serving(paths) as server:
        return asyncio.run(pool(folder, server.url, **settings).score_all([request]))[0]


def assert_exact(scores, model, request=ROW):
    table = table_of(model, list(request.token_ids))[request.start - 1 :]
    tokens = torch.tensor(request.scored)
    torch.testing.assert_close(torch.tensor(scores.log_probs), table.gather(-1, tokens[:, None])[:, 0])
    listed = table.gather(-1, torch.tensor(scores.top_ids))
    torch.testing.assert_close(torch.tensor(scores.top_log_probs), listed)


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_each_kind_of_server_gives_the_log_probs_of_the_model(folder, model, kind):
    marks = {"/get_model_info": (200, {}), "/version": (404, {})} if kind == "sglang" else {}
    with serving({PATHS[kind]: lambda payload: ANSWERS[kind](model, payload), **marks}) as server:
        scores = asyncio.run(pool(folder, server.url).score_all([ROW] * 8))
        [payload, *_] = server.payloads(PATHS[kind])
    for one in scores:
        assert_exact(one, model)
    assert payload.get("prompt", payload.get("input_ids")) == list(ROW.token_ids)


def test_a_host_of_this_library_gives_them_at_any_temperature(folder, model):
    warm = ScoreRequest("row", ROW.token_ids, 2, top_k=4, temperature=0.5)

    async def run():
        address = asyncio.get_running_loop().create_future()
        host = Host(threaded(HFSampler(folder)), "key")
        task = asyncio.ensure_future(host.serve(loopback(), address.set_result))
        try:
            replicas = [ScoringReplica("here", ServerSampler(await address, model=folder, api="verl", api_key="key"))]
            return await ScoringPool(replicas, VOCABULARY, 4, 1, 0.0).score_all([ROW, warm, SAMPLED])
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    exact, scaled, sampled = asyncio.run(run())
    assert_exact(exact, model)
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ROW.token_ids])).logits[0, 1:-1]
    torch.testing.assert_close(torch.tensor(scaled.top_log_probs), (2 * logits).log_softmax(-1).topk(4).values)
    assert sampled.top_ids is None
    torch.testing.assert_close(torch.tensor(sampled.log_probs), torch.tensor(exact.log_probs))


def changed(answer, change):
    """An answer in which the entry of the second response token is another one."""

    def answered(payload):
        status, content = answer(payload)
        change(content)
        return status, content

    return answered


def vllm_entries(content):
    return content["choices"][0]["prompt_logprobs"]


def triples(content):
    return content["meta_info"]["input_token_logprobs"]


def rename(entry, old, new):
    entry[new] = entry.pop(old)


VLLM_FAULTS = {
    "prompt_logprobs of 4 tokens, where 5 were sent": lambda c: vllm_entries(c).pop(),
    "response token 1 is 43, of which it gives no log-prob": lambda c: rename(vllm_entries(c)[3], "43", "999"),
    "a log-prob of null": lambda c: vllm_entries(c)[3]["43"].update(logprob=None),
    "a log-prob of nan": lambda c: vllm_entries(c)[3]["43"].update(logprob=float("nan")),
    "a log-prob of 0.5": lambda c: vllm_entries(c)[3]["43"].update(logprob=0.5),
    "it has no prompt_logprobs": lambda c: c["choices"][0].update(prompt_logprobs=None),
    "it has no 'choices'": lambda c: c.pop("choices"),
    "it lists token 700, and the policy's vocabulary has 259: another vocabulary": lambda c: [
        rename(entry, "7", "700") for entry in vllm_entries(c)[1:]
    ],
    "it lists 258 tokens at one position and 259 at another": lambda c: vllm_entries(c)[3].pop("7"),
    "it lists 258 tokens per position, where 259 were queried": lambda c: [e.pop("7") for e in vllm_entries(c)[1:]],
    "have a probability of 1.": lambda c: vllm_entries(c)[3]["7"].update(logprob=-1.0),
}
SGLANG_FAULTS = {
    "input_token_logprobs of 3 tokens, where 4 were queried": lambda c: triples(c).pop(),
    "response token 1 is 99 there, and 43 was sent": lambda c: triples(c)[2].__setitem__(1, 99),
    "a log-prob of null": lambda c: triples(c)[1].__setitem__(0, None),
    "it has no 'input_top_logprobs'": lambda c: c["meta_info"].pop("input_top_logprobs"),
    "it lists a token twice": lambda c: [p.__setitem__(0, p[1]) for p in c["meta_info"]["input_top_logprobs"][1:]],
}


@pytest.mark.parametrize(
    ("kind", "says", "change"),
    [("vllm", *fault) for fault in VLLM_FAULTS.items()] + [("sglang", *fault) for fault in SGLANG_FAULTS.items()],
)
def test_an_answer_that_is_not_the_rows_is_an_error_with_its_row(folder, model, kind, says, change):
    marks = {"/get_model_info": (200, {}), "/version": (404, {})} if kind == "sglang" else {}
    answer = changed(lambda payload: ANSWERS[kind](model, payload), change)
    with pytest.raises(RolloutError) as caught:
        ask(folder, {PATHS[kind]: answer, **marks}, ROW, max_attempts=3)
    assert says in str(caught.value) and ROW.id in str(caught.value) and "http://127.0.0.1" in str(caught.value)
    assert not isinstance(caught.value, EngineLostError), "another server would say the same"


def test_a_server_that_refuses_prompt_log_probs_is_named_with_its_reason(folder):
    reason = {"error": {"message": "Requested prompt logprobs of 259, which is greater than max allowed: 20"}}
    with pytest.raises(RolloutError, match=r"(?s)127\.0\.0\.1.*row 3.*max allowed: 20"):
        ask(folder, {PATHS["vllm"]: (400, reason)}, ROW)


def test_servers_that_take_text_and_other_temperatures_are_refused(folder, model):
    with serving({"/version": (404, {})}) as server:
        sampler = ServerSampler(server.url, model=folder, wants_log_probs=False)
        with pytest.raises(NotBuiltError, match="gives no log-probs of tokens that are sent to it"):
            asyncio.run(sampler.score(SAMPLED))
    warm = ScoreRequest("row", ROW.token_ids, 2, temperature=0.5)
    with pytest.raises(RolloutError, match="at temperature 1 alone"):
        ask(folder, {PATHS["vllm"]: lambda payload: vllm_answer(model, payload)}, warm)


def test_a_row_whose_connection_breaks_goes_to_another_server(folder, model):
    with (
        serving({PATHS["vllm"]: Hangup()}) as broken,
        serving({PATHS["vllm"]: lambda payload: vllm_answer(model, payload)}) as good,
    ):
        servers = pool(folder, broken.url, good.url, max_attempts=2)
        scores = asyncio.run(servers.score_all([ROW] * 6))
        assert good.count(PATHS["vllm"]) == 6
        lost = broken.count(PATHS["vllm"])
    for one in scores:
        assert_exact(one, model)
    assert lost >= 1 and servers.take_counts() == {"requests": 6 + lost, "retries": lost, "restarts": 0}
    assert set(servers.take_counts().values()) == {0}


def test_a_busy_server_gets_a_row_again_after_the_pause_that_it_requests(folder, model):
    times = []

    def answer(payload):
        times.append(time.monotonic())
        return vllm_answer(model, payload) if len(times) > 1 else raw(429, {}, **{"retry-after": "1"})

    with serving({PATHS["vllm"]: answer}) as server:
        asyncio.run(pool(folder, server.url, max_attempts=2).score_all([SAMPLED]))
    first, second = times
    assert second - first >= 1


def test_a_row_that_every_server_loses_is_an_error_after_its_attempts(folder):
    with serving({PATHS["vllm"]: Hangup()}) as broken:
        servers = pool(folder, broken.url, max_attempts=3)
        with pytest.raises(EngineLostError, match="row 3 of the batch of step 7 was lost in 3 attempts"):
            asyncio.run(servers.score_all([ROW]))
        assert broken.count(PATHS["vllm"]) == 3


def test_no_more_rows_are_in_flight_than_there_are_places(folder, model):
    answers = FullServer(model)
    with serving({PATHS["vllm"]: answers.answer}) as server:
        servers = pool(folder, server.url)
        (answers.replica,) = servers.replicas
        asyncio.run(servers.score_all([SAMPLED] * 20))
        assert server.count(PATHS["vllm"]) == 20 and answers.most == PLACES


def test_rows_of_a_server_that_refuses_do_not_crowd_the_other(folder, model):
    answers = FullServer(model)
    with serving({PATHS["vllm"]: (503, {})}) as refusing, serving({PATHS["vllm"]: answers.answer}) as good:
        servers = pool(folder, refusing.url, good.url, max_attempts=2)
        _, answers.replica = servers.replicas
        for scores in asyncio.run(servers.score_all([SAMPLED] * 20)):
            assert len(scores.log_probs) == 3
        assert good.count(PATHS["vllm"]) == 20 and refusing.count(PATHS["vllm"]) >= 1 and answers.most == PLACES


def test_of_tied_tokens_the_sent_one_is_the_first_that_is_left_out(folder):
    entries = [None, *({str(token): {"logprob": -1.0, "rank": rank} for token, rank in listed} for listed in (
        [(42, 2), (7, 1), (9, 2)], [(43, 1), (9, 2)], [(44, 3), (7, 1), (9, 2)],
    ))]  # fmt: skip
    answer = 200, {"choices": [{"prompt_logprobs": entries}]}
    row = ScoreRequest("row", (41, 42, 43, 44), 1, top_k=2)
    scores = ask(folder, {PATHS["vllm"]: answer}, row)
    assert scores.top_ids.tolist() == [[7, 9], [43, 9], [7, 9]]
    assert scores.log_probs.tolist() == [-1.0] * 3


def watched(folder, command=lambda rollout, section: host_process(rollout, section, "cpu", "the host"), timeouts=()):
    """A host, whose samplers over one process after the other have these time limits."""
    rollout, section = RolloutConfig(prompt_length=8, response_length=8), HFModelConfig(path=folder)
    limits = iter(timeouts)

    def connect(process):
        limit = next(limits, 300.0)
        sampler = ServerSampler(process.url, model=folder, api="verl", api_key=process.key, timeout=limit)
        run_now(sampler.connect())
        return sampler

    return WatchedHost("the host", lambda: command(rollout, section), connect, 300.0)


def test_hosts_divide_the_threads_of_the_process_that_starts_them(folder, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    host = host_process(RolloutConfig(), HFModelConfig(path=folder), "cpu", "the host", count=3)
    try:
        assert psutil.Process(host.process.pid).environ()["OMP_NUM_THREADS"] == "2"
    finally:
        host.close()


@pytest.mark.slow
def test_a_host_that_hangs_is_started_again_also_after_a_failed_start(folder, model):
    faults = iter([folder, folder + "-is-not-there"])

    def command(rollout, section):
        path = next(faults, folder)
        return host_process(rollout, HFModelConfig(path=path), "cpu", "the host")

    host = watched(folder, command, timeouts=[2.0])  # of the process that is stopped
    servers = ScoringPool([host], VOCABULARY, 4, max_attempts=3, retry_delay=0.0)
    try:
        host.mending().result(HANGS)
        first = host.process
        os.kill(first.process.pid, signal.SIGSTOP)
        (scores,) = asyncio.run(servers.score_all([ROW]))
        assert_exact(scores, model)
        assert servers.take_counts() == {"requests": 2, "retries": 1, "restarts": 2}
        assert not first.is_alive and "did not answer within 2 s" in notices()["the host, start 2"]
        assert "is-not-there" in notices()["the host, start 2 failed"]
    finally:
        host.close()


@pytest.mark.slow
def test_a_host_that_never_comes_back_is_given_up_after_its_restarts(folder):
    paths = iter([folder])

    def command(rollout, section):
        return host_process(rollout, HFModelConfig(path=next(paths, "/is-not-there")), "cpu", "the host")

    host = watched(folder, command)
    servers = ScoringPool([host], VOCABULARY, 4, max_attempts=3, retry_delay=0.0)
    try:
        asyncio.run(servers.check(ROW))
        os.kill(host.process.process.pid, signal.SIGKILL)
        host.process.process.wait(HANGS)  # its connections break a moment before, and attempts have no pause here
        with pytest.raises(EngineLostError, match=r"(?s)no server is left of 1: the host.*is-not-there"):
            asyncio.run(servers.score_all([ROW]))
        assert host.restarts == MAX_RESTARTS == 3
    finally:
        host.close()


@pytest.mark.slow
def test_rows_wait_for_the_only_host_until_it_is_back(folder, model):
    host = watched(folder)
    servers = ScoringPool([host], VOCABULARY, 4, max_attempts=3, retry_delay=2.0)
    try:
        asyncio.run(servers.check(ROW))
        first = host.process
        os.kill(first.process.pid, signal.SIGKILL)
        first.process.wait(HANGS)
        for scores in asyncio.run(servers.score_all([ROW] * 6)):
            assert_exact(scores, model)
        assert host.process is not first and not first.is_alive and servers.take_counts()["restarts"] == 1
    finally:
        host.close()
    assert not host.process.is_alive
    with pytest.raises(EngineLostError, match="the host is closed"):
        asyncio.run(servers.score_all([ROW]))
