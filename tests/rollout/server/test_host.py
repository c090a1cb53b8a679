"""What the host of a sampler answers to requests that no program of this library sends: bad ones harm nobody else."""

from __future__ import annotations

import asyncio
import os

import pytest

from tests.harness.models import tiny_model_dir
from verl.rollout.base import Request, SamplingParams
from verl.rollout.hf.sampler import HFSampler
from verl.rollout.server import own
from verl.rollout.server.host import Host
from verl.rollout.server.process import HostProcess
from verl.serving import loopback
from verl.serving.client import Client, Reply

KEY = "the key of this test"
GOOD = own.request_json(Request("good", (5, 6), SamplingParams(max_tokens=4)))


@pytest.fixture(scope="module")
def sampler(tmp_path_factory):
    return HFSampler(str(tiny_model_dir(tmp_path_factory.mktemp("model"))), device="cpu")


def replies(sampler, *requests: tuple[str, object]) -> list[Reply]:
    """The answers to requests that come at the same time, each over a connection of its own."""

    async def one(address, path, payload):
        return await Client(address, key=KEY).ask("POST", path, payload, 120)

    async def run():
        address: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        host = Host(sampler, KEY, transport="gloo")
        serving = asyncio.ensure_future(host.serve(loopback(), address.set_result))
        try:
            where = await address
            return await asyncio.gather(*(one(where, *request) for request in requests))
        finally:
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)

    return asyncio.run(run())


def generate(**changes) -> bytes:
    sampling = {**GOOD["sampling"], **changes.pop("sampling", {})}
    return own.GENERATE, {**GOOD, "id": "bad", **changes, "sampling": sampling}


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (generate(sampling={"max_tokens": "4"}), "max_tokens is '4', allowed: int"),
        (generate(sampling={"max_tokens": 2.5}), "max_tokens is 2.5, allowed: int"),
        (generate(sampling={"max_tokens": True}), "max_tokens is True, allowed: int"),
        (generate(sampling={"max_tokens": 10**9}), "longer than the model's context"),
        (generate(sampling={"top_k": 1.5}), "top_k is 1.5, allowed: int"),
        (generate(sampling={"top_p": None}), "top_p is None, allowed: int or float"),
        (generate(sampling={"temperature": float("nan")}), "not a temperature"),
        (generate(sampling={"temperature": 1e-300}), "not a temperature"),
        (generate(sampling={"min_tokens": 1.5}), "min_tokens is 1.5, allowed: int"),
        (generate(sampling={"repetition_penalty": "1"}), "repetition_penalty is '1', allowed: int or float"),
        (generate(sampling={"seed": "x"}), "seed is 'x', allowed: int"),
        (generate(sampling={"foo": 1}), "foo"),
        (generate(priority="first"), "priority is 'first', allowed: int"),
        (generate(uid=[1]), "uid is [1], allowed: str"),
        (generate(token_ids=[5, 7.5]), r"token ids (5, 7.5)"),
        (generate(token_ids=[5, 10**30]), "outside the vocabulary"),
        (generate(token_ids=[]), "the prompt is empty"),
        ((own.GENERATE, [1]), "not a request"),
        ((own.ABORT, {"request_ids": 5}), "Allowed: a list"),
        ((own.SLEEP, {"level": 9}), "no such sleep level"),
        ((own.TAKE, {"kind": "pigeon", "address": {}, "version": 1}), "does not take weights by it"),
        ((own.TAKE, {"kind": "os:system", "address": {"x": "true"}, "version": 1}), "does not take weights by it"),
        ((own.UPDATE, {"folder": "/", "version": "../1"}), "not a whole number"),
        ((own.UPDATE, {"folder": "/", "version": 99}), "no weights in this folder"),
    ],
)
def test_a_bad_request_is_refused_by_name_and_the_one_beside_it_is_answered(sampler, bad, said):
    refused, good = replies(sampler, bad, (own.GENERATE, GOOD))
    assert refused.status == 400 and said in refused.json()["error"]["message"]
    assert good.status == 200 and len(good.json()["token_ids"]) == 4


def test_only_images_may_have_a_long_body(sampler):
    long = {"pictures": "p", "content": "{}", "blobs": ["x" * (17 << 20)]}
    tokens, images = replies(sampler, (own.GENERATE, long), (own.SHOW, long))
    assert tokens.status == 413 and f"at most {16 << 20} are allowed" in tokens.json()["error"]["message"]
    assert images.status == 400 and "not the images of a request" in images.json()["error"]["message"]


def test_an_abort_of_no_requests_ends_none_and_one_that_names_none_ends_all(sampler):
    async def run():
        host = Host(sampler, KEY)
        sampling = SamplingParams(max_tokens=60, ignore_eos=True)
        running = asyncio.ensure_future(sampler.generate(Request("long", (5, 6), sampling)))
        await asyncio.sleep(0)
        none, whole = await host._abort({"request_ids": []}), await host._abort({})
        return none["aborted"], whole["aborted"], (await running).finish_reason

    assert asyncio.run(run()) == (0, 1, "abort")


def test_a_host_that_nobody_waited_for_leaves_neither_pipe_nor_folder():
    host = HostProcess([], "cpu", "a host that is not needed")
    pipe, folder = host._pipe, host.folder
    os.fstat(pipe)
    host.close()
    host.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(pipe)
    assert not folder.exists()
