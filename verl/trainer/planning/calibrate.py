"""Measures this machine for the planner: products, copies, links, and steps of small models through engine and sampler.

A phase takes work / (nominal rate x share) + launches x latency. Share and latency of each are fitted to steps of
different sizes, whose work and launches the planner's own formulas count.
"""

from __future__ import annotations

import asyncio
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import distributed as dist

from verl import distributed, env
from verl.algorithms.losses import PPOPolicyLoss
from verl.config import ActorConfig, FSDPEngineConfig, HFModelConfig, OptimizerConfig, RolloutConfig
from verl.device import device_name, free_host_memory, resolve_device
from verl.errors import ConfigError
from verl.metrics import notice
from verl.models.shape import model_shape, write_random_model
from verl.outcomes import run_now
from verl.planner.engines import BUILT_IN, automatic_tokens
from verl.planner.hardware import Cluster, Device, all_devices, device
from verl.planner.layout import Lengths, RolePlan, Workload
from verl.planner.ranges import EFFICIENCY, Reached
from verl.planner.seconds import seconds_of
from verl.planner.shapes import ModelShape
from verl.protocol import DataProto
from verl.registry import ENGINES, SAMPLERS
from verl.rollout.base import Request, SamplingParams

REPEATS = 3
"""Of each measurement after one that is not counted; the median counts."""
LINK_VALUES = 1 << 24
"""Of the all-reduce that measures links."""
VARIANTS = {"PCIE", "NVL"}
"""Words in a vendor's name of a GPU whose links are not those of the board in `hardware.yaml`."""
VOCABULARY, PROMPT = 4096, 8
MODEL = {"model_type": "qwen2", "vocab_size": VOCABULARY, "num_attention_heads": 4, "num_key_value_heads": 2,
         "max_position_embeddings": 4096, "tie_word_embeddings": False}  # fmt: skip
BYTES, FLOPS = "decode built in", "decode built in flops"
EXACT = Reached(1.0, 1.0, 1.0, "")
FREE = Reached(1e300, 1e300, 1e300, "")
COUNTED = replace(FREE, latency=1.0)


class MeasuredSizes(NamedTuple):
    """What is measured: each model with each batch (rows, tokens of a row), and each number of requests at once.

    One request is bound by bytes, many are bound by operations. ``product`` is a width, ``copied`` a number of values.
    """

    hidden: tuple[int, ...] = (128, 256, 384)
    layers: int = 4
    batches: tuple[tuple[int, int], ...] = ((2, 64), (12, 128))
    requests: tuple[int, ...] = (1, 32)
    response: int = 24
    product: int = 1024
    copied: int = 1 << 25


ON_CPU = MeasuredSizes()
ON_GPU = MeasuredSizes((1024, 2048, 4096), 8, ((4, 256), (64, 1024)), (1, 512), 128, 8192, 1 << 29)


class MeasuredStep(NamedTuple):
    """Seconds of a phase that was measured, with what it was."""

    plan: RolePlan
    shape: ModelShape
    work: Workload
    phase: str
    seconds: float


def calibrated(kind: str | None = None) -> Device:
    """This machine's device, by one process alone; links and network stay those of `hardware.yaml`.

    Args:
        kind: ``cpu`` or ``cuda``; None: the accelerator if there is one.

    Raises:
        ConfigError: `hardware.yaml` has no such GPU, or the machine is too busy to measure.
    """
    kind = resolve_device(kind)
    sizes, dtype = (ON_CPU, torch.float32) if kind == "cpu" else (ON_GPU, torch.bfloat16)
    matrix, source = torch.randn(sizes.product, sizes.product).to(kind, dtype), torch.zeros(sizes.copied, device=kind)
    target = torch.empty_like(source)
    machine = replace(
        device("CPU") if kind == "cpu" else listed_device(device_name(kind)),
        memory=free_host_memory() if kind == "cpu" else torch.cuda.mem_get_info()[1],
        bf16_flops=2 * sizes.product**3 / _timed(lambda: matrix @ matrix, kind),
        memory_bandwidth=2 * source.nbytes / _timed(lambda: target.copy_(source), kind),
        reached={**EFFICIENCY, BYTES: FREE, FLOPS: FREE},
    )
    steps: list[MeasuredStep] = []
    with tempfile.TemporaryDirectory() as folder:
        for hidden in sizes.hidden:
            path = Path(folder, str(hidden))
            more = {"hidden_size": hidden, "intermediate_size": 3 * hidden, "num_hidden_layers": sizes.layers}
            # 16 bytes per weight are of an optimizer step, and as many are left for activations.
            if steps and 32 * ModelShape.from_config(MODEL | more).parameters > machine.memory:
                notice("calibrate", f"no room for the model of width {hidden}: smaller ones are measured")
                continue
            write_random_model(MODEL | more, path)
            steps += [*_trained(kind, path, sizes), *_sampled(kind, path, sizes)]
    shares = {name: _fitted(machine, name, [step for step in steps if step.phase == phase])
              for name, phase in (("train", "update"), ("infer", "infer"))}  # fmt: skip
    machine = replace(machine, reached={**machine.reached, **shares, "prefill": shares["infer"]})
    sampling = [step for step in steps if step.phase == "generate"]
    single = _fitted(machine, BYTES, [step for step in sampling if step.work.prompts == 1])
    batched = _fitted(machine, FLOPS, [step for step in sampling if step.work.prompts > 1], single.latency)
    return replace(machine, reached={**machine.reached, BYTES: single, FLOPS: batched})


def listed_device(vendors_name: str) -> Device:
    """The entry of `hardware.yaml` that ``torch.cuda.get_device_name`` means, as in ``NVIDIA A100-SXM4-80GB``.

    Raises:
        ConfigError: there is none; a variant with other links (`VARIANTS`) needs an entry with that word in its name.
    """
    name = re.sub(r"(?<=[A-Z]) (?=\d)", "", vendors_name.upper())  # RTX 4090
    words = set(re.split(r"[\s_-]", f"{vendors_name.upper()} {name}"))
    fitting = [key for key in all_devices() if words & VARIANTS <= set(key.upper().split("-")) <= words]
    return device(max(fitting, key=len, default=vendors_name))


def with_links(machine: Device) -> Device:
    """The same device with the links between the ranks of this machine, which torchrun started. Collective.

    Raises:
        ConfigError: the ranks are on several machines, or this machine's devices are of another kind.
    """
    size = env.get_int("WORLD_SIZE", 1)
    local = env.get_int("LOCAL_WORLD_SIZE", size)
    if local != size:
        raise ConfigError("calibrate measures the links within one machine, and these ranks are on several",
                          key="LOCAL_WORLD_SIZE", got=local, allowed=str(size), fix="Take --nnodes=1.")  # fmt: skip
    kind = "cpu" if machine.is_cpu else resolve_device(None)
    here = device("CPU") if kind == "cpu" else listed_device(device_name(kind))
    if here.name != machine.name:
        raise ConfigError("the file is of another device than this machine's", key="calibrate", got=machine.name,
                          allowed=here.name, fix="Calibrate in one process here first, without torchrun.")  # fmt: skip
    ranks = distributed.join_group(device=kind)
    scalar, block = torch.zeros(1, device=kind), torch.zeros(LINK_VALUES, device=kind)
    latency, seconds = _timed(lambda: dist.all_reduce(scalar), kind), _each(lambda: dist.all_reduce(block), kind)
    num_bytes, likely = 2 * (ranks.size - 1) / ranks.size * block.nbytes, statistics.median(seconds)
    share = Reached(likely / max(seconds), 1.0, likely / min(seconds), "measured links", latency)
    distributed.leave_group()
    return replace(machine, node_link=num_bytes / likely, node=max(machine.node, ranks.size),
                   reached={**machine.reached, "link": share})  # fmt: skip


def _fitted(on: Device, name: str, steps: Sequence[MeasuredStep], latency: float | None = None) -> Reached:
    """What these steps reach, where the shares of all other work in them are those of the device."""
    points = []
    for plan, shape, work, phase, seconds in steps:
        rest, ideal, launches = (
            seconds_of(plan, shape, work, Cluster(replace(on, reached={**on.reached, name: share}), 1))
            .phase(phase)
            .likely
            for share in (FREE, EXACT, COUNTED)
        )
        points.append((ideal - rest, launches - rest, seconds - rest))
    return Reached.fitted(points, f"measured share in {name}", latency)


def _timed(work: Callable[[], object], kind: str) -> float:
    """Median seconds."""
    return statistics.median(_each(work, kind))


def _each(work: Callable[[], object], kind: str) -> list[float]:
    """Seconds of `REPEATS` calls after one that is not counted."""
    seconds = []
    for _ in range(REPEATS + 1):
        begun = time.perf_counter()
        work()
        if kind != "cpu":
            torch.get_device_module(kind).synchronize()
        seconds.append(time.perf_counter() - begun)
    return seconds[1:]


def _work(rows: int, prompt: int, response: int) -> Workload:
    return Workload(rows, 1, Lengths(prompt, prompt), Lengths(response, response))


def _trained(kind: str, model: Path, sizes: MeasuredSizes) -> list[MeasuredStep]:
    """Optimizer steps and passes without gradients, by the engine of one process."""
    is_cpu, shape, steps = kind == "cpu", model_shape(str(model), "calibrate"), []
    settings = HFModelConfig(path=str(model), enable_gradient_checkpointing=False)
    dtype = FSDPEngineConfig(dtype="float32" if is_cpu else "bfloat16")
    engine = ENGINES.get("plain")(settings, dtype, OptimizerConfig(lr=1e-6), seed=1, device=kind)
    loss = PPOPolicyLoss(ActorConfig())
    for rows, length in sizes.batches:
        tokens = automatic_tokens(VOCABULARY, kind, length, shape.parameters)
        plan = RolePlan("actor", "plain", trains=True, compute_bytes=4 if is_cpu else 2, on_cpu=is_cpu,
                        micro_tokens=tokens, infer_tokens=tokens)  # fmt: skip
        batch, work = made_batch(rows, length, VOCABULARY), _work(rows, length // 4, length - length // 4)
        calls = {"update": partial(engine.train_batch, batch, loss), "infer": partial(engine.infer, batch)}
        steps += [MeasuredStep(plan, shape, work, phase, _timed(call, kind)) for phase, call in calls.items()]
    return steps


def _sampled(kind: str, model: Path, sizes: MeasuredSizes) -> list[MeasuredStep]:
    """Sampling for each number of requests."""
    is_cpu, shape = kind == "cpu", model_shape(str(model), "calibrate")
    sampler = SAMPLERS.get(BUILT_IN).from_config(
        RolloutConfig(name=BUILT_IN), HFModelConfig(path=str(model)), device=kind
    )
    draw = SamplingParams(max_tokens=sizes.response, ignore_eos=True)
    plan = RolePlan("rollout", BUILT_IN, compute_bytes=4 if is_cpu else 2, on_cpu=is_cpu)

    async def answers(count: int) -> None:
        prompts = torch.randint(3, VOCABULARY, (count, PROMPT)).tolist()
        requests = (Request(f"{n}", tuple(prompt), draw, uid=f"{n}") for n, prompt in enumerate(prompts))
        await asyncio.gather(*map(sampler.generate, requests))

    def sample(count: int) -> None:
        run_now(answers(count))

    return [
        MeasuredStep(plan, shape, _work(n, PROMPT, sizes.response), "generate", _timed(partial(sample, n), kind))
        for n in sizes.requests
    ]


def made_batch(rows: int, length: int, vocabulary: int) -> DataProto:
    """Rows of random tokens, three quarters of each a response, with what a policy loss reads."""
    generator = torch.Generator().manual_seed(0)
    prompt = length // 4
    ids = torch.randint(3, vocabulary, (rows, length), generator=generator)
    drawn, ones = torch.randn(rows, length - prompt, generator=generator), torch.ones_like(ids)
    columns = {"prompts": ids[:, :prompt], "responses": ids[:, prompt:], "input_ids": ids, "attention_mask": ones,
               "position_ids": ones.cumsum(-1) - 1, "response_mask": ones[:, prompt:], "advantages": drawn,
               "old_log_probs": drawn - 7.0}  # fmt: skip
    return DataProto.from_dict(tensors=columns)
