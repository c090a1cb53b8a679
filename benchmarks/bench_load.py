"""The endpoint, a sampler's host and the processes that score, under a thousand connections and hostile answers.

    PYTHONPATH=. python benchmarks/bench_load.py [endpoint] [host] [scorers] [--connections 1000] [--answers 10000]

- ``endpoint``: agents that all call at once, twice each, each over its connection; the sampler behind it only waits.
- ``host``: requests that all come at once, in three bursts, to a tiny model in a process of its own, and the same
  requests to the same model in this process; the tokens have to be equal.
- ``scorers``: answers to a reward function in two processes, 5 % of which end their process, raise, fork or never
  return, and the same answers without them; every good answer has to have its score, every hostile one a failure.

Printed: seconds, latencies, and the ratio to the run without connections or hostile answers. The status is 1 where an
answer is lost, doubled or wrong, or where descriptors are left open.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from urllib.parse import urlsplit

import psutil
from figures import ROOT

from tests.agent_loop.server.scripted import Scripted, rollout, rows
from tests.harness.models import tiny_model_dir
from tests.harness.samplers import requests, sample
from verl.rewards import RewardSample, Scorer, ScoringLimits, load_reward_function
from verl.rollout.base import Completion, Request, Sampler
from verl.rollout.hf.sampler import HFSampler
from verl.rollout.server.host import LISTENING
from verl.rollout.server.process import KEY
from verl.rollout.server.sampler import ServerSampler

SAMPLER_SECONDS, BURSTS, TOKENS = 0.2, 3, 16
TIMEOUT_SECONDS, HOSTILE_SHARE = 1.0, 20
REWARD = """
import os, signal

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    if solution_str == "exit":
        os._exit(3)
    if solution_str == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    if solution_str == "raise":
        raise ValueError(solution_str)
    if solution_str == "fork":
        os.fork()
        raise SystemExit(1)
    while solution_str == "loop":
        pass
    return float(solution_str == ground_truth)
"""
HOSTILE = ("raise", "exit", "raise", "crash", "fork", "raise", "exit", "raise", "crash", "loop")


class Waiting(Scripted):
    """A sampler on another machine: an answer takes `SAMPLER_SECONDS` and none of this machine's time."""

    async def generate(self, request: Request) -> Completion:
        await asyncio.sleep(SAMPLER_SECONDS)
        return await super().generate(request)


def endpoint(connections: int) -> bool:
    """Agents that all begin at once; two calls each."""
    begin, latencies, faults = threading.Barrier(connections), list[float](), Counter[str]()

    def agent(base_url: str, api_key: str, row: dict, model: str) -> float:
        place = urlsplit(base_url)
        begin.wait(300)
        connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=300)
        messages = [{"role": "user", "content": "hi"}]
        for _ in range(2):
            start = time.perf_counter()
            body = json.dumps({"model": model, "messages": messages})
            headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
            connection.request("POST", f"{place.path}/chat/completions", body, headers)
            answer = connection.getresponse()
            content = json.loads(answer.read())
            latencies.append(time.perf_counter() - start)
            if answer.status != 200:
                faults[f"status {answer.status}: {content}"[:200]] += 1
                return 0.0
            messages += [content["choices"][0]["message"], {"role": "user", "content": "more"}]
        connection.close()
        return 1.0

    before, start = psutil.Process().num_fds(), time.perf_counter()
    batch = rollout(Waiting(*["word"] * (2 * connections)), agent, rows(connections), timeout=600.0)
    seconds, left = time.perf_counter() - start, psutil.Process().num_fds() - before
    scored = int(batch.batch["rm_scores"].sum())
    latencies.sort()
    median, late = statistics.median(latencies), latencies[int(0.99 * len(latencies))]
    print(
        f"endpoint: {connections} connections, {len(latencies)} answers in {seconds:.1f} s, median {median:.2f} s, "
        f"99 % {late:.2f} s, {scored} rows scored, {left} descriptors more, faults {dict(faults) or 'none'}",
        flush=True,
    )
    return scored == connections and not faults and left <= 8


def host(connections: int) -> bool:
    """Bursts of requests, each over its connection until it is answered."""
    with tempfile.TemporaryDirectory() as folder:
        model = tiny_model_dir(Path(folder))
        command = [sys.executable, "-m", "verl.rollout.server.host", f"actor_rollout_ref.model.path={model}"]
        secret = "a key that both sides know"
        environment = {**os.environ, KEY: secret, "PYTHONPATH": str(ROOT)}
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        assert process.stdout is not None
        try:
            url = process.stdout.readline().removeprefix(LISTENING).strip()
            remote = ServerSampler(url, model=str(model), timeout=600.0, max_connections=connections, api_key=secret)
            there, open_before = psutil.Process(process.pid), psutil.Process(process.pid).num_fds()
            seconds, answers = bursts(remote, connections)
            alone, expected = bursts(HFSampler(str(model), device="cpu"), connections)
            left = there.num_fds() - open_before
        finally:
            process.kill()
            process.wait()
    same = [(d.request_id, d.token_ids) for d in answers] == [(d.request_id, d.token_ids) for d in expected]
    print(
        f"host: {BURSTS} bursts of {connections} connections, {len(answers)} answers in {seconds:.1f} s, "
        f"in this process {alone:.1f} s, ratio {seconds / alone:.2f}, tokens {'equal' if same else 'DIFFER'}, "
        f"{left} descriptors of the host more",
        flush=True,
    )
    return same and left <= connections


def bursts(sampler: Sampler, count: int) -> tuple[float, list[Completion]]:
    answers, start = list[Completion](), time.perf_counter()
    for number in range(BURSTS):
        prompts = [(10 + number, 11, 12 + place % 50) for place in range(count)]
        answers += sample(sampler, requests(prompts, 1, max_tokens=TOKENS, ignore_eos=True, seed=number))
    return time.perf_counter() - start, answers


def scorers(answers: int) -> bool:
    """The good answers alone, and with hostile ones among them."""
    texts = [HOSTILE[i // HOSTILE_SHARE % len(HOSTILE)] if i % HOSTILE_SHARE == 7 else "good" for i in range(answers)]
    good = [text for text in texts if text == "good"]
    children = len(psutil.Process().children(recursive=True))
    alone, _ = scored(good)
    seconds, results = scored(texts)
    right = all((r.score == 1.0) if text == "good" else r.failure is not None for text, r in zip(texts, results))
    left = len(psutil.Process().children(recursive=True)) - children
    kinds = Counter(r.failure.kind for r in results if r.failure is not None)
    loops = texts.count("loop") * TIMEOUT_SECONDS / 2
    print(
        f"scorers: {answers} answers, {answers - len(good)} of them hostile, {seconds:.1f} s, "
        f"without these {alone:.1f} s (those that never return take {loops:.1f} s of their limit in two processes), "
        f"{'each as expected' if right else 'SOME DIFFER'}, failures {dict(kinds)}, {left} processes left",
        flush=True,
    )
    return right and left == 0


def scored(texts: list[str]) -> tuple[float, list]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "reward.py"
        file.write_text(REWARD)
        scorer = Scorer(load_reward_function(str(file)), ScoringLimits(timeout=TIMEOUT_SECONDS, num_workers=2))
        scorer.prepare()
        start = time.perf_counter()
        results = scorer.score([RewardSample("d", text, "good", row=row) for row, text in enumerate(texts)])
        seconds = time.perf_counter() - start
        scorer.close()
    return seconds, results


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("parts", nargs="*", choices=("endpoint", "host", "scorers"), default=[])
    parser.add_argument("--connections", type=int, default=1000)
    parser.add_argument("--answers", type=int, default=10_000)
    arguments = parser.parse_args()
    parts = {
        "endpoint": lambda: endpoint(arguments.connections),
        "host": lambda: host(arguments.connections),
        "scorers": lambda: scorers(arguments.answers),
    }
    passed = [parts[name]() for name in arguments.parts or parts]
    return int(not all(passed))


if __name__ == "__main__":
    sys.exit(main())
