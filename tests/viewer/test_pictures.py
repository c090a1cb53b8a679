"""What a model saw is shown with its sample."""

from __future__ import annotations

import base64
import io
from pathlib import Path

import pandas as pd
import pytest
from PIL import Image

from tests.harness.runs import train
from tests.harness.vision import tiny_vision_dir, vision_example
from tests.viewer.served import served

REWARD = Path(__file__).parents[2] / "examples" / "vision" / "reward.py"


@pytest.mark.slow
def test_the_picture_of_a_prompt_is_shown_with_its_samples(workplace):
    tiny_vision_dir("model")
    rows = vision_example("make_data").rows("colour", {"train": 4}, 56, 0)["train"]
    pd.DataFrame(rows).to_parquet("train.parquet")
    train(
        "data.max_response_length=4", "data.train_batch_size=2", "actor_rollout_ref.rollout.n=2",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2", f"reward.custom_reward_function.path={REWARD}",
        "trainer.default_local_dir=run", "trainer.rollout_data_dir=run/samples",
    )  # fmt: skip
    with served(Path("run")) as site:
        for row in site.indexed("samples")["rows"]:
            (link,) = site.get("sample", id=row["id"])["images"]
            head, _, data = link.partition(",")
            assert head == "data:image/png;base64"
            assert Image.open(io.BytesIO(base64.b64decode(data))).size == (56, 56)
