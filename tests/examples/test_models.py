"""Every file of examples/models fits the machine that it names, and trains when it is shrunk.

Shrunk are the model (a tiny one of the same family), lengths, batch, and the number of ranks with the sizes that divide
them. The training engine stays. One thing is swapped, the sampler: hf in place of vLLM, which is not installed in this
environment, since it needs an older transformers. `tests/engines_real/vllm/test_examples.py` has vLLM itself.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.brief.machine import guides_machine
from tests.docs.printed import block
from tests.harness.models import VOCAB_SIZE, tiny_model_dir, tiny_tokenizer
from tests.harness.programs import python
from tests.harness.rows import write_prompts
from tests.harness.scorers import LETTERS
from tests.sanity.source_tree import ROOT
from verl import device
from verl.cli.main import main
from verl.config.loading.configuration import read_config
from verl.models.shape import model_shape
from verl.planner.estimate import Estimate
from verl.planner.from_config import run_plan
from verl.planner.hardware import Cluster
from verl.planner.hardware import device as planned_device

FOLDER = ROOT / "examples" / "models"
FILES = {file.stem: file for file in sorted(FOLDER.glob("*-grpo-*.yaml"))}
BASES = ("grpo", "long")
PER_NODE = {"1gpu": 1, "8gpu": 8, "16x8gpu": 8}
QWEN = {"vocab_size": 151936, "num_key_value_heads": 8, "head_dim": 128}
LLAMA = {"vocab_size": 128256, "num_key_value_heads": 8}
PAGES = {"docs/howto/sizes.md": "python examples/data_preprocess/gsm8k.py", "examples/README.md": "verl train grpo"}
"""Pages that print a dry run, and how the block begins; GSM8K itself is on the hub."""
SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
TOWER = 0.42e9
"""Parameters of Gemma 3's vision tower and projector."""


def facts(family: str, sizes: tuple[int, ...], tied: bool, **more: int) -> dict[str, Any]:
    return {"model_type": family, **dict(zip(SIZES, sizes, strict=True)), "tie_word_embeddings": tied, **more}


MODELS = {
    "qwen3-0.6b": facts("qwen3", (1024, 28, 16, 3072), True, **QWEN),
    "qwen3-1.7b": facts("qwen3", (2048, 28, 16, 6144), True, **QWEN),
    "qwen3-4b": facts("qwen3", (2560, 36, 32, 9728), True, **QWEN),
    "qwen3-8b": facts("qwen3", (4096, 36, 32, 12288), False, **QWEN),
    "qwen3-14b": facts("qwen3", (5120, 40, 40, 17408), False, **QWEN),
    "qwen3-32b": facts("qwen3", (5120, 64, 64, 25600), False, **QWEN),
    "llama3.1-8b": facts("llama", (4096, 32, 32, 14336), False, head_dim=128, **LLAMA),
    "llama3.2-1b": facts("llama", (2048, 16, 32, 8192), True, head_dim=64, **LLAMA),
    "llama3.2-3b": facts("llama", (3072, 28, 24, 8192), True, head_dim=128, **LLAMA),
    "gemma3-1b": facts(
        "gemma3_text", (1152, 26, 4, 6912), True, head_dim=256, num_key_value_heads=1, vocab_size=262144
    ),
    "gemma3-4b": facts("gemma3", (2560, 34, 8, 10240), True, head_dim=256, num_key_value_heads=4, vocab_size=262208),
    "gemma3-12b": facts("gemma3", (3840, 48, 16, 15360), True, head_dim=256, num_key_value_heads=8, vocab_size=262208),
}
"""What the config.json of each published model says; of a model with a tower, what its text_config says."""
GPUS = {24: "RTX4090", 40: "A100-40GB", 48: "L40S", 80: "H100", 141: "H200"}
"""GB that a file names -> a device of the planner."""
every_file = pytest.mark.parametrize("name", FILES)


def model_of(name: str) -> dict[str, Any]:
    return MODELS[name.partition("-grpo-")[0]]


def config_of(name: str, *words: str) -> Any:
    defaults = ("algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=8")
    return read_config("ppo_trainer", ["--config-path", str(FOLDER), "--config-name", name, *words], defaults)


def parameters(model: dict[str, Any]) -> float:
    """Without norms, which are few."""
    hidden, layers, heads, inner = (model[size] for size in SIZES)
    attention = 2 * hidden * model["head_dim"] * (heads + model["num_key_value_heads"])
    embeddings = model["vocab_size"] * hidden * (1 if model["tie_word_embeddings"] else 2)
    return layers * (attention + 3 * hidden * inner) + embeddings + TOWER * (model["model_type"] == "gemma3")


@contextmanager
def pretended(folder: Path, name: str, gpus: int | None = None) -> Iterator[None]:
    """The machine of a file, with GSM8K and a model that says of itself what the published one says."""
    count = PER_NODE[name.split("-grpo-")[1].partition("-")[0]] if gpus is None else gpus
    text = model_of(name)
    tower = text["model_type"] == "gemma3"
    config = {"model_type": "gemma3", "text_config": text, "vision_config": {"hidden_size": 1152}} if tower else text
    with guides_machine(folder) as home, mock.patch.object(device, "device_count", lambda kind: count):
        (home / "model/config.json").write_text(json.dumps(config))
        for split in ("train", "test"):
            write_prompts(home / f"data/gsm8k/{split}.parquet")
        yield


def dry_run(name: str, *words: str) -> int:
    return main(["train", "grpo", "--config", str(FILES[name]), "--dry-run", *words])


@every_file
def test_the_planner_finds_room_for_a_file_on_its_gpus(name, tmp_path):
    model = model_of(name)
    text = model | {"model_type": model["model_type"].replace("gemma3", "gemma3_text").replace("_text_text", "_text")}
    (tmp_path / "config.json").write_text(json.dumps(text))
    memory = re.search(r"(\d+) GB", FILES[name].read_text().splitlines()[0])
    assert memory is not None
    run = run_plan(config_of(name, f"actor_rollout_ref.model.path={tmp_path}"), False, model_shape)
    estimate = Estimate.of(run, Cluster(planned_device(GPUS[int(memory[1])]), run.devices))
    assert estimate.problems() == []


def test_each_file_has_a_model_and_a_machine_that_are_known():
    assert {file.stem for file in FOLDER.glob("*.yaml")} == {*FILES, *BASES}
    assert {name.partition("-grpo-")[0] for name in FILES} == {*MODELS}
    assert all(len(file.read_text().splitlines()) <= 45 for file in FOLDER.glob("*.yaml"))


@every_file
def test_a_file_passes_the_dry_run_on_its_machine(name, tmp_path, capsys):
    with pretended(tmp_path, name):
        assert dry_run(name) == dry_run(name, "actor_rollout_ref.model.path=model") == 0
    out, err = capsys.readouterr()
    assert out.endswith("the run can start.\n") and "has no effect" not in err
    assert f"--config examples/models/{name}.yaml" in FILES[name].read_text()


@pytest.mark.parametrize("page", PAGES)
def test_the_dry_run_that_a_page_prints_passes_and_its_files_are_there(page, tmp_path, capsys):
    (printed,) = [line for line in block(page, PAGES[page]).splitlines() if line.startswith("verl ")]
    words = printed.replace("examples/models", str(FOLDER)).split()
    with pretended(tmp_path, "qwen3-8b-grpo-8gpu"):
        assert main(words[1:]) == 0
    assert "8 processes on Ray" in capsys.readouterr().out
    linked = re.findall(r"\(\.\./\.\./examples/models/([\w.-]+)\.yaml\)", (ROOT / page).read_text())
    assert sorted(linked) == (sorted(FILES) if page.startswith("docs") else [])


@pytest.mark.parametrize(
    "name, gpus, words, said",
    [
        ("qwen3-8b-grpo-8gpu", 4, (), "8 GPUs are requested, and this machine has 4 GPUs"),
        ("qwen3-14b-grpo-8gpu", 8, ("actor_rollout_ref.rollout.tensor_model_parallel_size=16",), "hold 0 replicas"),
        (
            "qwen3-14b-grpo-16x8gpu",
            8,
            ("actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size=16",),
            "40 attention heads cannot be split evenly over 16",
        ),
        ("qwen3-4b-grpo-8gpu", 8, ("actor_rollout_ref.actor.ppo_max_token_len_per_gpu=2000",), "2048 tokens"),
    ],
)
def test_what_does_not_fit_a_machine_or_model_is_refused(name, gpus, words, said, tmp_path, capsys):
    with pretended(tmp_path, name, gpus):
        assert dry_run(name, "actor_rollout_ref.model.path=model", *words) == 2
    assert said in capsys.readouterr().err


def said(name: str, pattern: str) -> tuple[float, ...]:
    """The numbers of a line of the file's comments."""
    found = re.search(pattern, FILES[name].read_text())
    assert found, pattern
    return tuple(float(number) for number in found.groups())


@every_file
def test_the_memory_in_the_comments_is_that_of_the_settings(name):
    model, config = model_of(name), config_of(name)
    policy, count, gpus = config.actor_rollout_ref, parameters(model), config.trainer.n_gpus_per_node
    actor, rollout, world = policy.actor, policy.rollout, gpus * config.trainer.nnodes
    layers, hidden = model["num_hidden_layers"], model["hidden_size"]
    (memory,) = said(name, r"GPUs? of (\d+) GB:")
    if actor.strategy == "megatron":
        sizes = actor.megatron
        tensor, stages = sizes.tensor_model_parallel_size, sizes.pipeline_model_parallel_size
        copies, *state = said(name, r"\(6 B \+ 12 B / (\d+)\) x ([\d.]+)e9 / (\d+) = ([\d.]+) GB")
        assert copies * tensor * stages == world and state[1] == tensor * stages
        needed, kept, width = (6 + 12 / copies) / tensor / stages, (2 + 12 / copies) / tensor / stages, 2 / tensor
        offloads = sizes.param_offload and sizes.optimizer_offload
    else:
        state = said(name, r"16 B x ([\d.]+)e9 / (\d+) = ([\d.]+) GB")
        shards = world if actor.fsdp_config.fsdp_size == -1 else actor.fsdp_config.fsdp_size
        assert state[1] == shards
        needed, kept, width = 16 / shards, 12 / shards, 4 if world == 1 else 2
        offloads = actor.fsdp_config.param_offload and actor.fsdp_config.optimizer_offload
    assert state[0] == pytest.approx(count / 1e9, rel=0.01)
    assert state[2] == pytest.approx(needed * count / 1e9, rel=0.01, abs=0.06)
    each, tokens, activations = said(name, r"Activations: (\d+) kB a token .* x (\d+) = ([\d.]+) GB")
    assert each == pytest.approx(layers * hidden * width / 1e3, abs=0.6) and tokens == actor.ppo_max_token_len_per_gpu
    assert activations == pytest.approx(each * tokens / 1e6, abs=0.06)
    share, gb, sampler, weights = said(name, r"Sampler: ([\d.]+) x (\d+) = ([\d.]+) GB: weights .* = ([\d.]+) GB")
    assert (share, gb) == (rollout.gpu_memory_utilization, memory) and sampler == pytest.approx(share * gb, abs=0.06)
    assert weights == pytest.approx(2 * count / rollout.tensor_model_parallel_size / 1e9, rel=0.02)
    cache, rows = said(name, r"(\d+) kB a token, \d+ thousand tokens and (\d+) rows")
    assert cache == pytest.approx(4 * layers * model["num_key_value_heads"] * model["head_dim"] / 1e3, abs=0.6)
    longest = config.data.max_prompt_length + config.data.max_response_length
    room = (sampler - weights) * rollout.tensor_model_parallel_size * 1e6
    assert rows == pytest.approx(room / cache / longest, rel=0.03, abs=1) and rows >= 8
    # A layer in full, buffers and fragments have what remains.
    assert needed * count / 1e9 + activations <= 0.85 * memory
    assert (0 if offloads else kept * count / 1e9) + sampler <= 0.9 * memory


SMALLER = {
    "data.train_batch_size": 4, "data.max_prompt_length": 32, "data.max_response_length": 8,
    "data.val_files": "null", "actor_rollout_ref.actor.ppo_mini_batch_size": 2, "actor_rollout_ref.rollout.n": 2,
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": 64, "trainer.nnodes": 1, "trainer.total_training_steps": 1,
}  # fmt: skip
HERE = {
    "actor_rollout_ref.model.path": "model", "data.train_files": "train.parquet",
    "reward.custom_reward_function.path": "scorer.py", "trainer.device": "cpu", "trainer.logger": "[file]",
    "trainer.default_local_dir": "small", "trainer.test_freq": -1, "trainer.save_freq": -1,
}  # fmt: skip
ANOTHER = {"actor_rollout_ref.rollout.name": "hf", "actor_rollout_ref.rollout.tensor_model_parallel_size": 1}


def ranks(name: str) -> dict[str, Any]:
    """Two processes, or one of a file for one GPU; a size above 1 becomes 2, or 1 where another has used both."""
    config, small = config_of(name), {"trainer.n_gpus_per_node": min(2, config_of(name).trainer.n_gpus_per_node)}
    actor = config.actor_rollout_ref.actor
    if actor.strategy == "megatron":
        cut = [f"{size}_parallel_size" for size in ("pipeline_model", "context", "tensor_model")]
        used = next(size for size in cut if actor.megatron[size] > 1)
        roles = ("actor", "ref") if actor.use_kl_loss else ("actor",)
        small |= {f"actor_rollout_ref.{role}.megatron.{size}": 1 + (size == used) for role in roles for size in cut}
        return small | {"actor_rollout_ref.model.external_lib": "tests.megatron.shim"}
    section = "actor_rollout_ref.actor.fsdp_config"
    small[f"{section}.ulysses_sequence_parallel_size"] = min(2, actor.fsdp_config.ulysses_sequence_parallel_size)
    if actor.fsdp_config.fsdp_size > 0:
        small[f"{section}.fsdp_size"] = 1  # two copies
    return small


def tiny_model(name: str) -> None:
    family = model_of(name)["model_type"]
    if family != "gemma3":
        tiny_model_dir("model", family)
        return
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    tokenizer = tiny_tokenizer("model")
    text = {
        "vocab_size": VOCAB_SIZE, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 8,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024, "sliding_window": 16,
    }  # fmt: skip
    vision = {
        "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
        "image_size": 28, "patch_size": 14,
    }  # fmt: skip
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    config = AutoConfig.for_model(
        "gemma3", text_config={**text, **ends}, vision_config=vision, mm_tokens_per_image=4, **ends
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained("model")


def train_shrunk(name: str, sampler: dict[str, Any]) -> dict[str, float]:
    """The metrics of one step, on the tiny model in this folder."""
    write_prompts("train.parquet", 8)
    Path("scorer.py").write_text(LETTERS)
    words = {**SMALLER, **HERE, **sampler, **ranks(name)}
    settings = [f"{key}={value}" for key, value in words.items()]
    done = python("-m", "verl", "train", "grpo", "--config", str(FILES[name]), *settings)
    (step,) = [json.loads(line)["data"] for line in Path("small/metrics.jsonl").read_text().splitlines()]
    assert 0 < step["actor/grad_norm"] < float("inf"), done.stdout[-2000:]
    assert ("actor/kl_loss" in step) == config_of(name).actor_rollout_ref.actor.use_kl_loss
    return step


@pytest.mark.slow
@every_file
def test_a_file_shrunk_in_size_trains_a_step_with_its_engine(name, workplace):
    tiny_model(name)
    train_shrunk(name, ANOTHER)
