"""The parallel sizes of a sampler are held against the devices that one engine gets, before anything is allocated."""

from __future__ import annotations

import pytest

from tests.harness.configs import PPO, describe, refused
from verl import device
from verl.config import load_config

R = "actor_rollout_ref.rollout"
T, P, E = f"{R}.tensor_model_parallel_size", f"{R}.pipeline_model_parallel_size", f"{R}.expert_parallel_size"
URL = f"{R}.server.url=http://localhost:30000"


@pytest.fixture
def gpus(monkeypatch):
    def has(count):
        monkeypatch.setattr(device, "accelerator", lambda: "cuda" if count else None)
        monkeypatch.setattr(device, "device_count", lambda _: count)

    has(8)
    return has


@pytest.fixture
def files(workplace, gpus):
    describe()


@pytest.fixture
def run(files):
    """The configuration of a run on a machine of eight GPUs."""
    return lambda *words, **how: load_config("ppo_trainer", [*PPO, *words], **how)


@pytest.fixture
def generate(files):
    usual = ["data.path=rows.parquet", "data.output_path=out.parquet", "model.path=model"]
    return lambda *words: load_config("generation", [*usual, *words])


@pytest.mark.parametrize("name", ["vllm", "sglang"])
def test_processes_of_a_node_divide_into_replicas_of_several_devices(run, name):
    eight = [f"{R}.name={name}", "trainer.n_gpus_per_node=8"]
    for words in ([f"{T}=2"], [f"{T}=2", "trainer.nnodes=2"], [f"{T}=2", f"{P}=4"], []):
        run(*eight, *words)
    said = refused(run, *eight, f"{T}=3")
    assert "8 processes hold 2 replicas of 3 (tensor) = 3, and 2 of them would hold nothing" in said
    across = [f"{R}.name={name}", "trainer.n_gpus_per_node=3", "trainer.nnodes=2", f"{T}=2"]
    assert "3 processes of a node hold 1 replica of 2 (tensor) = 2" in refused(run, *across)


def test_pipelines_and_experts_of_an_engine_count_too(run):
    eight = [f"{R}.name=vllm", "trainer.n_gpus_per_node=8"]
    said = refused(run, *eight, f"{T}=2", f"{P}=3")
    assert said.startswith(f"{P}: ") and "8 processes hold 1 replica of 2 (tensor) x 3 (pipeline) = 6" in said
    assert "splits the experts over all 1 tensor-parallel processes" in refused(run, f"{R}.name=vllm", f"{E}=4")
    assert "Got 3. Allowed: 1, 2." in refused(run, f"{R}.name=vllm", f"{T}=2", f"{E}=3")
    assert run(f"{R}.name=vllm", f"{T}=2", f"{E}=2").actor_rollout_ref.rollout.expert_parallel_size == 2
    assert "Got 3. Allowed: 1, 2, 4." in refused(run, f"{R}.name=sglang", f"{T}=4", f"{E}=3")
    assert run(f"{R}.name=sglang", f"{T}=4", f"{E}=2").actor_rollout_ref.rollout.expert_parallel_size == 2
    assert "data parallelism inside the sampler" in refused(run, *eight, f"{R}.data_parallel_size=2")
    for key in (T, P, E):
        assert f"{key}: out of range. Got 0. Allowed: 1 or more." in refused(run, f"{R}.name=vllm", f"{key}=0")


def test_one_process_has_the_devices_of_its_machine_and_a_worker_of_a_cluster_has_one(run, gpus):
    assert run(f"{R}.name=vllm", f"{T}=4", f"{P}=2").actor_rollout_ref.rollout.pipeline_model_parallel_size == 2
    said = refused(run, f"{R}.name=vllm", f"{T}=4", f"{P}=3")
    assert "takes 4 (tensor) x 3 (pipeline) = 12 devices, and the process that builds it has 8 GPUs" in said
    assert "has 1 GPU. Got 2. Allowed: at most 1." in refused(run, f"{R}.name=vllm", f"{T}=2", "trainer.runtime=ray")
    gpus(1)
    assert "has 1 GPU. Got 2. Allowed: at most 1." in refused(run, f"{R}.name=sglang", f"{T}=2")
    gpus(0)
    run(f"{R}.name=vllm", f"{T}=2")  # two processes of vLLM's own share the CPU


def test_servers_that_run_already_have_sizes_of_their_own(run):
    run(f"{R}.name=sglang", URL, f"{T}=4", "trainer.n_gpus_per_node=8")


def test_the_hf_engine_has_one_process_and_the_message_names_those_that_share_a_model_out(run):
    said = refused(run, f"{T}=2", "trainer.n_gpus_per_node=8")
    assert f"{T}: the hf engine holds the whole model in one process. Got 2. Allowed: 1." in said
    assert f"set {R}.name to vllm or sglang" in said


def test_generation_with_an_engine_of_several_devices_needs_one_that_shares_a_model_out(generate, gpus):
    said = refused(generate, "rollout.tensor_model_parallel_size=2")
    assert "rollout.tensor_model_parallel_size: the hf engine holds the whole model in one process. Got 2." in said
    generate("rollout.name=vllm", "rollout.tensor_model_parallel_size=2")
    gpus(1)
    assert "rollout.tensor_model_parallel_size: one engine takes 2 (tensor) = 2 devices" in refused(
        generate, "rollout.name=vllm", "rollout.tensor_model_parallel_size=2"
    )
    assert "Got 0. Allowed: 1 or more." in refused(generate, "rollout.tensor_model_parallel_size=0")


def test_servers_that_are_started_get_as_many_devices_as_an_engine_takes(run):
    eight = [f"{R}.name=vllm", "trainer.n_gpus_per_node=8"]
    run(*eight, f"{T}=2", f"{P}=2", served=True)
    said = refused(run, *eight, f"{T}=3", served=True)
    assert "trainer.n_gpus_per_node: 8 device(s) cannot be shared out to servers of 3 (tensor) = 3" in said
    assert "servers are started on this machine only" in refused(run, *eight, "trainer.nnodes=2", served=True)


def test_a_printed_configuration_that_cannot_run_is_refused_behind_its_last_line(run, capsys):
    words = [f"{R}.name=vllm", f"{T}=3", "trainer.n_gpus_per_node=8"]
    said = refused(run, *words, "--cfg", "job")
    assert "tensor_model_parallel_size: 3" in capsys.readouterr().out
    assert "8 processes hold 2 replicas" in said
