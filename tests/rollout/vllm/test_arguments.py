"""From the configuration to vLLM's arguments, and the range of versions; vLLM itself is not needed here."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import threading

import pytest
import torch

from tests.harness.models import tiny_model_dir
from verl.config import ActorRolloutRefConfig, PPOTrainerConfig, leaves, record_reads
from verl.config.loading.configuration import read_config
from verl.errors import ConfigError, MissingDependencyError, NotBuiltError, RolloutError
from verl.metrics import notices
from verl.rollout.model_facts import ModelFacts
from verl.rollout.vllm import arguments, versions, weight_transfer
from verl.rollout.vllm.extension import buckets
from verl.weight_sync import chunk_weights

R = "actor_rollout_ref.rollout"


@dataclasses.dataclass
class FakeEngineArgs:
    """Stands for vLLM's dataclass of arguments in an older version."""

    model: str = ""
    max_num_seqs: int = 1
    swap_space: int = 0


def section(**rollout):
    config = ActorRolloutRefConfig()
    return dataclasses.replace(config.rollout, **rollout), dataclasses.replace(config.model, path="there")


def made(device="cpu", facts=None, **rollout):
    node, model = section(**rollout)
    return arguments.from_config(node, model, device, facts or ModelFacts(head_dim=64, max_model_len=128))


def test_the_sections_become_engine_arguments():
    found = made(max_num_seqs=7, gpu_memory_utilization=0.3, enable_prefix_caching=False, max_model_len=64)
    expected = {"model": "there", "max_num_seqs": 7, "gpu_memory_utilization": 0.3, "enable_prefix_caching": False,
                "max_model_len": 64, "dtype": "float32", "enforce_eager": True, "logprobs_mode": "processed_logprobs",
                "skip_tokenizer_init": True, "tensor_parallel_size": 1, "seed": 42}  # fmt: skip
    assert {name: found[name] for name in expected} == expected
    assert made("cuda")["dtype"] == "bfloat16" and made("cuda")["enforce_eager"] is False


def test_the_file_of_torchao_is_where_vllm_looks_for_it_and_an_adapter_is_rounded_with_the_base():
    found = made("cuda", name="vllm", quantization="torchao", quantization_config_file="ao.json")
    assert found["quantization"] == "torchao" and found["hf_overrides"] == {"quantization_config_file": "ao.json"}
    assert made("cuda", name="vllm", quantization="fp8")["quantization"] == "fp8" and "hf_overrides" not in made()
    node, model = section(name="vllm", quantization="fp8")
    adapted = arguments.from_config(node, dataclasses.replace(model, lora_rank=12), "cuda", ModelFacts(head_dim=64))
    assert "enable_lora" not in adapted
    with pytest.raises(RolloutError, match=r"quantization: vLLM on CPU has no FP8 kernels.*rollout\.name=hf"):
        arguments.check_quantization({"quantization": "fp8"}, on_cpu=True)
    arguments.check_quantization({"quantization": "fp8"}, on_cpu=False)
    arguments.check_quantization({"quantization": "torchao"}, on_cpu=True)


def test_an_adapter_gets_room_of_the_next_rank_that_vllm_has_and_a_base_to_be_added_to():
    node, model = section(name="vllm")
    found = arguments.from_config(node, dataclasses.replace(model, lora_rank=12), "cuda", ModelFacts(head_dim=64))
    assert (found["enable_lora"], found["max_lora_rank"], found["max_loras"]) == (True, 16, 1)
    assert found["load_format"] == "auto" and made("cuda", name="vllm")["load_format"] == "dummy"
    merging = dataclasses.replace(model, lora_rank=12, lora=dataclasses.replace(model.lora, merge=True))
    assert "enable_lora" not in arguments.from_config(node, merging, "cpu", ModelFacts(head_dim=64))
    with pytest.raises(RolloutError, match=r"room for an adapter of this rank.*lora\.merge=true"):
        arguments.from_config(node, dataclasses.replace(model, lora_rank=513), "cpu", ModelFacts(head_dim=64))


def test_the_context_is_what_a_run_needs_unless_it_is_set():
    node = {"prompt_length": 30, "response_length": 20}
    assert made(**node)["max_model_len"] == 50
    assert made(**node, max_model_len=100)["max_model_len"] == 100
    assert made(prompt_length=512, response_length=512)["max_model_len"] == 128
    assert made(**node, enable_chunked_prefill=False, max_num_batched_tokens=40)["max_num_batched_tokens"] == 50
    assert made(**node, max_num_batched_tokens=40)["max_num_batched_tokens"] == 40


def test_weights_start_from_the_folder_where_a_reload_can_be_compared_with_them():
    assert made("cpu")["load_format"] == "auto"
    assert made("cuda")["load_format"] == "dummy"
    assert made("cuda", ModelFacts(is_moe=True))["load_format"] == "auto"


def test_engine_kwargs_are_passed_on_but_not_the_samplers_own():
    assert arguments.merge_arguments({"seed": 1}, {"swap_space": 2, "seed": 3}) == {"swap_space": 2, "seed": 3}
    with pytest.raises(
        ConfigError, match=r"logprobs_mode: this argument of vLLM is set by the sampler.*rollout\.logpro"
    ):
        arguments.merge_arguments({}, {"logprobs_mode": "raw_logprobs"})
    assert made(logprobs_mode="raw_logprobs")["logprobs_mode"] == "raw_logprobs"


def test_the_sizes_of_an_engine_come_from_keys_of_their_own_and_make_it_start_its_workers_itself():
    two = made(tensor_model_parallel_size=2, pipeline_model_parallel_size=3)
    sizes = {"tensor_parallel_size": 2, "pipeline_parallel_size": 3, "distributed_executor_backend": "mp"}
    assert {name: two[name] for name in sizes} == sizes and arguments.num_workers(two) == 6
    assert "distributed_executor_backend" not in made()
    with pytest.raises(ConfigError, match=r"vllm\.tensor_parallel_size: .*Set .*rollout\.tensor_model_parallel_size"):
        arguments.merge_arguments({}, {"tensor_parallel_size": 2})


@pytest.mark.parametrize(
    ("layout", "kind", "said"),
    [
        ({"tensor_parallel_size": 2, "distributed_executor_backend": "external_launcher"}, ConfigError, "Allowed: mp"),
        ({"tensor_parallel_size": 2, "distributed_executor_backend": "ray"}, ConfigError, "processes that it starts"),
        ({"pipeline_parallel_size": 2}, RolloutError, "pipeline does not run on a CPU"),
        ({"data_parallel_size": 2}, NotBuiltError, "several replicas share the requests"),
    ],
)
def test_a_layout_of_workers_that_an_engine_does_not_have_is_refused_before_it_starts(layout, kind, said):
    with pytest.raises(kind, match=said):
        arguments.check_layout(layout, on_cpu=True)
    arguments.check_layout({"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, on_cpu=False)


def test_what_a_version_lacks_is_left_out_if_it_is_ours_and_an_error_if_it_is_the_users():
    found = arguments.supported_arguments({"model": "m", "logprobs_mode": "x"}, FakeEngineArgs, {"logprobs_mode": None})
    assert found == {"model": "m"} and any("logprobs_mode" in text for text in notices().values())
    with pytest.raises(ConfigError, match=r"swap_spac: vLLM has no such argument.*swap_space"):
        arguments.supported_arguments({"swap_spac": 2}, FakeEngineArgs, {})


@pytest.mark.parametrize("version", ["0.7.3", "0.8.4", "0.6.0.post1"])
def test_a_version_before_the_range_is_refused_by_name(version):
    with pytest.raises(ConfigError, match=f"vLLM {version} is not supported"):
        versions.check_vllm_version(version)


@pytest.mark.parametrize("version", ["0.8.5", "0.9.0.1", "0.10.1.1.post2", "0.11.2", "0.12.0", "0.32.0", "0.8.5+cu121"])
def test_a_version_of_the_range_is_taken(version):
    versions.check_vllm_version(version)
    assert not notices()


def test_a_newer_version_is_taken_with_a_notice():
    versions.check_vllm_version("0.33.1")
    assert "newer than 0.32" in next(iter(notices().values()))


def test_a_missing_vllm_is_named_with_the_ways_out(monkeypatch):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(MissingDependencyError, match=r"vLLM is not installed.*rollout.name=hf"):
        versions.installed_version()


def test_heads_that_the_cpu_kernels_do_not_take_are_refused_there_only():
    with pytest.raises(RolloutError, match="heads of this width"):
        arguments.check_model(ModelFacts(head_dim=16), on_cpu=True)
    arguments.check_model(ModelFacts(head_dim=16), on_cpu=False)
    arguments.check_model(ModelFacts(head_dim=64), on_cpu=True)


def test_the_facts_of_a_model_are_read_from_its_folder(tmp_path):
    facts = ModelFacts.of(tiny_model_dir(tmp_path, max_positions=96))
    assert facts == ModelFacts(
        vocab_size=259, max_model_len=96, stop_token_ids=(2,), head_dim=8, is_moe=False, is_tied=facts.is_tied
    )
    assert ModelFacts.of(tmp_path / "nowhere") == ModelFacts()


@pytest.mark.parametrize("number_of_readers", [1, 2])
def test_weights_pass_through_files_bit_by_bit_with_few_of_them_at_a_time(number_of_readers):
    weights = [(f"w{i}", torch.randn(8, 4)) for i in range(9)] + [("tied", torch.ones(3))]
    weights.append(("other", weights[-1][1]))
    folder, seen, most = weight_transfer.open_folder(), {}, 0

    def read(rank):
        nonlocal most
        for name, tensor in buckets(folder, rank, 10.0):
            most = max(most, len(list(folder.glob("*.safetensors"))))
            seen.setdefault(rank, []).append((name, tensor.clone()))

    readers = [threading.Thread(target=read, args=(rank,)) for rank in range(number_of_readers)]
    for reader in readers:
        reader.start()
    weight_transfer.publish(folder, chunk_weights(weights, 128, 1), number_of_readers, 10.0, lambda: False)
    for reader in readers:
        reader.join(10)
    weight_transfer.close_folder(folder)
    assert most <= weight_transfer.AHEAD + 1 and not folder.exists()
    for found in seen.values():
        assert sorted(name for name, _ in found) == sorted(name for name, _ in weights)
        assert all(torch.equal(tensor, dict(weights)[name]) for name, tensor in found)


def test_a_reader_that_died_and_a_sender_that_died_are_not_waited_for_for_ever():
    weights = [(f"w{i}", torch.ones(8)) for i in range(5)]
    folder = weight_transfer.open_folder()
    with pytest.raises(RolloutError, match="did not take the weights"):
        weight_transfer.publish(folder, chunk_weights(weights, 32, 1), 1, 0.05, lambda: False)
    weight_transfer.publish(folder, chunk_weights(weights, 32, 1), 1, 5.0, lambda: True)
    weight_transfer.close_folder(folder)
    empty = weight_transfer.open_folder()
    with pytest.raises(RolloutError, match="the next weights did not come"):
        list(buckets(empty, 0, 0.05))
    weight_transfer.close_folder(empty)


def test_every_setting_that_vllm_follows_is_read_for_it():
    config = read_config("ppo_trainer", [f"{R}.name=vllm"])
    with record_reads() as reads:
        arguments.from_config(config.actor_rollout_ref.rollout, config.actor_rollout_ref.model, "cpu", ModelFacts())
    followed = {key for key, field in leaves(PPOTrainerConfig) if "vllm" in field.metadata["engines"]}
    of_the_place = {f"{R}.standalone_gpu_memory_utilization"}  # read where it is known that nothing trains beside it
    assert {key for key in followed if key.startswith(R)} - reads == of_the_place
