"""The trials of recipes with tools: what their files hold, and that a call is few tokens."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pandas as pd
import pytest
from PIL import Image
from transformers import AutoConfig, AutoTokenizer

from examples.vision.make_data import COLOURS
from recipe.deepeyes import trial as deepeyes
from recipe.deepeyes.zoom import NAME
from recipe.retool import trial as retool


def call_in(text: str) -> dict:
    return json.loads(text.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>"))


def test_retool_shows_programs_and_guesses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("sys.argv", ["trial", str(tmp_path)])
    retool.main()
    rows = pd.read_parquet(tmp_path / "sft.parquet")["messages"]
    calls = [messages for messages in rows if len(messages) == 4]
    assert 0.2 < len(calls) / len(rows) < 0.3
    question, call, result, answer = (message["content"] for message in calls[0])
    assert call_in(call) == {"name": "code_interpreter", "arguments": {"code": f"print({question})"}}
    a, b = map(int, question.split("*"))
    assert result == str(a * b) and answer == f"\\boxed{{{a * b}}}"
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "base")
    ids = tokenizer(call, add_special_tokens=False)["input_ids"]
    assert len(ids) == 2 + len(question) and tokenizer.decode(ids) == call
    prompts = pd.read_parquet(tmp_path / "train.parquet")
    questions = {row[0]["content"] for row in prompts["prompt"]}
    assert len(questions) == 1024 and not questions & {messages[0]["content"] for messages in rows}


def test_deepeyes_hides_a_disc_that_the_tool_can_show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("sys.argv", ["trial", str(tmp_path), "--rows", "128"])
    deepeyes.main()
    rows = pd.read_parquet(tmp_path / "sft.parquet")
    looks = rows[rows["messages"].map(len) == 4]
    assert 0.7 < len(looks) / len(rows) < 0.8
    first = looks.iloc[0]
    call = call_in(first["messages"][1]["content"])
    assert call == {"name": NAME, "arguments": {"bbox_2d": [0, 0, 56, 56]}}
    picture, part = (Image.open(io.BytesIO(image["bytes"])) for image in first["images"])
    assert picture.size == (448, 448) and part.tobytes() == picture.crop((0, 0, 56, 56)).tobytes()
    answer = first["messages"][3]["content"].removeprefix("<answer>").removesuffix("</answer>")
    assert COLOURS[answer] in {colour for _, colour in part.getcolors()}
    prompt = pd.read_parquet(tmp_path / "train.parquet").iloc[0]
    look = prompt["extra_info"]["tools_kwargs"][NAME]["create_kwargs"]["image"]
    assert Image.open(io.BytesIO(look)).size == (448, 448)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "base")
    assert len(tokenizer(deepeyes.CALL, add_special_tokens=False)["input_ids"]) == 1
    assert AutoConfig.from_pretrained(tmp_path / "base").get_text_config().vocab_size == len(tokenizer)
