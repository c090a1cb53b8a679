"""Conversations with images: those of the row, and those that tools answer with in later turns."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.harness.conversations import Script, manager, rollout, rows, schema, tool_file
from tests.harness.vision import clip
from verl.agent_loop import AgentLoopBase, AgentLoopOutput, register
from verl.agent_loop.agent_data import AgentData
from verl.agent_loop.failed import RunStops
from verl.agent_loop.seen import SeenImages
from verl.data.vision.processor import VisionProcessor, load_processor
from verl.errors import DataError, NotBuiltError, RolloutError
from verl.metrics import MetricSet
from verl.protocol import DataProto
from verl.trainer.ppo.stages import with_answers

RED = Image.new("RGB", (56, 56), "red")
ASK = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What?"}]}]
CALL = f"<tool_call>\n{json.dumps({'name': 'camera', 'arguments': {'colour': 'blue'}})}\n</tool_call>"


def table(tokenizer: Any, processor: Any, **columns: list[Any]) -> DataProto:
    """Two samples of one prompt with an image, as the data set makes them."""
    inputs, pieces = processor.process([RED])
    text = tokenizer.apply_chat_template(ASK, add_generation_prompt=True, tokenize=False)
    ids = processor.expand(tokenizer(text)["input_ids"], pieces)
    seen = {"images": [RED], "videos": []}
    asked = {"raw_prompt_ids": [ids] * 2, "multi_modal_inputs": [inputs] * 2, "multi_modal_data": [seen] * 2}
    return rows(ASK, ASK, **asked, **columns)


def play(tokenizer: Any, processor: Any, answers: list[str], asked: DataProto, **settings: Any) -> Any:
    script = Script([tokenizer(text)["input_ids"] for text in answers])
    loops = manager(rollout(**settings), script, tokenizer, processor=processor)
    return loops.generate_sequences(asked), script


def test_a_request_has_the_images_of_its_row_by_reference(seeing_tokenizer, processor):
    asked = table(seeing_tokenizer, processor)
    batch, script = play(seeing_tokenizer, processor, ["red<|im_end|>"], asked)
    inputs = asked.non_tensor_batch["multi_modal_inputs"][0]
    for request in script.requests:
        assert request.images == [RED] and request.images[0] is RED and request.multi_modal_inputs is inputs
        assert request.token_ids.count(processor.placeholder_id) == 4
    assert "multi_modal_inputs" not in batch.non_tensor_batch, "the rows have them"


def test_a_request_has_the_video_of_its_row_and_its_loop_may_render_it(seeing_tokenizer, processor):
    film = clip(4, 56, 56)
    inputs, pieces = processor.process([film])
    ask = [{"role": "user", "content": [{"type": "video"}, {"type": "text", "text": "What?"}]}]
    text = seeing_tokenizer.apply_chat_template(ask, add_generation_prompt=True, tokenize=False)
    ids = processor.expand(seeing_tokenizer(text)["input_ids"], pieces)
    seen = {"images": [], "videos": [film]}
    columns = {"raw_prompt_ids": [ids] * 2, "multi_modal_inputs": [inputs] * 2, "multi_modal_data": [seen] * 2}
    for settings in ({}, {"agent__default_agent_loop": "test_looks"}):
        _, script = play(seeing_tokenizer, processor, ["red<|im_end|>"], rows(ask, ask, **columns), **settings)
        for request in script.requests:
            assert request.videos == [film] and request.videos[0] is film and request.images is None
            assert request.multi_modal_inputs is inputs and request.token_ids == tuple(ids)


def test_a_picture_that_a_tool_answers_with_is_seen_from_the_next_turn_on(seeing_tokenizer, processor, tmp_path):
    camera = schema("camera", colour={"type": "string"})
    settings = {
        "multi_turn__enable": True,
        "agent__default_agent_loop": "tool_agent",
        "multi_turn__tool_config_path": tool_file(tmp_path, ("Camera", camera)),
    }
    asked = table(seeing_tokenizer, processor)
    batch, script = play(seeing_tokenizer, processor, [CALL + "<|im_end|>", "blue<|im_end|>"], asked, **settings)
    first, second = (r for r in script.requests if r.session == script.requests[0].session)
    assert first.token_ids == tuple(asked.non_tensor_batch["raw_prompt_ids"][0]) and len(first.images) == 1
    assert [image.getpixel((0, 0)) for image in second.images] == [(255, 0, 0), (0, 0, 255)]
    assert second.multi_modal_inputs["image_grid_thw"].tolist() == [[1, 4, 4], [1, 4, 6]]
    assert second.token_ids.count(processor.placeholder_id) == 4 + 6
    seen = batch.batch["responses"] == processor.placeholder_id
    assert seen.sum(-1).tolist() == [6, 6] and not (seen & batch.batch["response_mask"].bool()).any()
    said = "\n<|im_start|>tool\n<|vision_start|>" + "<|image_pad|>" * 6 + "<|vision_end|>see<|im_end|>\n"
    assert said in seeing_tokenizer.decode(batch.batch["responses"][0])
    call = batch.non_tensor_batch["trajectory"][0][1]["calls"][0]
    assert call["answer"] == "see" and call["images"][0].startswith("image 84x56 sha256:")
    assert batch.meta_info["metrics"]["agent_loop/rendered_differently"].value == 0.0
    joined = with_answers(asked, batch, MetricSet())
    for inputs in joined.non_tensor_batch["multi_modal_inputs"]:
        assert inputs["pixel_values"].shape == (16 + 24, 1176)


def filmed(folder: Path) -> dict[str, Any]:
    """The settings of a run with a tool that shows videos."""
    return {
        "multi_turn__enable": True,
        "agent__default_agent_loop": "tool_agent",
        "multi_turn__tool_config_path": tool_file(folder, ("Recorder", schema("film", colour={"type": "string"}))),
    }


def film_call(colour: str) -> str:
    return f"<tool_call>\n{json.dumps({'name': 'film', 'arguments': {'colour': colour}})}\n</tool_call><|im_end|>"


def test_a_video_that_a_tool_answers_with_is_seen_from_the_next_turn_on(seeing_tokenizer, processor, tmp_path):
    prompts = table(seeing_tokenizer, processor)
    answers = [film_call("blue"), film_call("lime"), "blue<|im_end|>"]
    batch, script = play(seeing_tokenizer, processor, answers, prompts, **filmed(tmp_path))
    _, second, third = (r for r in script.requests if r.session == script.requests[0].session)
    assert [clip["frames"][0].getpixel((0, 0)) for clip in third.videos] == [(0, 0, 255), (0, 255, 0)]
    assert second.videos == third.videos[:1] and [image.size for image in second.images] == [(56, 56), (84, 56)]
    # Two frames become one step in time, and four patches one token: 2 * 16 / 4.
    assert second.multi_modal_inputs["video_grid_thw"].tolist() == [[2, 4, 4]]
    film = next(number for number, kind in processor.placeholder_ids.items() if kind == "video")
    assert [request.token_ids.count(film) for request in (second, third)] == [8, 16]
    shown = (batch.batch["responses"] == film) | (batch.batch["responses"] == processor.placeholder_id)
    assert shown.sum(-1).tolist() == [28, 28] and not (shown & batch.batch["response_mask"].bool()).any()
    call = batch.non_tensor_batch["trajectory"][0][1]["calls"][0]
    assert call["videos"] == ["video 4x56x56"] and call["images"][0].startswith("image 84x56")
    assert batch.meta_info["metrics"]["agent_loop/rendered_differently"].value == 0.0
    inputs = with_answers(prompts, batch, MetricSet()).non_tensor_batch["multi_modal_inputs"][0]
    assert inputs["pixel_values"].shape == (16 + 2 * 24, 1176) and inputs["pixel_values_videos"].shape == (64, 1176)


def test_a_video_that_cannot_be_read_is_a_failed_call_that_says_why(seeing_tokenizer, processor, tmp_path):
    answers = [film_call("none"), "red<|im_end|>"]
    batch, script = play(seeing_tokenizer, processor, answers, table(seeing_tokenizer, processor), **filmed(tmp_path))
    call = batch.non_tensor_batch["trajectory"][0][1]["calls"][0]
    assert call["answer"] == "Error: DataError: tool film, video 0: a video without frames" and "images" not in call
    assert script.requests[-1].videos is None and len(script.requests[-1].images) == 1


def test_videos_of_an_environment_are_seen_with_its_text(seeing_tokenizer, processor, tmp_path):
    prompts, answers = table(seeing_tokenizer, processor), ["blue<|im_end|>", "red<|im_end|>"]
    batch, script = play(seeing_tokenizer, processor, answers, prompts, **discs(tmp_path, environment="Films"))
    first, second = (r for r in script.requests if r.session == script.requests[0].session)
    assert len(first.images) == 1 and [len(clip["frames"]) for clip in first.videos] == [4]
    assert [clip["frames"][0].getpixel((0, 0)) for clip in second.videos] == [(0, 0, 255), (255, 0, 0)]
    assert second.multi_modal_inputs["video_grid_thw"].tolist() == [[2, 4, 4], [1, 4, 6]]
    film = next(number for number, kind in processor.placeholder_ids.items() if kind == "video")
    shown = batch.batch["responses"] == film
    assert shown.sum(-1).tolist() == [6, 6] and not (shown & batch.batch["response_mask"].bool()).any()
    assert batch.non_tensor_batch["reward_score"].tolist() == [1.0, 1.0]
    assert batch.non_tensor_batch["trajectory"][0][2]["videos"] == ["video 2x84x56"]


def test_a_trajectory_that_goes_on_later_has_its_pictures_and_videos_again(processor):
    row = {"multi_modal_data": {"images": [RED]}, "multi_modal_inputs": processor.process([RED])[0]}
    data = AgentData(row, seen=SeenImages(processor, row))
    asyncio.run(data.seen.take([Image.new("RGB", (84, 56), "blue"), clip(2, 56, 56)]))
    earlier = data.plain()
    earlier["images"] = earlier.pop("media")
    from_before = asyncio.run(AgentData.of_plain(row, earlier, SeenImages(processor, row)))
    assert from_before.seen.images == data.seen.images, "a release before"
    later = asyncio.run(AgentData.of_plain(row, data.plain(), SeenImages(processor, row)))
    assert [image.size for image in later.seen.images] == [(56, 56), (84, 56)]
    assert [len(video["frames"]) for video in later.seen.videos] == [2]
    for name, tensor in data.seen.inputs.items():
        assert torch.equal(later.seen.inputs[name], tensor)


def discs(folder: Path, **options: Any) -> dict[str, str]:
    """The settings of a run whose rows play an environment that shows pictures."""
    place = f"tests.agent_loop.envs.guess:{options.pop('environment', 'Discs')}"
    entry = {"name": "discs", "_target_": "verl.agent_loop.envs.loop.EnvironmentAgentLoop", **options}
    entry |= {"environment": place}
    (folder / "loops.yaml").write_text(json.dumps([entry]))
    return {"agent__default_agent_loop": "discs", "agent__agent_loop_config_path": str(folder / "loops.yaml")}


def test_pictures_of_an_environment_are_seen_with_its_text(seeing_tokenizer, processor, tmp_path):
    prompts = table(seeing_tokenizer, processor)
    batch, script = play(seeing_tokenizer, processor, ["blue<|im_end|>", "red<|im_end|>"], prompts, **discs(tmp_path))
    first, second = (r for r in script.requests if r.session == script.requests[0].session)
    colours = [(255, 0, 0), (0, 0, 255), (255, 0, 0)]
    assert [image.getpixel((0, 0)) for image in first.images] == colours[:2], "the row's image comes first"
    assert [image.getpixel((0, 0)) for image in second.images] == colours
    assert first.token_ids.count(processor.placeholder_id) == 4 + 4
    assert second.token_ids.count(processor.placeholder_id) == 4 + 4 + 6
    assert second.multi_modal_inputs["image_grid_thw"].tolist() == [[1, 4, 4], [1, 4, 4], [1, 4, 6]]
    prompt = seeing_tokenizer.decode(batch.batch["prompts"][0], skip_special_tokens=False)
    assert prompt.count("<|vision_start|>") == 2 and "Which colour?" in prompt.rpartition("<|vision_end|>")[2]
    seen = batch.batch["responses"] == processor.placeholder_id
    assert seen.sum(-1).tolist() == [6, 6] and not (seen & batch.batch["response_mask"].bool()).any()
    assert batch.non_tensor_batch["reward_score"].tolist() == [1.0, 1.0]
    shown = [piece.get("images") for piece in batch.non_tensor_batch["trajectory"][0]]
    assert shown[0][0].startswith("image 56x56 sha256:") and shown[2][0].startswith("image 84x56 sha256:")
    joined = with_answers(prompts, batch, MetricSet())
    assert joined.non_tensor_batch["multi_modal_inputs"][0]["pixel_values"].shape == (16 + 16 + 24, 1176)


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        ("shape", "an image has the shape (56, 56, 2) and the type uint8"),
        ("name", "an observation with ['picture']; it may have text, image, video"),
        ("damaged", "image 0: not an image, or damaged at its beginning"),
    ],
)
def test_a_picture_that_cannot_be_shown_costs_its_own_row(seeing_tokenizer, processor, tmp_path, broken, said):
    settings = discs(tmp_path, environment_kwargs={"broken": broken})
    with pytest.raises(RolloutError) as failed:
        play(seeing_tokenizer, processor, ["blue<|im_end|>"], table(seeing_tokenizer, processor), **settings)
    assert said in str(failed.value)


@pytest.mark.parametrize(("environment", "kind"), [("Discs", "an image"), ("Films", "a video")])
def test_an_environment_that_shows_something_needs_a_model_that_sees(seeing_tokenizer, tmp_path, environment, kind):
    settings = discs(tmp_path, environment=environment)
    with pytest.raises(RolloutError, match=f"it shows {kind}, and the model reads only text"):
        play(seeing_tokenizer, None, ["blue<|im_end|>"], rows(ASK, raw_prompt_ids=[[1]]), **settings)


def test_frames_of_another_type_cost_their_row_and_say_so(seeing_tokenizer, processor, tmp_path):
    settings = discs(tmp_path, environment="Films", environment_kwargs={"broken": True})
    with pytest.raises(RolloutError, match=r"an image has the shape .* and the type float32"):
        play(seeing_tokenizer, processor, ["blue<|im_end|>"], table(seeing_tokenizer, processor), **settings)


def test_a_file_of_a_video_without_its_reader_stops_the_run(seeing_tokenizer, processor, tmp_path, monkeypatch):
    """Every episode would fail alike: no row is masked."""
    monkeypatch.setitem(sys.modules, "av", None)  # as if it were not installed
    (tmp_path / "film.mp4").write_bytes(b"\0\0\0\x18ftypmp42")
    settings = discs(tmp_path, environment="Films", environment_kwargs={"file": str(tmp_path / "film.mp4")})
    with pytest.raises(RunStops, match=r"the environment tests.agent_loop.envs.guess:Films, video 0: .*pip install av"):
        play(seeing_tokenizer, processor, ["blue<|im_end|>"], table(seeing_tokenizer, processor), **settings)


@register("test_looks")
class Looks(AgentLoopBase):
    """A loop as users of upstream write it."""

    async def run(self, sampling_params, **row):
        seen = await self.process_vision_info(row["raw_prompt"])
        images, videos = seen.get("images"), seen.get("videos")
        ids = await self.apply_chat_template(row["raw_prompt"], images=images, videos=videos)
        media = {"image_data": images, "video_data": videos}
        answer = await self.server_manager.generate("x", prompt_ids=ids, sampling_params=sampling_params, **media)
        return AgentLoopOutput(ids, list(answer.token_ids), [1] * len(answer.token_ids))


def test_a_loop_that_renders_its_messages_itself_gets_the_rows_images(seeing_tokenizer, processor):
    asked = table(seeing_tokenizer, processor)
    _, script = play(seeing_tokenizer, processor, ["red<|im_end|>"], asked, agent__default_agent_loop="test_looks")
    assert list(script.requests[0].token_ids) == asked.non_tensor_batch["raw_prompt_ids"][0]
    assert np.asarray(script.requests[0].images[0]).tolist() == np.asarray(RED).tolist()
    assert script.requests[0].multi_modal_inputs["image_grid_thw"].tolist() == [[1, 4, 4]]


@register("test_films")
class FilmsItself(AgentLoopBase):
    """Shows a video in its messages, and names images and videos of its requests."""

    async def run(self, sampling_params, **row):
        frames = [Image.new("RGB", (56, 56), "blue")] * 2
        messages = [{"role": "user", "content": [{"type": "image"}, {"type": "video", "video": frames}]}]
        seen = await self.process_vision_info(messages)
        ids = await self.apply_chat_template(messages, **seen)
        media = {"image_data": seen["images"], "video_data": seen["videos"]}
        answer = await self.server_manager.generate("x", prompt_ids=ids, sampling_params=sampling_params, **media)
        output = AgentLoopOutput(ids, list(answer.token_ids), [1] * len(answer.token_ids))
        with pytest.raises(DataError, match="the messages have more images than the trajectory"):
            await self.process_vision_info(messages * 2)
        return output


def test_a_loop_may_show_a_video_that_is_not_of_its_row(seeing_tokenizer, processor):
    prompts = table(seeing_tokenizer, processor)
    _, script = play(seeing_tokenizer, processor, ["red<|im_end|>"], prompts, agent__default_agent_loop="test_films")
    request = script.requests[0]
    assert request.images[0] is RED and [len(video["frames"]) for video in request.videos] == [2]
    assert request.multi_modal_inputs["video_grid_thw"].tolist() == [[1, 4, 4]]
    assert request.token_ids.count(processor.placeholder_id) == 4


def test_named_images_and_videos_of_a_family_with_frames_as_images_are_refused(seeing_model):
    """Their features are joined in the order of the prompt, which a request does not say."""
    sees = SeenImages(load_processor(seeing_model("internvl")), {"multi_modal_data": {"images": [RED]}})
    with pytest.raises(NotBuiltError, match="this family takes frames as images"):
        sees.of_request([RED.copy()], [clip(2, 28, 28)])


def test_rows_without_inputs_stay_without_when_a_tool_answers_with_a_picture(processor):
    seen = SeenImages(processor, {"multi_modal_data": {"images": [RED]}})
    asyncio.run(seen.take([RED]))
    assert len(seen.images) == 2 and seen.inputs == {}
    seen = SeenImages(processor)
    asyncio.run(seen.take([RED]))
    assert seen.inputs["image_grid_thw"].tolist() == [[1, 4, 4]]


def test_other_trajectories_run_while_a_picture_of_one_is_resized(processor):
    begins, may_end = threading.Event(), threading.Event()

    class Waits(VisionProcessor):
        def process(self, media, where="images"):
            begins.set()
            assert may_end.wait(60), "the event loop is held up"
            return super().process(media, where)

    seen = SeenImages(Waits(processor.wrapped, processor.folder))

    async def takes():
        work = asyncio.ensure_future(seen.take([RED, RED.resize((84, 56))]))
        assert await asyncio.to_thread(begins.wait, 60) and not seen.images and not seen.inputs
        may_end.set()
        await work

    asyncio.run(takes())
    assert [image.size for image in seen.images] == [(56, 56), (84, 56)]
    assert seen.inputs["image_grid_thw"].tolist() == [[1, 4, 4], [1, 4, 6]]
    with pytest.raises(DataError, match=r"a later turn, image 1: the processor refuses the image"):
        asyncio.run(seen.take([RED, Image.new("RGB", (3, 900))]))
    assert len(seen.images) == 2 and len(seen.inputs["image_grid_thw"]) == 2, "nothing of a refused turn is kept"


def test_what_does_not_fit_is_refused_by_name(processor):
    seen = SeenImages(processor, {"multi_modal_data": {"images": [RED]}})
    with pytest.raises(DataError, match="writes 0 placeholders"):
        seen.expanded([50, 60], [RED])
    with pytest.raises(DataError, match=r"tool camera, image 0: not an image"):
        seen.load([b"x"], "tool camera")
