"""The gate between requests and weights, and the checks on what an engine answers."""

from __future__ import annotations

import asyncio
import dataclasses
import math

import pytest
import torch

from tests.harness.plugin import within
from verl.errors import RolloutError
from verl.rollout import Request, SamplingParams
from verl.rollout.gated import NEVER, GatedSampler, Sampled, among_all, invalid_reason, request_seed
from verl.rollout.stream_check import StreamCheck, shapes_on_disk
from verl.weight_sync import WeightChunk, chunk_weights

ASKED = Request("a", (1, 2), SamplingParams(max_tokens=3), uid="row", sample_index=1)
GOOD = Sampled((4, 5), (-0.1, -0.2), "stop")


class Scripted(GatedSampler):
    """Answers when it is told to."""

    def __init__(self, answer=GOOD):
        super().__init__(vocab_size=10, max_model_len=32, name="scripted")
        self.answer, self.may_answer, self.log = answer, asyncio.Event(), []

    async def _sample(self, request):
        self.log.append(f"{request.id} in")
        await self.may_answer.wait()
        self.log.append(f"{request.id} out")
        return self.answer

    async def _load(self, chunks, version):
        self.log.append(f"load {version}")
        for chunk in chunks:
            assert chunk.version == version

    async def _sleep_engine(self, level):
        self.log.append(f"sleep {level}")

    async def _wake_engine(self):
        self.log.append("wake")

    async def _abort(self, request_ids):
        return 0


def chunks(version):
    return chunk_weights([("w", torch.ones(2))], 64, version)


async def soon():
    for _ in range(5):
        await asyncio.sleep(0)


@within(10)
async def test_an_update_waits_for_running_requests_and_waiting_ones_get_the_new_version():
    sampler = Scripted()
    first = asyncio.ensure_future(sampler.generate(ASKED))
    await soon()
    update = asyncio.ensure_future(sampler.update_weights(chunks(7), 7))
    await soon()
    second = asyncio.ensure_future(sampler.generate(dataclasses.replace(ASKED, id="b")))
    await soon()
    assert sampler.log == ["a in"]
    sampler.may_answer.set()
    first, second, _, log = await first, await second, await update, sampler.log
    assert first.token_versions == (0, 0) and second.token_versions == (7, 7)
    assert log == ["a in", "a out", "load 7", "b in", "b out"]


async def test_a_failed_update_stops_the_sampler_until_a_whole_one_came():
    def broken():
        yield next(iter(chunks(1)))
        raise RolloutError("the trainer is gone")

    sampler = Scripted()
    sampler.may_answer.set()
    with pytest.raises(RolloutError, match="the trainer is gone"):
        await sampler.update_weights(broken(), 1)
    with pytest.raises(RolloutError, match="version 1 did not finish; send them again"):
        await sampler.generate(ASKED)
    await sampler.update_weights(chunks(2), 2)
    assert (await sampler.generate(ASKED)).token_versions == (2, 2)


@within(10)
async def test_a_cancelled_request_lets_the_update_through():
    sampler = Scripted()
    task = asyncio.ensure_future(sampler.generate(ASKED))
    await soon()
    update = asyncio.ensure_future(sampler.update_weights(chunks(1), 1))
    await soon()
    task.cancel()
    await update
    assert sampler.version == 1


async def test_a_sleeping_sampler_samples_nothing_and_after_level_2_wants_weights():
    sampler = Scripted()
    sampler.may_answer.set()
    await sampler.sleep(2)
    with pytest.raises(RolloutError, match="call wake"):
        await sampler.generate(ASKED)
    await sampler.wake()
    with pytest.raises(RolloutError, match="freed by sleep"):
        await sampler.generate(ASKED)
    await sampler.update_weights(chunks(3), 3)
    assert (await sampler.generate(ASKED)).token_ids == (4, 5)
    with pytest.raises(RolloutError, match="no such sleep level"):
        await sampler.sleep(3)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (Sampled((4,), (-0.1,), "because"), "finish reason"),
        (Sampled((), (), "stop"), "no tokens"),
        (Sampled((4, 4, 4, 4), (-0.1,) * 4, "length"), "4 tokens where max_tokens leaves room for 3"),
        (Sampled((10,), (-0.1,), "stop"), "outside 0 to 9"),
        (Sampled((4, 5), (-0.1,), "stop"), "1 log-probs for 2 tokens"),
        (Sampled((4,), (math.nan,), "stop"), "a log-prob of nan"),
        (Sampled((4,), (0.5,), "stop"), "a log-prob of 0.5"),
    ],
)
async def test_nonsense_from_an_engine_is_named(answer, said):
    assert said in invalid_reason(ASKED, answer, 10)

    with pytest.raises(RolloutError, match="answered request 'a' with nonsense"):
        sampler = Scripted(answer)
        sampler.may_answer.set()
        await sampler.generate(ASKED)


def test_nothing_is_wrong_with_an_empty_aborted_answer_or_with_missing_log_probs():
    assert invalid_reason(ASKED, Sampled((), (), "abort"), 10) == ""
    assert invalid_reason(ASKED, Sampled((1,), None, "stop"), 10) == ""


def test_the_seed_of_a_request_depends_on_all_of_its_key_and_on_nothing_else():
    others = [
        dataclasses.replace(ASKED, sample_index=2),
        dataclasses.replace(ASKED, uid="other"),
        dataclasses.replace(ASKED, generated_prefix=(4,)),
        dataclasses.replace(ASKED, sampling=SamplingParams(max_tokens=3, seed=1)),
    ]
    seeds = [request_seed(request, 0) for request in [ASKED, *others]] + [request_seed(ASKED, 5)]
    assert len(set(seeds)) == 6 and all(0 <= seed < 2**31 for seed in seeds)
    assert request_seed(dataclasses.replace(ASKED, id="another", token_ids=(9,)), 0) == seeds[0]


def test_a_stream_is_whole_only_with_every_weight_once_in_its_shape_and_version():
    shapes = {"a": (2,), "b": (3,)}
    a, b = ("a", torch.ones(2)), ("b", torch.ones(3))

    def check(*made):
        watch = StreamCheck(1, shapes)
        list(watch.watched(made))
        return watch.finished()

    assert check(WeightChunk(1, [a], False), WeightChunk(1, [b], True)) == shapes
    assert check(WeightChunk(1, [a, b, ("lm_head.weight", torch.ones(1))], True)) == shapes
    for made, said in [
        ([WeightChunk(1, [a], True)], "1 weights did not arrive: b"),
        ([WeightChunk(1, [a, b], False)], "interrupted"),
        ([WeightChunk(2, [a, b], True)], "another version"),
        ([WeightChunk(1, [a, a], True)], "arrived twice"),
        ([WeightChunk(1, [("c", torch.ones(1))], True)], "no such weight"),
        ([WeightChunk(1, [("a", torch.ones(3)), b], True)], "another shape"),
    ]:
        with pytest.raises(RolloutError, match=said):
            check(*made)


def test_shapes_are_read_from_the_headers_of_safetensors_files(tmp_path):
    from safetensors.torch import save_file

    save_file({"a": torch.ones(2, 3)}, str(tmp_path / "model-1.safetensors"), metadata={"format": "pt"})
    save_file({"b": torch.ones(4)}, str(tmp_path / "model-2.safetensors"))
    assert shapes_on_disk(tmp_path) == {"a": (2, 3), "b": (4,)}
    assert shapes_on_disk(tmp_path / "nowhere") is None


@pytest.mark.parametrize("temperature", [0.05, 0.7, 1.0, 1.5])
def test_a_log_prob_gets_back_the_share_of_tokens_that_are_not_drawn(temperature):
    """Also where the biased probabilities, or the factor that undoes the bias, are beyond float64."""
    logits, excluded = torch.tensor([0.3, 1.0, -0.5, 0.9, 2.0], dtype=torch.float64), [1, 4]
    biased = logits.clone()
    biased[excluded] += NEVER
    complete, left = ((scores / temperature).log_softmax(-1).tolist() for scores in (logits, biased))
    restored = [among_all(left[token], [left[one] for one in excluded], temperature) for token in (0, 2, 3)]
    assert restored == pytest.approx([complete[token] for token in (0, 2, 3)], rel=1e-9)
    assert left[0] - complete[0] > 0.5, "their share is large"
    assert among_all(-0.5, [], temperature) == among_all(-0.5, [float("-inf")], temperature) == -0.5
