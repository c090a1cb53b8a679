"""Agents that send images to the endpoint: each call has those of its messages, the trajectory those of its path."""

from __future__ import annotations

import base64
import io
from typing import Any

import openai
import pytest
from PIL import Image

from tests.agent_loop.server.scripted import Scripted, rollout, rows
from verl.agent_loop.failed import RunStops

RED, BLUE = Image.new("RGB", (56, 56), "red"), Image.new("RGB", (84, 56), "blue")


def url(image: Image.Image) -> str:
    file = io.BytesIO()
    image.save(file, format="PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def shown(address: str, text: str = "What?") -> dict[str, Any]:
    parts = [{"type": "image_url", "image_url": {"url": address}}, {"type": "text", "text": text}]
    return {"role": "user", "content": parts}


def client(base_url: str, api_key: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0)


def test_a_call_has_the_images_of_its_messages_and_goes_on_by_tokens(seeing_tokenizer, processor):
    def agent(base_url, api_key, row, model):
        create = client(base_url, api_key).chat.completions.create
        assert row["multi_modal_data"]["images"] == [RED], "the row's own are the agent's to send"
        sized = shown(url(RED))
        sized["content"][0]["min_pixels"] = 10**10  # of a field that chooses the size nothing is read
        first = create(model=model, messages=[sized]).choices[0].message
        create(model=model, messages=[shown(url(RED)), first, shown(url(BLUE), "And this?")])

    sampler = Scripted("red", "blue", tokenizer=seeing_tokenizer)
    batch = rollout(sampler, agent, rows(multi_modal_data=[{"images": [RED], "videos": []}]), processor=processor)
    first, second = sampler.requests
    assert [image.getpixel((0, 0)) for image in first.images] == [(255, 0, 0)]
    assert [image.getpixel((0, 0)) for image in second.images] == [(255, 0, 0), (0, 0, 255)]
    assert second.multi_modal_inputs["image_grid_thw"].tolist() == [[1, 4, 4], [1, 4, 6]]
    assert second.token_ids[: len(first.token_ids)] == first.token_ids
    counts = [request.token_ids.count(processor.placeholder_id) for request in sampler.requests]
    assert counts == [4, 4 + 6]
    seen = batch.batch["responses"] == processor.placeholder_id
    assert seen.sum() == 6 and not (seen & batch.batch["response_mask"].bool()).any()
    (inputs,), (data,) = (batch.non_tensor_batch[name] for name in ("multi_modal_inputs", "multi_modal_data"))
    assert inputs["pixel_values"].shape == (16 + 24, 1176) and len(data["images"]) == 2


def test_branches_as_rows_are_refused_before_the_agent_makes_any(seeing_tokenizer, processor):
    sampler = Scripted("a", tokenizer=seeing_tokenizer)
    with pytest.raises(RunStops, match="branches: several trajectories of a sample with a model that sees"):
        rollout(sampler, lambda **_: 1.0, processor=processor, branches="rows")


def test_an_image_of_the_row_that_is_not_sent_is_no_image_of_the_trajectory(seeing_tokenizer, processor):
    def agent(base_url, api_key, row, model):
        client(base_url, api_key).chat.completions.create(model=model, messages=[{"role": "user", "content": "hi"}])

    own = {"images": [RED], "videos": []}
    table = rows(multi_modal_data=[own], multi_modal_inputs=[processor.process([RED])[0]])
    batch = rollout(Scripted("one", tokenizer=seeing_tokenizer), agent, table, processor=processor)
    assert batch.non_tensor_batch["multi_modal_data"][0]["images"] == []
    assert batch.non_tensor_batch["multi_modal_inputs"][0] == {}


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("/etc/hostname", "paths and addresses are not read"),
        ("file:///etc/hostname", "paths and addresses are not read"),
        ("http://127.0.0.1:9/x.png", "paths and addresses are not read"),
        ("data:image/png;base64,AAAA", "not an image, or damaged"),
        ("data:image/png,AAAA", "a data URL that is not in base64"),
    ],
)
def test_what_is_no_inline_image_is_refused_by_its_field(seeing_tokenizer, processor, address, said):
    refusals = []

    def agent(base_url, api_key, row, model):
        create = client(base_url, api_key).chat.completions.create
        with pytest.raises(openai.BadRequestError) as refused:
            create(model=model, messages=[shown(address)])
        refusals.append((str(refused.value), refused.value.param.partition("[")[0]))
        create(model=model, messages=[{"role": "user", "content": "hi"}])

    rollout(Scripted("one", tokenizer=seeing_tokenizer), agent, processor=processor)
    ((text, field),) = refusals
    assert said in text and field == "messages"
