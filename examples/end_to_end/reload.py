"""Loads an exported folder with transformers alone, and in a real vLLM server, and lets both answer the same prompts.

    python examples/end_to_end/reload.py export test.parquet [--vllm-python path/to/venv-with-vllm/bin/python]

Greedy answers, float32. Ends with an error if a folder does not load or if the server's tokens are not those of
transformers.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator

import pandas as pd
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from verl.ports import free_port

START, ANSWER = 300.0, 60.0  # seconds


def prompts_of(path: str, tokenizer, count: int) -> list[list[int]]:
    """Token ids of the first prompts of a file, in the chat template."""
    rows = pd.read_parquet(path)["prompt"][:count]
    texts = [tokenizer.apply_chat_template(list(row), add_generation_prompt=True, tokenize=False) for row in rows]
    return [tokenizer.encode(text, add_special_tokens=False) for text in texts]


def by_transformers(folder: str, prompts: list[list[int]], length: int) -> list[list[int]]:
    """Greedy answers of the folder, loaded as anybody would."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    found = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        made = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=length)
        found.append(made[0, len(prompt) :].tolist())
    return found


@contextlib.contextmanager
def server(python: str, folder: str) -> Iterator[str]:
    """vLLM's own server over the folder, in the environment that ``python`` belongs to; gives its address."""
    port = free_port()
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", os.path.abspath(folder)]
    command += ["--port", str(port), "--dtype", "float32", "--max-model-len", "128", "--enforce-eager"]
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", **inherited}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        url, until = f"http://127.0.0.1:{port}", time.monotonic() + START
        while not _is_up(url):
            if process.poll() is not None or time.monotonic() > until:
                raise SystemExit(f"vLLM's server did not start: {' '.join(command)}")
            time.sleep(1)
        yield url
    finally:
        process.terminate()
        process.wait(30)


def _is_up(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5):
            return True
    except (urllib.error.URLError, OSError):
        return False


def by_vllm(url: str, folder: str, prompts: list[list[int]], length: int) -> list[str]:
    """Greedy answers of the server as text."""
    model = os.path.abspath(folder)
    body = {"model": model, "prompt": prompts, "max_tokens": length, "temperature": 0, "skip_special_tokens": True}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=ANSWER) as answer:
        return [choice["text"] for choice in sorted(json.load(answer)["choices"], key=lambda choice: choice["index"])]


def main() -> None:
    parser = argparse.ArgumentParser(description="Load an exported folder elsewhere and compare greedy answers.")
    parser.add_argument("folder", help="Hugging Face folder")
    parser.add_argument("prompts", help="parquet file with a column prompt")
    parser.add_argument(
        "--vllm-python", help="python of an environment with vLLM; without it only transformers loads it"
    )
    parser.add_argument("--length", type=int, default=16, help="most tokens per answer")
    parser.add_argument("--count", type=int, default=8, help="prompts")
    arguments = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(arguments.folder)
    prompts = prompts_of(arguments.prompts, tokenizer, arguments.count)
    ids = by_transformers(arguments.folder, prompts, arguments.length)
    texts = tokenizer.batch_decode(ids, skip_special_tokens=True)
    print(f"transformers: {len(texts)} answers, the first is {texts[0]!r}")
    if not arguments.vllm_python:
        print("vLLM: left out; name an environment that has it with --vllm-python")
        return
    with server(arguments.vllm_python, arguments.folder) as url:
        served = by_vllm(url, arguments.folder, prompts, arguments.length)
    differ = [i for i, (ours, theirs) in enumerate(zip(texts, served, strict=True)) if ours != theirs]
    if differ:
        raise SystemExit(f"answer {differ[0]} differs: {texts[differ[0]]!r} here, {served[differ[0]]!r} from vLLM")
    print(f"vLLM: the same {len(served)} answers")


if __name__ == "__main__":
    main()
