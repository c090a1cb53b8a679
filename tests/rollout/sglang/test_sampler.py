"""SGLang's server as it is started and reached here; SGLang itself cannot run here, a stand-in follows its pages."""

from __future__ import annotations

import dataclasses
import sys

import psutil
import pytest

from tests.harness.models import tiny_model_dir
from tests.harness.servers import serving
from tests.rollout.server.test_kinds import sglang_answer
from tests.rollout.server.test_sampler import ask
from verl import env
from verl.config import ActorRolloutRefConfig, PPOTrainerConfig, leaves, record_reads, replace
from verl.config.loading.configuration import read_config
from verl.errors import ConfigError, MissingDependencyError
from verl.outcomes import run_now
from verl.ports import free_port
from verl.rollout import Request, SamplingParams
from verl.rollout.lost import EngineLostError
from verl.rollout.place import place_sampler
from verl.rollout.server.process import ServerProcess
from verl.rollout.server.sampler import ServerSampler
from verl.rollout.service import SamplerService
from verl.rollout.sglang import sampler as module
from verl.rollout.sglang.sampler import SGLangSampler, as_flags, command

R = "actor_rollout_ref.rollout"
STAND_IN = """
import json, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.send_header("content-length", "2"); self.end_headers(); self.wfile.write(b"{}")
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        triples = [[-0.25, t, None] for t in asked["input_ids"][:asked["sampling_params"]["max_new_tokens"]]]
        meta = {"finish_reason": {"type": "length"}, "output_token_logprobs": triples}
        body = json.dumps({"meta_info": meta}).encode()
        self.send_response(200); self.send_header("content-length", str(len(body))); self.end_headers()
        self.wfile.write(body)
    def log_message(self, *args): pass
HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tiny_model_dir(tmp_path_factory.mktemp("model"), max_positions=64)
    return dataclasses.replace(ActorRolloutRefConfig().model, path=str(folder))


def section(**changes):
    return replace(ActorRolloutRefConfig().rollout, **{"server.max_start_wait_time": 20.0, **changes})


def test_the_sections_become_the_command_line_of_the_server(model):
    found = command(
        section(tensor_model_parallel_size=4, pipeline_model_parallel_size=2, expert_parallel_size=4,
                gpu_memory_utilization=0.7, max_model_len=4096, quantization="fp8",
                **{"engine_kwargs.sglang": {"attention_backend": "fa3", "log_level": None}}),
        model, "cuda", 30001,
    )  # fmt: skip
    assert found[1:3] == ["-m", "sglang.launch_server"]
    flags = dict(zip(found[3::2], found[4::2]))
    expected = {"--tp-size": "4", "--pp-size": "2", "--ep-size": "4", "--mem-fraction-static": "0.7",
                "--context-length": "4096", "--dtype": "bfloat16", "--quantization": "fp8",
                "--attention-backend": "fa3", "--port": "30001"}  # fmt: skip
    assert {name: flags.get(name) for name in expected} == expected and "--log-level" not in found


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("tp", "rollout.tensor_model_parallel_size"),
        ("pipeline_parallel_size", "rollout.pipeline_model_parallel_size"),
        ("dp_size", "several replicas share the requests"),
        ("port", "Leave it out"),
    ],
)
def test_flags_that_move_a_server_or_change_its_devices_are_refused(model, name, fix):
    with pytest.raises(ConfigError, match=f"engine_kwargs.sglang.{name}: .*{fix}"):
        command(section(**{"engine_kwargs.sglang": {name: 2}}), model, "cuda", 30001)


def test_flags_without_a_value_stand_alone_and_switched_off_ones_not_at_all():
    assert as_flags({"a-b": 1, "c": True, "d": None, "e": False, "f": 0}) == ["--a-b", "1", "--c", "--f", "0"]


def test_without_sglang_the_error_names_both_ways_out(model, monkeypatch):
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError, match=r"SGLang is not installed.*server.url=http://host:30000"):
        SGLangSampler.from_config(section(), model)


def test_a_server_is_started_asked_and_ended(model, monkeypatch, tmp_path):
    (tmp_path / "stand_in.py").write_text(STAND_IN)
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(
        module, "command", lambda r, m, d, port: [sys.executable, str(tmp_path / "stand_in.py"), str(port)]
    )
    sampler = SGLangSampler.from_config(section(), model)
    (done,) = ask(sampler, Request("a", (40, 41, 42), SamplingParams(max_tokens=2)))
    assert (done.token_ids, done.log_probs) == ((40, 41), (-0.25, -0.25))
    sampler.close()
    assert not sampler.process.is_alive


def test_a_server_of_several_devices_sees_those_of_its_replica(model, monkeypatch, tmp_path):
    """Pretended devices: the stand-in does not look at them."""
    (tmp_path / "stand_in.py").write_text(STAND_IN)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "6")
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(
        module, "command", lambda r, m, d, port: [sys.executable, str(tmp_path / "stand_in.py"), str(port)]
    )
    sampler = place_sampler(section(name="sglang", tensor_model_parallel_size=2), model, "cuda", devices=["6", "2"])
    started = psutil.Process(sampler.process.process.pid)
    assert {one.environ()["CUDA_VISIBLE_DEVICES"] for one in [started, *started.children()]} == {"6,2"}
    assert started.environ()["SGLANG_VLM_CACHE_SIZE_MB"] == "0", "no features of images outlive the weights"
    assert env.get("CUDA_VISIBLE_DEVICES") == "6"
    sampler.close()


def test_a_server_that_does_not_start_leaves_its_last_words_in_the_error():
    port = free_port()
    process = ServerProcess.foreign(
        [sys.executable, "-c", "raise SystemExit('no kernels for this GPU')"], port, name="it"
    )
    with pytest.raises(EngineLostError, match="it ended with status 1; it said last: no kernels for this GPU"):
        run_now(process.wait_until_up(20.0))


def test_a_server_that_never_comes_up_is_given_up_in_time():
    process = ServerProcess.foreign([sys.executable, "-c", "import time; time.sleep(60)"], free_port(), name="it")
    with pytest.raises(EngineLostError, match=r"did not come up within 0.5 s"):
        run_now(process.wait_until_up(0.5))
    process.close()
    assert not process.is_alive


def test_running_servers_are_used_and_several_of_them_are_replicas(model):
    with serving({"/generate": sglang_answer()}) as one, serving({"/generate": sglang_answer()}) as two:
        single = SGLangSampler.from_config(section(**{"server.url": one.url}), model)
        both = SGLangSampler.from_config(section(**{"server.url": [one.url, two.url]}), model)
        assert isinstance(both, SamplerService) and not isinstance(single, SamplerService)
        for sampler in (single, both):
            assert ask(sampler, Request("a", (40,), SamplingParams(max_tokens=2)))[0].token_ids == (7, 8)


def test_every_setting_that_sglang_and_servers_follow_is_read_for_them(model, monkeypatch):
    config = read_config("ppo_trainer", [f"{R}.name=sglang"])
    with serving({"/generate": sglang_answer()}) as server:
        rollout = replace(config.actor_rollout_ref.rollout, **{"server.url": server.url})
        with record_reads() as reads:
            command(rollout, config.actor_rollout_ref.model, "cpu", 1)
            ServerSampler.from_config(rollout, model)
    followed = {key for key, field in leaves(PPOTrainerConfig) if {"sglang", "server"} & set(field.metadata["engines"])}
    assert {key for key in followed if key.startswith(R)} - reads == set()
