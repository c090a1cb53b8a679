"""Where the sampling settings of a model's folder come from."""

from __future__ import annotations

import json

from tests.harness.models import tiny_model_dir
from verl.utils.model import get_generation_config


def test_they_are_those_of_the_folder_then_those_of_the_model_then_none(tmp_path):
    folder = tiny_model_dir(tmp_path / "model")
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 0.25, "do_sample": True}))
    assert get_generation_config(str(folder)).temperature == 0.25
    (folder / "generation_config.json").unlink()
    ends = json.loads((folder / "config.json").read_text())["eos_token_id"]
    assert get_generation_config(str(folder)).eos_token_id == ends
    (tmp_path / "empty").mkdir()
    assert get_generation_config(str(tmp_path / "empty")) is None
