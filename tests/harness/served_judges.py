"""A tiny language model that judges: its servers, questions to them, and its answers by transformers alone."""

from __future__ import annotations

import functools
import json
import urllib.request
from pathlib import Path
from typing import Any

import torch

from tests.harness.waiting import HANGS
from verl.agent_loop.judges import Judges
from verl.config import PPOTrainerConfig, replace
from verl.data import hf_tokenizer

RM = "reward.reward_model"
ASKING_SCORER = """import json
import urllib.request


def compute_score(data_source, solution_str, ground_truth, extra_info=None, reward_router_address=None):
    body = {"model": "judge", "messages": [{"role": "user", "content": "Grade: " + solution_str}],
            "temperature": 0, "max_tokens": 6}
    request = urllib.request.Request(f"http://{reward_router_address}/v1/chat/completions",
                                     json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as answer:
        reply = json.load(answer)["choices"][0]["message"]["content"]
    return {"score": sum(reply.encode()) % 101 / 100, "answer": solution_str}
"""
"""A reward function that makes a score of the judge's reply, see `score_of`."""


def judges_over(folder: Path, hang_seconds: float | None = None, **rollout: Any) -> Judges:
    """Not started yet; ``rollout`` are settings below ``reward.reward_model.rollout``."""
    settings = {"name": "hf_server", **rollout}
    changes = {f"{RM}.rollout.{name}": value for name, value in settings.items()}
    config = replace(PPOTrainerConfig(), **{f"{RM}.model_path": str(folder), **changes})
    return Judges(config.reward.reward_model, lambda: hf_tokenizer(folder), hang_seconds)


def question(address: str, text: str, path: str = "/v1/chat/completions", **fields: Any) -> dict[str, Any]:
    """The answer of a judge to one message, by the standard library alone."""
    body = {"model": "judge", "messages": [{"role": "user", "content": text}], "temperature": 0, "max_tokens": 6}
    data, headers = json.dumps({**body, **fields}).encode(), {"Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(f"http://{address}{path}", data, headers), timeout=HANGS) as got:
        return json.load(got)


def reply_of(answer: dict[str, Any]) -> str:
    return answer["choices"][0]["message"]["content"]


def score_of(folder: Path, answer: str) -> float:
    """The score that `ASKING_SCORER` gives an answer."""
    return sum(greedy_reply(folder, f"Grade: {answer}").encode()) % 101 / 100


def greedy_reply(folder: Path, text: str, max_tokens: int = 6) -> str:
    """What the model in a folder replies to one message at temperature 0."""
    tokenizer, model = _loaded(folder)
    messages = [{"role": "user", "content": text}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    ids = tokenizer(prompt, add_special_tokens=False, return_tensors="pt")["input_ids"]
    drawn = model.generate(ids, do_sample=False, max_new_tokens=max_tokens)[0, ids.size(1) :]
    return tokenizer.decode(drawn, skip_special_tokens=True)


@functools.lru_cache(maxsize=1)
def _loaded(folder: Path) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return AutoTokenizer.from_pretrained(folder), model
