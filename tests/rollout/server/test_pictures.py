"""Images in samplers over servers and in a child process: the same bits as in this process, sent once for a prompt."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from tests.harness.samplers import sample
from tests.harness.servers import completion, serving
from tests.harness.vision import pictures, processed, prompt_tokens
from tests.rollout.hf.test_vision import requests
from tests.rollout.server.test_kinds import NOT_VLLM, sglang_answer
from tests.rollout.server.test_sampler import PATH, ask, over
from verl.config import HFModelConfig, RolloutConfig
from verl.errors import NotBuiltError, RolloutError
from verl.models import export_weights, load_causal_lm
from verl.rollout import place
from verl.rollout.base import PICTURE_FIELDS, Completion, Request, SamplingParams
from verl.rollout.gated import NEVER
from verl.rollout.hf.sampler import HFSampler
from verl.rollout.lost import EngineLostError
from verl.rollout.server import own
from verl.rollout.server import pictures as module
from verl.rollout.server.host import Host
from verl.rollout.server.openai import GENERATE, VLLMDialect
from verl.rollout.server.pictures import png_url
from verl.rollout.server.sampler import ServerSampler
from verl.rollout.threaded import threaded
from verl.serving import loopback
from verl.weight_sync import chunk_weights

KEY = "the key of this test"
PROMPTS = 3
"""With images; of `requests`, which has one prompt without any."""


@pytest.fixture(scope="module")
def config(seeing_model):
    return load_causal_lm(str(seeing_model())).config


@pytest.fixture(scope="module")
def jobs(seeing_model, config):
    return list(requests(seeing_model(), config))


@pytest.fixture(scope="module")
def expected(seeing_model, jobs):
    return drawn(sample(HFSampler(str(seeing_model()), full_determinism=True), jobs))


def drawn(completions):
    return [(done.token_ids, done.log_probs, done.finish_reason) for done in completions]


class CountingHost(Host):
    """Counts the transfers of images, and the fields that came."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.shown = []

    async def _show(self, payload):
        answer = await super()._show(payload)
        fields = self._pictures.of(payload["pictures"]) or {}
        self.shown.append([name for name, value in fields.items() if value])
        return answer


def through_a_host(sampler, folder, jobs):
    """The answers of a host of a sampler to all requests at once, over HTTP, and the host."""

    async def run():
        address = asyncio.get_running_loop().create_future()
        host = CountingHost(sampler, KEY)
        serving_task = asyncio.ensure_future(host.serve(loopback(), address.set_result))
        try:
            client = ServerSampler(await address, model=str(folder), api="verl", api_key=KEY, max_attempts=1)
            await client.connect()
            return await asyncio.gather(*map(client.generate, jobs), return_exceptions=True), host
        finally:
            serving_task.cancel()
            await asyncio.gather(serving_task, return_exceptions=True)

    return asyncio.run(run())


def test_a_host_answers_with_the_bits_of_the_sampler_and_gets_images_once(seeing_model, jobs, expected):
    sampler = threaded(HFSampler(str(seeing_model()), full_determinism=True))
    answers, host = through_a_host(sampler, seeing_model(), jobs)
    assert drawn(answers) == expected and len(jobs) == 16
    assert host.shown == [["multi_modal_inputs"]] * PROMPTS
    assert sampler.stats()["images_encoded"] == 4
    sampler.close()


def test_images_that_a_host_has_dropped_are_sent_again(seeing_model, jobs, expected, monkeypatch):
    monkeypatch.setattr(module, "KEPT_BYTES", 1)
    sampler = HFSampler(str(seeing_model()), full_determinism=True)
    one_by_one = [answer for job in jobs[::4] for answer in through_a_host(sampler, seeing_model(), [job])[0]]
    assert drawn(one_by_one) == expected[::4]
    monkeypatch.setattr(module.PictureStore, "of", lambda *_: None)
    (lost,), host = through_a_host(sampler, seeing_model(), jobs[:1])
    assert isinstance(lost, EngineLostError) and len(host.shown) == module.ATTEMPTS


def test_images_whose_transfer_failed_are_sent_again_by_the_next_attempt():
    faults, sent = [EngineLostError("gone")], []

    async def send(payload):
        if faults:
            raise faults.pop()
        sent.append(payload)

    async def post(payload):
        return {"tokens": 1} if sent else {module.LACKS: ["images"]}

    async def run():
        sender, request = module.PictureSender(send), Request("a", (5,), SamplingParams(), images=pictures([(2, 3)]))
        with pytest.raises(EngineLostError, match="gone"):
            await sender.exchange(request, {}, post)
        return await sender.exchange(request, {}, post)

    assert asyncio.run(run()) == {"tokens": 1} and len(sent) == 1


class Seer:
    """Reads pictures, and keeps its requests; each field of a host's sampler that is used here."""

    picture_fields = ("images",)
    version, logprobs_mode = 0, "processed_logprobs"

    def __init__(self):
        self.requests = []

    def stats(self):
        return {}

    async def generate(self, request):
        self.requests.append(request)
        return Completion(request.id, (7,), (-0.5,), "length", (0,))


def test_an_engine_with_a_processor_gets_the_pixels_alone_and_samples_share_them(seeing_model, jobs):
    engine, images = Seer(), pictures([(56, 56), (28, 84)])
    seeing = [replace(job, images=images) for job in jobs[:3]]
    _, host = through_a_host(engine, seeing_model(), seeing)
    assert host.shown == [["images"]]
    assert {len({id(image) for image in one.images}) for one in engine.requests} == {2}
    assert len({id(request.images[0]) for request in engine.requests}) == 1
    for sent, arrived in zip(images, engine.requests[0].images):
        assert arrived.mode == "RGB" and np.array_equal(np.asarray(sent), np.asarray(arrived))


def test_images_that_have_no_encoding_are_refused_by_name(seeing_model, jobs):
    odd = replace(jobs[0], images=[object()], multi_modal_inputs=None)
    (said,), _ = through_a_host(Seer(), seeing_model(), [odd])
    assert isinstance(said, RolloutError) and "images cannot be sent: values of type builtins.object" in str(said)


def test_images_too_large_for_a_host_are_refused_before_they_are_sent(seeing_model, jobs, monkeypatch):
    request = replace(jobs[0], images=pictures([(56, 84)] * 3))
    body = json.dumps({"pictures": "x" * 32, **module.pack(request, ["images"])}).encode()
    monkeypatch.setattr(module, "MOST_BYTES", len(body) + module.ENVELOPE)
    module.pack(request, ["images"])
    monkeypatch.setattr(module, "MOST_BYTES", len(body) - 1)
    (said,), host = through_a_host(Seer(), seeing_model(), [request])
    assert isinstance(said, RolloutError) and host.shown == []
    for words in (f"request {request.id}", f"{len(body) - 1} bytes", "max_frames", "data.mm_processor_kwargs"):
        assert words in str(said)


def test_a_video_arrives_at_a_host_as_it_was_sent(seeing_model, jobs):
    engine, frames = Seer(), pictures([(56, 84)] * 3)
    clip = {"frames": frames, "indices": [0, 4, 8], "fps": 25.0, "total": 9}
    engine.picture_fields = ("videos",)
    through_a_host(engine, seeing_model(), [replace(jobs[0], videos=[clip])])
    (arrived,) = engine.requests[0].videos
    assert {**arrived, "frames": []} == {**clip, "frames": []}
    assert all(np.array_equal(np.asarray(a), np.asarray(b)) for a, b in zip(arrived["frames"], frames, strict=True))


@pytest.mark.slow
def test_a_sampler_in_a_child_process_gives_the_bits_of_one_in_this_process(seeing_model, jobs, expected):
    folder, plain = str(seeing_model()), RolloutConfig(name="hf", full_determinism=True)
    rollout = replace(plain, checkpoint_engine=replace(plain.checkpoint_engine, backend="shared_memory"))
    sampler = place.place_sampler(rollout, HFModelConfig(path=folder), "cpu")
    weights = list(export_weights(load_causal_lm(folder, torch.float32)))
    asyncio.run(sampler.update_weights(chunk_weights(weights, 1 << 16, 1), 1))
    answers = sample(sampler, jobs)
    asyncio.run(sampler.confirm(1))
    sampler.close()
    assert drawn(answers) == expected
    assert sampler.stats()["images_encoded"] == 4


def png(mode, size):
    file = io.BytesIO()
    Image.new(mode, size).save(file, "PNG")
    return file.getvalue()


def shown(content, *blobs):
    return {"pictures": "x", "content": content, "blobs": [base64.b64encode(blob).decode() for blob in blobs]}


def image_of(tag, blob, *rest):
    parts = "".join(f"{one}, " for one in rest)
    return shown(f'{{"images": [{{"$": ["{tag}", {parts}[0, 0, {len(blob)}]]}}]}}', blob)


@pytest.mark.parametrize(
    ("payload", "said"),
    [
        (image_of("png", png("1", (8000, 8000))), "8000 x 8000 pixels, with which the images have too many"),
        (image_of("image", b"abc", '"RGB"', "[7000, 8000]"), "7000 x 8000 pixels, with which"),
        (image_of("image", b"abc", '"RGB"', "[2, 2]"), "not enough image data"),
        (image_of("png", b"abc"), "cannot identify image file"),
        (shown('{"images": [5]}'), "allowed are images, videos, multi_modal_inputs"),
        (shown('{"videos": [{"frames": [5], "indices": [0], "fps": 2.0, "total": 1}]}'), "allowed are images"),
        (shown('{"videos": [{"frames": [], "indices": [], "fps": 2.0, "total": 1}]}'), "a video has frames"),
        (shown('{"videos": [{"frames": [5], "indices": [0, 1], "fps": 2.0, "total": 1}]}'), "as many indices"),
        (shown("{}"), "allowed are images"),
        (shown("[]"), "not the images of a request"),
        (shown("[" * 100_000), "damaged batch data"),
        (shown('{"images": [{"$": ["os.system", "true"]}]}'), "unknown kind of value"),
        (shown('{"multi_modal_inputs": {"pixel_values": [1.5]}}'), "tensors of finite numbers"),
        (shown('{"multi_modal_inputs": {"x": {"$": ["tensor", "F32", [1], [0, 0, 4]]}}}', b"\0\0\xc0\x7f"), "finite"),
        ({"pictures": "x", "content": "{}", "blobs": ["?"]}, "not the images of a request"),
        ({"pictures": "x"}, "KeyError: 'blobs'"),
    ],
    ids=lambda value: None if isinstance(value, str) else "",
)
def test_what_is_hostile_or_no_image_is_refused_before_it_is_decoded(payload, said, monkeypatch):
    real = Image.Image.copy
    monkeypatch.setattr(Image.Image, "copy", lambda image: real(image) if image.width < 100 else pytest.fail("decoded"))
    store = module.PictureStore()
    with pytest.raises(RolloutError, match=r"not the images of a request") as refused:
        asyncio.run(store.add(payload))
    assert said in str(refused.value) and store.of("x") is None


@pytest.mark.parametrize("name", [None, "", 1, ["x"]])
def test_images_without_a_name_are_refused_when_sent_and_when_used(name):
    store = module.PictureStore()
    with pytest.raises(RolloutError, match="images have a name"):
        asyncio.run(store.add({"pictures": name, "content": "{}", "blobs": []}))
    with pytest.raises(RolloutError, match="images have a name"):
        store.of(name)


def test_many_small_files_of_large_images_count_together():
    blob = png("1", (6000, 6000))
    both = f'{{"$": ["png", [1, 0, {len(blob)}]]}}, {{"$": ["png", [2, 0, {len(blob)}]]}}'
    with pytest.raises(RolloutError, match="6000 x 6000 pixels"):
        module.unpack(shown(f'{{"images": [{both}]}}', b"", blob, blob))


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda inputs: {**inputs, "pixel_values": inputs["pixel_values"][:, :-1]}, "not what the tower takes"),
        (lambda inputs: {**inputs, "pixel_values": inputs["pixel_values"].long()}, "not what the tower takes"),
        (lambda inputs: {**inputs, "image_grid_thw": torch.tensor([[-1, -4, 4]])}, "have 16 patches"),
        (lambda inputs: {**inputs, "image_grid_thw": torch.tensor([[1, 2, 8]]), "x": torch.ones(1)}, "no such input"),
        (lambda inputs: {"pixel_values": inputs["pixel_values"]}, "image_grid_thw is not"),
    ],
)
def test_inputs_that_would_fail_in_the_tower_harm_no_other_request(seeing_model, jobs, expected, spoil, said):
    sampler = HFSampler(str(seeing_model()), full_determinism=True)
    bad = replace(jobs[0], id="bad", multi_modal_inputs=spoil(jobs[0].multi_modal_inputs))
    (refused, *good), _ = through_a_host(sampler, seeing_model(), [bad, *jobs[:2]])
    assert isinstance(refused, RolloutError) and said in str(refused)
    assert drawn(good) == expected[:2]


def test_a_request_cannot_bring_images_in_another_way_than_under_a_name():
    plain = own.request_json(Request("a", (5,), SamplingParams()))
    for name in PICTURE_FIELDS:
        with pytest.raises(RolloutError, match=f"multiple values for keyword argument '{name}'"):
            own.from_json({**plain, name: ["x"]})


@pytest.fixture(scope="module")
def seen(seeing_model, config):
    """Two samples of a prompt with two images; of four and six tokens."""
    images = pictures([(56, 56), (84, 56)])
    inputs = processed(images, seeing_model())
    tokens = tuple(prompt_tokens(config, inputs, [9, 11]))
    sampling = SamplingParams(max_tokens=4)
    both = [Request(f"r{n}", tokens, sampling, uid="p", sample_index=n, images=images, generated_prefix=(8,))
            for n in range(2)]  # fmt: skip
    start, pad, end = config.vision_start_token_id, config.image_token_id, config.vision_end_token_id
    return both, [9, 11, start, pad, end, start, pad, end, 11, 9, 8]


def pixels(url):
    kind, _, body = url.partition(",")
    assert kind == "data:image/png;base64"
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(body))))


def vllm_answer(request, **changes):
    used = [*request.token_ids, *request.generated_prefix]
    logs = {"content": [{"token_id": 7, "logprob": -0.5}, {"token_id": 9, "logprob": -0.25}]}
    choice = {"token_ids": [7, 9], "logprobs": logs, "finish_reason": "length"}
    return 200, {"choices": [choice], "prompt_token_ids": used, **changes}


def test_a_vllm_server_gets_one_placeholder_and_one_png_for_each_image(seeing_model, seen, config):
    (first, second), collapsed = seen
    answer = vllm_answer(first)
    with serving({GENERATE: answer, PATH: completion()}) as server:
        sampler = over(server, seeing_model())
        for done in ask(sampler, first, second):
            assert (done.token_ids, done.log_probs) == ((7, 9), (-0.5, -0.25))
        ask(sampler, replace(first, images=None))
        one, two = sorted(server.payloads(GENERATE), key=lambda payload: payload["request_id"])
        (text,) = server.payloads(PATH)
    assert one["token_ids"] == collapsed and one["return_token_ids"] is True and one["request_id"] == "r0"
    for part, image in zip(one["content_parts"], first.images, strict=True):
        assert part["type"] == "image_url" and np.array_equal(pixels(part["url"]), np.asarray(image))
    never = {str(config.image_token_id): NEVER, str(config.video_token_id): NEVER}
    assert one["sampling_params"]["logit_bias"] == never == text["logit_bias"]
    assert (
        one["sampling_params"]["max_tokens"] == 3 and one["sampling_params"]["seed"] != two["sampling_params"]["seed"]
    )
    assert text["prompt"] == [*first.token_ids, 8], "placeholders without an image are tokens"
    assert (
        sampler._dialect.key(first) == "generate-tokens-r0"
        and sampler._dialect.key(replace(first, images=None))[:5] == "cmpl-"
    )


def test_images_become_png_outside_the_event_loop_and_once(seeing_model, seen, monkeypatch):
    (first, _), _ = seen
    encoded = []

    def png(image):
        encoded.append((threading.current_thread(), image))
        return png_url(image)

    monkeypatch.setattr("verl.rollout.server.dialect.png_url", png)
    with serving({GENERATE: vllm_answer(first)}) as server:
        sampler = over(server, seeing_model())
        asyncio.run(sampler.connect())
        ask(sampler, *(replace(first, id=f"r{number}") for number in range(3)))
        assert len(server.payloads(GENERATE)) == 3
    assert [id(image) for _, image in encoded] == [id(image) for image in first.images]
    assert threading.main_thread() not in [thread for thread, _ in encoded]


class OddImage:
    """Fails to be written once, in the middle of it."""

    def __init__(self):
        self.begun, self.may_fail = threading.Event(), threading.Event()

    def save(self, file, *_, **__):
        if not self.begun.is_set():
            self.begun.set()
            assert self.may_fail.wait(60)
            raise OSError("no memory")
        Image.new("RGB", (2, 3)).save(file, "PNG")


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_an_encoding_that_failed_or_was_cancelled_is_made_again(is_cancelled):
    image = OddImage()
    request = Request("a", (5,), SamplingParams(), images=[image])

    async def run():
        dialect = VLLMDialect(None, "m", None)
        first = asyncio.ensure_future(dialect.image_urls(request))
        await asyncio.to_thread(image.begun.wait, 60)
        if is_cancelled:
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                task.cancel()
        else:
            image.may_fail.set()
        (error,) = await asyncio.gather(first, return_exceptions=True)
        image.may_fail.set()
        return error, await dialect.image_urls(request)

    error, (url,) = asyncio.run(run())
    assert isinstance(error, asyncio.CancelledError if is_cancelled else OSError) and pixels(url).shape == (3, 2, 3)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (lambda request: vllm_answer(request, prompt_token_ids=[1, 2]), "made 2 other tokens of the prompt of 19"),
        (lambda request: vllm_answer(request, prompt_token_ids=None), "does not say which tokens it made"),
        (lambda request: (403, {"error": "Scale-out endpoints are disabled"}), "--enable-scale-out"),
        (lambda request: (404, {"detail": "Not Found"}), "vLLM 0.32 or newer"),
    ],
)
def test_a_vllm_server_that_may_see_other_tokens_is_refused(seeing_model, seen, answer, said):
    (first, _), _ = seen
    with serving({GENERATE: answer(first)}) as server:
        (error,) = ask(over(server, seeing_model()), first)
    assert isinstance(error, RolloutError) and said in str(error)


def test_sglang_gets_one_placeholder_and_one_png_for_each_image(seeing_model, seen, config):
    (first, second), collapsed = seen
    status, answer = sglang_answer()
    used = [*first.token_ids, 8]
    with serving({"/generate": (status, {**answer, "prompt_token_ids": used})}) as server:
        done = ask(over(server, seeing_model(), api="sglang"), first, second, replace(first, id="t", images=None))
        one, _, text = sorted(server.payloads("/generate"), key=lambda payload: payload["rid"])
    assert [one.token_ids for one in done] == [(7, 8)] * 3
    assert one["input_ids"] == collapsed and one["return_prompt_token_ids"] is True
    assert [pixels(url).shape for url in one["image_data"]] == [(56, 56, 3), (84, 56, 3)]
    assert np.array_equal(pixels(one["image_data"][1]), np.asarray(first.images[1]))
    assert text["input_ids"] == used and "image_data" not in text
    never = {str(config.image_token_id): NEVER, str(config.video_token_id): NEVER}
    assert one["sampling_params"]["logit_bias"] == never


@pytest.mark.parametrize(
    ("used", "said"), [([1, 2], "made 2 other tokens of the prompt of 19"), (None, "does not say which tokens")]
)
def test_an_sglang_server_that_made_other_tokens_of_the_prompt_is_refused(seeing_model, seen, used, said):
    status, answer = sglang_answer()
    with serving({"/generate": (status, {**answer, "prompt_token_ids": used})}) as server:
        (error,) = ask(over(server, seeing_model(), api="sglang"), seen[0][0])
    assert isinstance(error, RolloutError) and said in str(error) and "SGLANG_MM_AVOID_RETOKENIZE" in str(error)


def test_sglang_has_to_be_named_for_a_model_that_sees(seeing_model, seen):
    with serving({**NOT_VLLM, "/get_model_info": (200, {})}) as server:
        (error,) = ask(over(server, seeing_model()), seen[0][0])
    assert "Set it to sglang" in str(error)


@pytest.mark.parametrize("kind", ["tgi", "openai"])
def test_servers_of_text_refuse_images_by_name(seeing_model, seen, kind):
    with serving({}) as server:
        (error,) = ask(over(server, seeing_model(), api=kind, wants_log_probs=False), seen[0][0])
    assert isinstance(error, NotBuiltError) and f"kind '{kind}' takes text" in str(error)


def test_a_prompt_with_another_number_of_places_than_images_is_refused(seeing_model, seen):
    (first, _), _ = seen
    with serving({}) as server:
        (error,) = ask(over(server, seeing_model(), api="sglang"), replace(first, images=first.images[:1]))
    assert "the prompt has places for 2 images, and the request has 1" in str(error)


def test_features_of_images_are_dropped_with_the_weights_that_made_them(seeing_model, seen, tmp_path):
    weights = list(export_weights(load_causal_lm(str(seeing_model()))))
    paths = {"/collective_rpc": (200, {}), "/reset_prefix_cache": (200, {}), PATH: (200, {"choices": [{}]})}
    for has_call in (True, False):
        with serving({**paths, **({"/reset_encoder_cache": (200, {})} if has_call else {})}) as server:
            sampler = over(server, seeing_model(), weights_dir=str(tmp_path))
            update = sampler.update_weights(chunk_weights(weights, 1 << 16, 1), 1)
            if has_call:
                asyncio.run(update)
                assert server.count("/reset_encoder_cache") == server.count("/reset_prefix_cache") == 1
            else:
                with pytest.raises(RolloutError, match="keeps features of images under old weights"):
                    asyncio.run(update)
