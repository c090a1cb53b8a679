"""Reward models for tests: a tiny trunk with a scalar head, in the policy's tokens or in its own."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForTokenClassification, PreTrainedTokenizerFast

from tests.harness.models import tiny_model_dir
from verl.config import PPOTrainerConfig, replace
from verl.trainer.models import frozen_reward_model
from verl.workers import RewardModelWorker

OTHER_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def reward_model_dir(folder: str | Path, *, own_tokenizer: bool = False, seed: int = 3, **model: Any) -> Path:
    """A token-classification folder with one label; ``own_tokenizer`` gives it other ids and another chat template."""
    folder = tiny_model_dir(folder, seed=seed, **model)
    config = AutoConfig.from_pretrained(folder, num_labels=1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        scorer = AutoModelForTokenClassification.from_config(config, dtype=torch.float32)
        torch.nn.init.normal_(scorer.score.weight)
    scorer.save_pretrained(folder)
    if own_tokenizer:
        written = json.loads((folder / "tokenizer.json").read_text())
        vocabulary = written["model"]["vocab"]
        words = sorted(vocabulary, key=vocabulary.get)
        special = words[:3]
        turned = dict(zip([*special, *reversed(words[3:])], range(len(words)), strict=True))
        written["model"]["vocab"] = turned
        (folder / "tokenizer.json").write_text(json.dumps(written))
        tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
        tokenizer.chat_template = OTHER_TEMPLATE
        for left_over in ("chat_template.jinja",):
            (folder / left_over).unlink(missing_ok=True)
        tokenizer.save_pretrained(folder)
    return folder


def direct_score(folder: Path, ids: list[int]) -> float:
    """The head behind the last of these tokens, by transformers alone."""
    model = AutoModelForTokenClassification.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0, -1, 0].item()


@contextlib.contextmanager
def judge(answer: str) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A server that answers every chat completion with the same text: its address, and what it was asked."""
    asked: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            body = json.dumps({"choices": [{"message": {"content": answer}}]}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        thread.join(10)
        server.server_close()


def reward_worker(folder) -> RewardModelWorker:
    """A worker of its own that holds the reward model in ``folder``."""
    config = replace(PPOTrainerConfig(), **{"reward.reward_model.model_path": str(folder)})
    worker = RewardModelWorker(frozen_reward_model(config))
    worker.init_model()
    return worker
