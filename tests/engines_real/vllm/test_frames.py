"""`FrameProcessor` against transformers' video processors, which need the torchvision of this environment."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoImageProcessor
from transformers.models.glm4v.video_processing_glm4v import Glm4vVideoProcessor
from transformers.models.internvl.video_processing_internvl import InternVLVideoProcessor
from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

from tests.harness.vision import clip, vision_dir
from verl.data.vision.frames import FrameProcessor

KINDS = {
    "qwen2_5_vl": (Qwen2VLVideoProcessor, {"size": {"shortest_edge": 3136, "longest_edge": 12544}}),
    "qwen3_vl": (Qwen3VLVideoProcessor, {"size": {"shortest_edge": 3136, "longest_edge": 40000}, "patch_size": 14}),
    "glm4v": (Glm4vVideoProcessor, {"size": {"shortest_edge": 12544, "longest_edge": 40000}}),
    "internvl": (InternVLVideoProcessor, {"size": {"height": 28, "width": 28}}),
}


@pytest.mark.parametrize("family", KINDS)
@pytest.mark.parametrize("shape", [(4, 56, 84), (5, 100, 61), (2, 20, 30), (6, 200, 120)])
def test_frames_become_the_tensors_of_transformers(tmp_path, family, shape):
    kind, facts = KINDS[family]
    folder = vision_dir(tmp_path, family)
    theirs = kind(**facts, image_mean=[0.5] * 3, image_std=[0.4] * 3)
    of_images = AutoImageProcessor.from_pretrained(folder)
    given = {**facts, "image_mean": [0.5] * 3, "image_std": [0.4] * 3, "patch_size": 14}
    ours = FrameProcessor.of(AutoConfig.from_pretrained(folder), str(folder), given, of_images)
    frames = np.stack([np.asarray(frame) for frame in clip(*shape)["frames"]])
    made = ours([frames])
    expected = theirs(videos=[frames], do_sample_frames=False, return_tensors="pt")
    for name in ("pixel_values_videos", "video_grid_thw"):
        if name in expected:
            torch.testing.assert_close(made[name].float(), expected[name].float(), atol=1e-5, rtol=0)
