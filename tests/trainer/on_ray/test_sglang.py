"""One SGLang server of two devices beside two trainer ranks: its own launcher, started once; a stand-in answers.

SGLang itself cannot run on the machines of the tests. The stand-in takes the flags of ``sglang.launch_server`` and the
requests that are documented for 0.5.23.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.harness.runs import records
from tests.trainer.on_ray.conftest import Run

pytestmark = pytest.mark.slow
R = "actor_rollout_ref.rollout"
STEPS = 2
LAUNCHER = """
import argparse, json, os, random, threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

parser = argparse.ArgumentParser()
for name in ("model-path", "host", "dtype", "device"):
    parser.add_argument(f"--{name}", required=True)
for name in ("port", "random-seed", "tp-size", "pp-size", "ep-size", "max-running-requests", "context-length"):
    parser.add_argument(f"--{name}", type=int)
parser.add_argument("--mem-fraction-static", type=float)
for name in ("disable-cuda-graph", "disable-radix-cache"):
    parser.add_argument(f"--{name}", action="store_true")
arguments, lock = parser.parse_args(), threading.Lock()

def note(**what):
    with lock, open(LOG, "a") as log:
        log.write(json.dumps(what) + "\\n")

note(began=os.getpid(), tp=arguments.tp_size, port=arguments.port)

class Handler(BaseHTTPRequestHandler):
    def reply(self, content):
        body = json.dumps(content).encode()
        self.send_response(200); self.send_header("content-length", str(len(body))); self.end_headers()
        self.wfile.write(body)
    def do_GET(self): self.reply({})
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])) or b"{}")
        if self.path == "/generate":
            sampling = asked["sampling_params"]
            draw = random.Random(sampling["sampling_seed"])
            triples = [[-5.5, draw.randrange(3, 259), None] for _ in range(sampling["max_new_tokens"])]
            self.reply({"meta_info": {"finish_reason": {"type": "length"}, "output_token_logprobs": triples}})
        elif self.path == "/update_weights_from_disk":
            files = sorted(name for name in os.listdir(asked["model_path"]) if name.endswith(".safetensors"))
            note(version=asked["weight_version"], files=len(files))
            self.reply({"success": True, "message": ""})
        else:
            self.reply({})
    def log_message(self, *args): pass

ThreadingHTTPServer((arguments.host, arguments.port), Handler).serve_forever()
"""


@pytest.fixture
def log(task: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What servers that were started have noted; a package ``sglang`` lies where the processes of the run find it."""
    package, log = task / "sglang", task / "sglang.jsonl"
    package.mkdir(exist_ok=True)
    log.unlink(missing_ok=True)
    (package / "__init__.py").write_text("")
    (package / "launch_server.py").write_text(f"LOG = {str(log)!r}\n{LAUNCHER}")
    monkeypatch.syspath_prepend(task)
    return log


def noted_in(log: Path) -> list[dict[str, Any]]:
    return records(log)


def assert_each_version_came_once(noted: list[dict[str, Any]]) -> None:
    versions = [one["version"] for one in noted]
    assert len(set(versions)) == len(versions) == STEPS + 1 and all(one["files"] for one in noted)


def test_the_group_s_first_rank_starts_one_server_of_two_devices_that_gets_each_version_once(
    train: Callable[..., Run], log: Path
):
    size = f"{R}.tensor_model_parallel_size=2"
    run = train("over_sglang", STEPS, "trainer.n_gpus_per_node=2", f"{R}.name=sglang", size)
    assert len(run.steps) == STEPS and all(len(step) == 8 for step in run.samples)
    began, *noted = noted_in(log)
    assert began["tp"] == 2 and not any("began" in one for one in noted), "one server, not one per rank"
    assert_each_version_came_once(noted)
    _, alive = psutil.wait_procs([one for one in psutil.process_iter() if one.pid == began["began"]], 60)
    assert not alive, "it ends with the run"
