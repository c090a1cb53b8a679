"""Videos of rows: which frames are shown, the tensors and tokens that they become, and what is refused."""

from __future__ import annotations

import importlib.util
import io
import json
import struct
import tracemalloc
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.data.vision.test_rows import image, prompts
from tests.harness.rows import write_prompts
from tests.harness.vision import clip, pictures, vision_dir
from verl.config import DataConfig
from verl.config.schema.sft import SFTDataConfig
from verl.data.rl_dataset import RLHFDataset
from verl.data.sft_dataset import MultiTurnSFTDataset
from verl.data.tokenizer import hf_tokenizer
from verl.data.vision import processor as processor_module
from verl.data.vision import videos as module
from verl.data.vision.frames import FrameProcessor
from verl.data.vision.images import ImageLimits
from verl.data.vision.processor import load_processor
from verl.data.vision.videos import VideoLimits, clip_shape, load_video, open_video
from verl.errors import DataError, NotBuiltError

WITH_VIDEOS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "glm4v", "internvl")
LIMITS = VideoLimits()
FACTS = {"patch_size": 14, "merge_size": 2, "temporal_patch_size": 2, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
HAS_AV = importlib.util.find_spec("av") is not None


def animation(count: int = 10, milliseconds: int = 100, size: tuple[int, int] = (56, 56), kind: str = "WEBP") -> bytes:
    """A file whose frame k has the red value 20 k."""
    frames = [Image.new("RGB", size, (20 * number, 0, 0)) for number in range(count)]
    out = io.BytesIO()
    frames[0].save(out, kind, save_all=True, append_images=frames[1:], duration=milliseconds, lossless=True)
    return out.getvalue()


def growing_gif(width: int, height: int) -> bytes:
    """A first picture of 56 x 56 pixels, and a header of a second one of this size."""

    out, frames = io.BytesIO(), [Image.new("RGB", (56, 56), colour) for colour in ("red", "blue")]
    frames[0].save(out, "GIF", save_all=True, append_images=frames[1:])
    first, second, last = out.getvalue().split(b"\x2c" + struct.pack("<HHHH", 0, 0, 56, 56))
    headers = [b"\x2c" + struct.pack("<HHHH", 0, 0, *size) for size in ((56, 56), (width, height))]
    return first + headers[0] + second + headers[1] + last


def reds(made: Any) -> list[int]:
    return [frame.getpixel((0, 0))[0] for frame in made["frames"]]


def frame_files(count: int = 4) -> list[dict[str, Any]]:
    return [image((20 * number, 0, 0)) for number in range(count)]


def shown_video(videos: Any, text: Any = "<video>What?") -> dict[str, Any]:
    return {"prompt": [{"role": "user", "content": text}], "videos": videos}


@pytest.mark.parametrize(
    ("entry", "shown"),
    [
        ({}, [0, 3, 6, 9]),  # one second at 2 frames per second would be 2: min_frames is 4
        ({"fps": 6}, [0, 2, 4, 5, 7, 9]),
        ({"fps": 7.9}, [0, 2, 4, 5, 7, 9]),  # an even number: two frames become one token
        ({"nframes": 2}, [0, 9]),
        ({"min_frames": 2}, [0, 9]),
        ({"fps": 10, "max_frames": 4}, [0, 3, 6, 9]),
        ({"fps": 1000}, list(range(10))),
    ],
)
def test_frames_are_drawn_at_equal_distances_by_rate_or_number(entry, shown):
    made = load_video({"bytes": animation(), **entry}, "row 0", LIMITS, step=2)
    assert list(made["indices"]) == shown and reds(made) == [20 * number for number in shown]
    assert made["fps"] == 10 and made["total"] == 10
    assert clip_shape(made) == open_video({"bytes": animation(), **entry}, "row 0", LIMITS, step=2)


@pytest.mark.parametrize("kind", ["GIF", "PNG", "WEBP"])
@pytest.mark.parametrize("milliseconds", [50, 250])
def test_the_rate_of_an_animation_is_that_of_its_file(kind, milliseconds):
    content = animation(milliseconds=milliseconds, kind=kind)
    assert open_video(content, "row 0", LIMITS)[2] == load_video(content, "row 0", LIMITS)["fps"] == 1000 / milliseconds


def test_every_form_of_a_video_gives_the_same_frames(tmp_path):
    import base64

    file = tmp_path / "red.webp"
    file.write_bytes(animation())
    url = "data:image/webp;base64," + base64.b64encode(animation()).decode()
    forms = [animation(), str(file), file, f"file://{file}", url, {"path": str(file)}, {"video": str(file)}]
    for form in [
        *forms,
        {"video": file},
        {"type": "video_url", "video_url": {"url": url}},
        {"bytes": animation(), "path": None},
    ]:
        assert reds(load_video(form, "row 0", LIMITS)) == [0, 60, 120, 180]


def test_a_list_of_frames_is_shown_as_it_is_unless_it_says_how():
    frames = frame_files(5)
    assert reds(load_video(frames, "row 0", LIMITS, step=2)) == [0, 20, 40, 60, 80]
    made = load_video({"video": np.array(frames, dtype=object), "sample_fps": 5, "fps": 2}, "row 0", LIMITS, step=2)
    assert reds(made) == [0, 20, 60, 80] and made["fps"] == 5


def test_frames_are_scaled_to_the_limits_on_pixels():
    entry = {"bytes": animation(size=(112, 56)), "max_pixels": 56 * 28}
    made = load_video(entry, "row 0", LIMITS)
    assert {frame.size for frame in made["frames"]} == {(56, 28)} == {open_video(entry, "row 0", LIMITS)[0]}
    limited = replace(LIMITS, images=ImageLimits(max_pixels=28 * 14))
    assert {frame.size for frame in load_video(animation(size=(112, 56)), "row 0", limited)["frames"]} == {(28, 14)}


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("absent.mp4", r"row 0, video 1: no such video. Got 'absent.mp4'"),
        ({"path": None}, "not a video"),
        ([], "a video without frames"),
        ({"video": []}, "row 0, video 1: a video without frames"),
        ({"video": 5}, "row 0, video 1: not a video. Got 'int'"),
        ({"video": Image.new("RGB", (56, 56))}, "row 0, video 1: not a video. Got 'Image'"),
        ({"video": ""}, "row 0, video 1: not a video"),
        (b"#EXTM3U\nhttp://example.com/a.ts\n", "not a video, or damaged at its beginning"),
        (b"", "not a video, or damaged"),
        ("https://example.com/a.mp4", "videos are not fetched from the network"),
        ([image(), image(size=(28, 28))], r"video 1, frame 1: the frames of a video have one size"),
        ([image(), {"bytes": b"no"}], r"video 1, frame 1: not an image"),
        ({"bytes": animation(), "speed": 2}, "a video has no such setting. Got 'speed'"),
        ({"bytes": animation(), "fps": 0}, r"video 1, fps: not a number of frames"),
        ({"bytes": animation(), "nframes": 2.5}, "nframes: not a number of frames"),
        ({"bytes": animation(), "min_frames": 9, "max_frames": 4}, "min_frames is above max_frames"),
        (
            {"bytes": animation(), "fps": 100, "max_frames": 900},
            "the video has 10 frames, more than data.max_video_fra",
        ),
        ({"bytes": animation(size=(300, 300)), "fps": 9}, "8 frames of 300 x 300 pixels are more than data.max_image"),
        (animation(size=(900, 900)), "900 x 900 pixels, more than data.max_image_pixels"),
        pytest.param(growing_gif(900, 900), "frame 1: the image has 900 x 900 pixels, more than data", id="grows"),
        pytest.param(growing_gif(30_000, 30_000), r"video 1, frame 1: the picture cannot be read: Image", id="bomb"),
    ],
)
def test_what_is_hostile_or_broken_is_refused_with_its_place(value, words):
    limits = replace(LIMITS, images=ImageLimits(decoded=700_000), most=9)
    with pytest.raises(DataError, match=words):
        load_video(value, "row 0, video 1", limits, step=2)


def test_a_file_that_ends_early_names_the_frame():
    content = animation(kind="GIF")
    with pytest.raises(DataError, match=r"row 0: the video is damaged, or shorter than its header says: it lacks fr"):
        load_video(content[: len(content) // 2] + bytes(len(content) // 2), "row 0", LIMITS)


def test_frames_that_are_decoded_are_bounded_whether_shown_or_not(monkeypatch):
    monkeypatch.setattr(module, "MOST_DECODED", 10 * 56 * 56)
    assert open_video({"bytes": animation(10), "nframes": 2}, "row 0", LIMITS)[3] == 10
    with pytest.raises(DataError, match="row 0: 11 frames of 56 x 56 pixels in a file are more than 31,360 together"):
        open_video({"bytes": animation(11), "nframes": 2}, "row 0", LIMITS)


def film(count: int = 10, fps: int = 5, kind: str = "mp4", sound: int = 0) -> bytes:
    """A film whose frame k has about the red value 20 k, with this many seconds of silence; needs PyAV."""
    import av

    out = io.BytesIO()
    with av.open(out, "w", format=kind) as container:
        stream = container.add_stream("mpeg4", rate=fps)
        stream.width, stream.height, stream.pix_fmt = 64, 64, "yuv420p"
        silent = container.add_stream("aac", rate=16000) if sound else None
        for number in range(count):
            image = Image.new("RGB", (64, 64), (20 * number, 0, 0))
            container.mux(stream.encode(av.VideoFrame.from_image(image)))
        container.mux(stream.encode(None))
        for start in range(0, 16000 * sound, 1000):
            samples = av.AudioFrame.from_ndarray(np.zeros((1, 1000), np.float32), format="fltp", layout="mono")
            samples.sample_rate, samples.pts = 16000, start
            container.mux(silent.encode(samples))
        if silent:
            container.mux(silent.encode(None))
    return out.getvalue()


def film_that_grows() -> bytes:
    """Four frames of 64 x 64 pixels, then four of 256 x 256; the header says 64 x 64. Needs PyAV."""
    import av

    out = io.BytesIO()
    with av.open(out, "w", format="matroska") as container:
        stream = container.add_stream("mjpeg", rate=5)
        stream.width, stream.height, stream.pix_fmt = 64, 64, "yuvj420p"
        larger = av.CodecContext.create("mjpeg", "w")
        larger.width, larger.height, larger.pix_fmt = 256, 256, "yuvj420p"
        larger.time_base = Fraction(1, 5)
        for number in range(8):
            encoder, edge = (stream, 64) if number < 4 else (larger, 256)
            frame = av.VideoFrame.from_image(Image.new("RGB", (edge, edge))).reformat(format="yuvj420p")
            frame.pts, frame.time_base = number, Fraction(1, 5)
            for packet in encoder.encode(frame):
                packet.stream = stream
                container.mux(packet)
    return out.getvalue()


@pytest.mark.skipif(not HAS_AV, reason="PyAV is not installed")
def test_a_film_is_read_at_its_rate_and_a_damaged_one_is_refused(tmp_path):
    (tmp_path / "red.mp4").write_bytes(film())
    for form in (film(), tmp_path / "red.mp4"):
        made = load_video({"video": form, "fps": 2}, "row 0", LIMITS, step=2)
        assert list(made["indices"]) == [0, 3, 6, 9] and made["fps"] == 5
        assert np.abs(np.array(reds(made)) - [0, 60, 120, 180]).max() < 8  # it is compressed
    with pytest.raises(DataError, match=r"row 0: the video cannot be read"):
        load_video(film()[:200], "row 0", LIMITS)
    with pytest.raises(DataError, match=r"row 0: a frame has 64 x 64 pixels, more than data.max_image_pixels=100"):
        load_video(film(), "row 0", replace(LIMITS, images=ImageLimits(decoded=100)))


@pytest.mark.skipif(not HAS_AV, reason="PyAV is not installed")
@pytest.mark.parametrize("kind", ["mp4", "matroska"])
def test_a_film_whose_sound_is_longer_has_the_frames_of_its_pictures(kind):
    made = load_video({"bytes": film(kind=kind, sound=4), "nframes": 2}, "row 0", LIMITS)
    assert list(made["indices"]) == [0, 9] and made["total"] == 10


@pytest.mark.skipif(not HAS_AV, reason="PyAV is not installed")
def test_frames_of_a_film_that_are_larger_than_its_header_says_are_refused(monkeypatch):
    assert len(load_video(film_that_grows(), "row 0", LIMITS)["frames"]) == 4
    with pytest.raises(DataError, match=r"row 0: a frame has 256 x 256 pixels, more than data.max_image_pixels=20000"):
        load_video(film_that_grows(), "row 0", replace(LIMITS, images=ImageLimits(decoded=20000)))
    monkeypatch.setattr(module, "MOST_DECODED", 9 * 64 * 64)
    with pytest.raises(DataError, match="row 0: 10 frames of 64 x 64 pixels in a file are more than 36,864 together"):
        open_video(film(), "row 0", LIMITS)


@pytest.mark.skipif(HAS_AV, reason="PyAV is installed")
def test_a_film_needs_a_package_that_is_named():
    with pytest.raises(NotBuiltError, match=r"row 0: files of videos are read by PyAV, .*pip install av"):
        load_video(b"\0\0\0\x18ftypisom" + bytes(64), "row 0", LIMITS)


@pytest.mark.parametrize("family", WITH_VIDEOS)
def test_expanded_ids_are_those_that_transformers_expands_in_text(tmp_path, family):
    from transformers.video_utils import VideoMetadata

    folder = vision_dir(tmp_path, family)
    processor = load_processor(folder, hf_tokenizer(folder))
    clips, picture = [clip(4, 56, 84, fps=4.0), clip(4, 84, 56, seed=1)], pictures([(56, 56)], 2)[0]
    inputs, pieces = processor.process([clips[0], picture, clips[1]])
    video, image_mark = processor.placeholders["video"], processor.placeholder
    text = f"<|im_start|>user\n{video}What{image_mark} colour{video}?<|im_end|>\n"
    about = [VideoMetadata(4, x["fps"], frames_indices=[0, 1, 2, 3]) for x in clips]
    expanded = processor.wrapped(
        text=[text],
        images=[picture],
        videos=[np.stack([np.asarray(frame) for frame in x["frames"]]) for x in clips],
        videos_kwargs={"video_metadata": about, "do_sample_frames": False},
        return_tensors="pt",
    )
    assert processor.expand(processor.wrapped.tokenizer(text)["input_ids"], pieces) == expanded["input_ids"][0].tolist()
    for name, tensor in inputs.items():
        assert torch.equal(tensor, torch.as_tensor(expanded[name])), name


@pytest.mark.parametrize("family", WITH_VIDEOS)
def test_the_ids_of_a_video_are_computed_from_its_shape_without_pixels(tmp_path, family):
    folder = vision_dir(tmp_path, family)
    processor = load_processor(folder, hf_tokenizer(folder))
    videos = [clip(9, 300, 500, fps=3.0), clip(9, 500, 300, fps=3.0), clip(4, 14, 100), clip(16, 1000, 1000)]
    _, pieces = processor.process(videos[:3])
    assert [processor.clip_piece(clip_shape(one)) for one in videos[:3]] == pieces["video"]
    tracemalloc.start()
    try:
        processor.clip_piece(clip_shape(videos[3]))
        assert tracemalloc.get_traced_memory()[1] < 16 * 1000 * 1000  # a third of its pixels
    finally:
        tracemalloc.stop()


def test_the_ids_of_the_newest_shapes_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(processor_module, "REMEMBERED", 2)
    folder = vision_dir(tmp_path, "qwen2_vl")
    processor = load_processor(folder, hf_tokenizer(folder))
    first = processor.piece((56, 56))
    assert processor.piece((56, 56)) is first
    processor.clip_piece(((56, 84), (0, 1), 2.0, 2))
    processor.piece((84, 84))
    assert len(processor._pieces) == 2
    assert processor.piece((56, 56)) == first and processor.piece((56, 56)) is not first


@pytest.mark.parametrize(
    ("size", "frames", "target"),
    [
        ((30, 60), 1, (28, 56)),  # the nearest multiples of 28
        ((280, 560), 1, (168, 336)),  # 156,800 pixels by sqrt(62720 / 156800) = 0.632: 177 x 354, down to multiples
        ((20, 20), 1, (28, 28)),
        ((14, 100), 1, (28, 84)),  # 1400 pixels, by sqrt(784 / 1400) = 0.748: 10 x 75, up to multiples
    ],
)
def test_a_frame_is_brought_to_multiples_of_a_token_within_the_limits(size, frames, target):
    made = FrameProcessor("qwen2_5_vl", {**FACTS, "min_pixels": 784, "max_pixels": 62720}, None)
    assert made([np.zeros((frames, *size, 3), np.uint8)])["video_grid_thw"].tolist() == [
        [1, target[0] // 14, target[1] // 14]
    ]


def test_the_frames_of_a_long_video_share_its_pixels():
    """4 frames of 112 x 112 are 50,176 pixels of 25,088: each edge by sqrt(1/2), 79, down to 56."""
    made = FrameProcessor("qwen3_vl", {**FACTS, "size": {"shortest_edge": 784, "longest_edge": 25088}}, None)
    assert made([np.zeros((4, 112, 112, 3), np.uint8)])["video_grid_thw"].tolist() == [[2, 4, 4]]
    assert made([np.zeros((2, 112, 112, 3), np.uint8)])["video_grid_thw"].tolist() == [[1, 8, 8]]


def test_two_frames_of_one_patch_are_its_pixels_in_the_order_of_the_tower():
    facts = {**FACTS, "patch_size": 2, "image_mean": [0.0] * 3, "image_std": [1.0] * 3}
    made = FrameProcessor("qwen2_vl", {**facts, "min_pixels": 1, "max_pixels": 10_000}, None)
    frames = np.arange(2 * 4 * 4 * 3, dtype=np.uint8).reshape(2, 4, 4, 3)
    patches = (made([frames])["pixel_values_videos"] * 255).round().int()
    assert patches.shape == (4, 3 * 2 * 2 * 2)
    expected = [frames[t, y, 2 + x, c] for c in range(3) for t in range(2) for y in range(2) for x in range(2)]
    assert patches[1].tolist() == expected  # the second patch: the upper right


def test_videos_stand_where_their_markers_do_with_as_many_tokens(tmp_path, seeing_tokenizer, processor):
    rows = [
        {**shown_video([frame_files(4)]), "images": []},
        {**shown_video([], "Look at it."), "images": []},
        {**shown_video([frame_files(2), frame_files(3)], "a <video> b <image> c <video>"), "images": [image()]},
    ]
    data = prompts(tmp_path, seeing_tokenizer, processor, rows)
    first, text, both = data[0], data[1], data[2]
    said = seeing_tokenizer.decode(first["raw_prompt_ids"])
    seen = "<|vision_start|>" + "<|video_pad|>" * 8 + "<|vision_end|>"  # two pairs of frames of 2 x 2 tokens
    assert said == f"<|im_start|>user\n{seen}What?<|im_end|>\n<|im_start|>assistant\n"
    assert first["raw_prompt"][0]["content"] == [{"type": "video"}, {"type": "text", "text": "What?"}]
    assert first["multi_modal_inputs"]["video_grid_thw"].tolist() == [[2, 4, 4]]
    assert first["multi_modal_inputs"]["second_per_grid_ts"].tolist() == [1.0]
    assert "videos" not in first and [reds(v) for v in first["multi_modal_data"]["videos"]] == [[0, 20, 40, 60]]
    assert text["multi_modal_inputs"] == {} and text["multi_modal_data"] == {"images": [], "videos": []}
    assert both["multi_modal_inputs"]["video_grid_thw"].tolist() == [[1, 4, 4], [2, 4, 4]]
    assert both["multi_modal_inputs"]["image_grid_thw"].tolist() == [[1, 4, 4]]
    long = prompts(tmp_path, seeing_tokenizer, processor, rows[:2], max_prompt_length=14, filter_overlong_prompts=True)
    assert len(long) == 1
    with pytest.raises(DataError, match=r"row 0: truncation would cut through an image or video"):
        prompts(tmp_path, seeing_tokenizer, processor, rows[:1], max_prompt_length=12, truncation="left")[0]


def test_parts_of_type_video_hold_theirs_or_take_the_next(tmp_path, seeing_tokenizer, processor):
    file = tmp_path / "red.webp"
    file.write_bytes(animation())
    held = [{"type": "video_url", "video_url": {"url": str(file)}, "fps": 6}, {"type": "text", "text": "What?"}]
    taken = [{"type": "video", "fps": 6}, {"type": "text", "text": "What?"}]
    made = []
    for number, row in enumerate(({"prompt": [{"role": "user", "content": held}]}, shown_video([str(file)], taken))):
        (tmp_path / f"{number}.jsonl").write_text(json.dumps(row) + "\n")
        made.append(RLHFDataset(str(tmp_path / f"{number}.jsonl"), seeing_tokenizer, DataConfig(), processor)[0])
    assert made[0]["raw_prompt_ids"] == made[1]["raw_prompt_ids"]
    assert made[0]["multi_modal_inputs"]["video_grid_thw"].tolist() == [[3, 4, 4]]
    wide = prompts(
        tmp_path,
        seeing_tokenizer,
        processor,
        [shown_video([str(file)])],
        mm_processor_kwargs={"fps": 6, "max_pixels": 28 * 28},
    )[0]
    assert wide["multi_modal_inputs"]["video_grid_thw"].tolist() == [[3, 2, 2]]


@pytest.mark.parametrize("videos", [[], [frame_files(2), frame_files(2)]])
def test_markers_and_videos_that_do_not_match_name_file_and_row(tmp_path, seeing_tokenizer, processor, videos):
    rows = [shown_video([frame_files(2)]), shown_video(videos)]
    with pytest.raises(DataError, match=rf"rows\.parquet, row 1.*1 places for videos, and the row has {len(videos)} v"):
        prompts(tmp_path, seeing_tokenizer, processor, rows)


def test_a_missing_file_and_too_many_frames_name_file_and_row(tmp_path, seeing_tokenizer, processor):
    with pytest.raises(DataError, match=r"rows\.parquet, row 0, video 0: no such video. Got 'absent.mp4'"):
        prompts(tmp_path, seeing_tokenizer, processor, [shown_video(["absent.mp4"])])
    with pytest.raises(DataError, match=r"rows\.parquet, row 0, video 0: not a video. Got 'int'"):
        prompts(tmp_path, seeing_tokenizer, processor, [shown_video([{"video": 5}])])
    with pytest.raises(DataError, match=r"row 0, video 0: the video has 5 frames, more than data.max_video_frames=4"):
        prompts(tmp_path, seeing_tokenizer, processor, [shown_video([frame_files(5)])], max_video_frames=4)


def test_a_model_of_text_or_of_images_alone_refuses_videos(tmp_path, tokenizer, seeing_model):
    with pytest.raises(DataError, match=r"row 0: column 'videos' has videos, and the model reads only text"):
        prompts(tmp_path, tokenizer, None, [shown_video([frame_files(2)])])
    folder = seeing_model("gemma3")
    with pytest.raises(DataError, match=r"row 0, video 0: the model takes images and no videos"):
        prompts(tmp_path, hf_tokenizer(folder), load_processor(folder), [shown_video([frame_files(2)])])


def test_of_a_conversation_with_a_video_only_the_answer_is_trained(tmp_path, seeing_tokenizer, processor):
    row = shown_video([frame_files(4)])
    row = {"messages": [*row.pop("prompt"), {"role": "assistant", "content": "red"}], **row}
    file = write_prompts(tmp_path / "chat.parquet", [row])
    data = MultiTurnSFTDataset(str(file), seeing_tokenizer, SFTDataConfig(max_length=64), processor)[0]
    trained = data["input_ids"][data["loss_mask"].bool()]
    assert seeing_tokenizer.decode(trained) == "red<|im_end|>"
    assert int((data["input_ids"] == processor.wrapped.video_token_id).sum()) == 8
    assert data["multi_modal_inputs"]["pixel_values_videos"].shape == (32, 1176)
