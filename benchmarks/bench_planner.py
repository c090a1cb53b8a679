"""Bytes and seconds that the planner predicts, next to those of real runs, the worst row on top.

    python benchmarks/bench_planner.py [--quick] [--seconds [--wall] [--hardware FILE] [--rows NUMBER ...]]

Small models on a CPU. A dispatch mode sees every tensor that an operation makes, and adds up the storages that are
alive; the figure is the most of an entire optimizer step, weights and optimizer state included. The first step is not
counted: it makes the optimizer's state. Rows of two processes are those of rank 0.

``--seconds`` calibrates this machine, unless ``--hardware`` is its file, and then trains: the median step of runs of
`main_ppo` in one process with one thread, of which the first step is not counted. The clock of both is the processor's
time, which other work on the machine disturbs less; ``--wall`` takes the wall's. Lengths are those that the run logs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from figures import ROOT, Figures, add_json
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from verl import distributed
from verl.algorithms.losses import PPOPolicyLoss
from verl.config import ActorConfig, FSDPEngineConfig, HFModelConfig, OptimizerConfig
from verl.config.loading.configuration import read_config
from verl.models.shape import model_shape
from verl.observability.metrics_log import MetricsLog
from verl.planner.estimate import Estimate
from verl.planner.from_config import run_plan
from verl.planner.hardware import Cluster, Device, read_device
from verl.planner.layout import Lengths, Parallel, RolePlan, Workload
from verl.planner.memory import memory_of
from verl.planner.shapes import ModelShape
from verl.registry import ENGINES
from verl.trainer.planning.calibrate import made_batch
from verl.trainer.planning.live import STAGES

SIZES = {
    "vocab_size": 1024,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
    "max_position_embeddings": 4096,
}
PASSES = 3
"""Micro-batches of a step."""


@dataclass(frozen=True)
class Case:
    """One run.

    Args:
        strategy: the engine.
        length: tokens of a row, three quarters of them a response; a micro-batch is one row.
        ranks: processes.
        model: fields of the model's config.json that differ from `SIZES`.
        bf16: computes in bfloat16.
        entropy: the loss reads the entropy.
    """

    strategy: str = "plain"
    length: int = 256
    ranks: int = 1
    family: str = "qwen2"
    model: tuple[tuple[str, int | bool], ...] = ()
    recompute: bool = False
    lora_rank: int = 0
    bf16: bool = False
    entropy: bool = False
    fused: bool = False

    @property
    def name(self) -> str:
        switches = {"recompute": self.recompute, "bf16": self.bf16, "entropy": self.entropy, "fused head": self.fused}
        words = [self.strategy, self.family, f"{self.length} tokens", *(word for word in switches if switches[word])]
        words += [f"LoRA {self.lora_rank}"] * bool(self.lora_rank) + [f"{self.ranks} ranks"] * (self.ranks > 1)
        return ", ".join(words + [f"{key}={value}" for key, value in self.model])

    @property
    def sizes(self) -> dict[str, int | bool]:
        return {**SIZES, **dict(self.model)}


LARGE_VOCABULARY = (("vocab_size", 8192),)
TIED = (("tie_word_embeddings", True),)
QUICK = [
    Case(length=128),
    Case(length=512, recompute=True),
    Case(length=512, lora_rank=8),
    Case(length=256, bf16=True, entropy=True),
]
CASES = [
    *(Case(length=length, recompute=recompute) for length in (128, 512, 1024) for recompute in (False, True)),
    *(Case(length=length, lora_rank=8) for length in (128, 512, 1024)),
    *(Case(length=length, bf16=True) for length in (128, 512)),
    *(Case("fsdp2", length=length, ranks=2) for length in (128, 512, 1024)),
    Case("fsdp2", length=512, ranks=2, recompute=True),
    Case("fsdp2", length=512, ranks=2, bf16=True),
    Case("fsdp2", length=512, ranks=2, lora_rank=8),
    Case(length=512, lora_rank=8, recompute=True),
    Case(length=512, entropy=True),
    Case(length=512, fused=True),
    Case(length=512, bf16=True, recompute=True),
    Case(length=256, model=LARGE_VOCABULARY),
    Case(length=256, model=LARGE_VOCABULARY, entropy=True, recompute=True),
    Case(length=512, model=TIED),
    Case(length=512, family="qwen3", model=(("head_dim", 32),)),
    Case(length=512, family="llama"),
]


class TensorBytes(TorchDispatchMode):
    """Bytes of all storages that are alive within the block.

    Args:
        existing: tensors that were there before.
    """

    def __init__(self, existing: Iterable[Tensor]) -> None:
        super().__init__()
        self._alive: dict[int, tuple[StorageWeakRef, str]] = {}
        self.peak = 0
        self.at_peak: dict[str, int] = {}
        for tensor in existing:
            self._see(tensor, "existing")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind.__name__ == "DTensor" for kind in types):
            return NotImplemented  # the operations on its shards come here one by one
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, Tensor):
                self._see(tensor, str(func))
        self._count()
        return made

    def _see(self, tensor: Tensor, maker: str) -> None:
        tensor = getattr(tensor, "_local_tensor", tensor)
        if tensor.device.type == "meta" or tensor.layout != torch.strided:
            return
        reference = StorageWeakRef(tensor.untyped_storage())
        if reference.cdata not in self._alive:
            self._alive[reference.cdata] = reference, f"{maker} {tuple(tensor.shape)} {tensor.dtype}"

    def _count(self) -> None:
        sizes, total = {}, 0
        for key, (reference, maker) in list(self._alive.items()):
            storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
            if storage is None:
                del self._alive[key]
                continue
            total += storage.nbytes()
            sizes[maker] = sizes.get(maker, 0) + storage.nbytes()
        if total > self.peak:
            self.peak, self.at_peak = total, sizes


def measure(case: Case, folder: Path) -> TensorBytes:
    """The peak of an optimizer step of this process; collective where the case has several."""
    model = {"path": str(folder), "enable_gradient_checkpointing": case.recompute, "use_fused_kernels": case.fused}
    model |= {"lora_rank": case.lora_rank, "lora_alpha": case.lora_rank} if case.lora_rank else {}
    settings = {"dtype": "bfloat16" if case.bf16 else "float32"}
    engine = ENGINES.get(case.strategy)(
        HFModelConfig(**model), FSDPEngineConfig(**settings), OptimizerConfig(lr=1e-4), seed=1
    )
    loss = PPOPolicyLoss(ActorConfig(entropy_coeff=0.01 if case.entropy else 0.0))
    batch = made_batch(PASSES, case.length, int(case.sizes["vocab_size"]))
    engine.train_batch(batch, loss, micro_batch_size=1)
    state = [entry for entries in engine.optimizer.state.values() for entry in entries.values()]
    existing = [*engine.model.parameters(), *engine.model.buffers(), *(e for e in state if isinstance(e, Tensor))]
    with TensorBytes(existing) as mode:
        engine.train_batch(batch, loss, micro_batch_size=1)
    return mode


def predict(case: Case) -> float:
    """What the planner says of the same run."""
    response = case.length - case.length // 4
    plan = RolePlan(
        role="actor",
        engine=case.strategy,
        devices=case.ranks,
        parallel=Parallel(data=case.ranks),
        trains=True,
        compute_bytes=2 if case.bf16 else 4,
        shards=case.ranks,
        recompute=case.recompute,
        micro_tokens=case.length,
        fused_head="torch" if case.fused else "",
        entropy=case.entropy,
        lora_rank=case.lora_rank,
        on_cpu=True,
    )
    work = Workload(PASSES * case.ranks, 1, Lengths(case.length - response, case.length - response),
                    Lengths(response, response))  # fmt: skip
    shape = ModelShape.from_config({"model_type": case.family, **case.sizes})
    return memory_of(plan, shape, work).phase("update").total


@dataclass(frozen=True)
class Timed:
    """A run whose steps are timed.

    Args:
        hidden, layers: of its model.
        samples, response: answers per prompt, and tokens of each.
        words: of the command line, besides.
    """

    hidden: int = 128
    layers: int = 4
    samples: int = 4
    response: int = 64
    words: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        sizes = f"{self.hidden} x {self.layers}, {self.samples} samples of {self.response}"
        return ", ".join([sizes, *(word.rpartition(".")[2] for word in self.words)])

    def line(self, folder: Path) -> list[str]:
        """The command line; model, prompts and reward are written into the folder."""
        from tests.harness.models import tiny_model_dir
        from tests.harness.rows import write_prompts

        model = folder / "model"
        tiny_model_dir(model, vocab=2048, hidden=self.hidden, layers=self.layers, intermediate_size=3 * self.hidden)
        write_prompts(folder / "train.parquet", 32)
        (folder / "scorer.py").write_text(
            "def compute_score(solution_str, ground_truth):\n    return len(solution_str) % 7\n"
        )
        words = [
            "data.train_batch_size=8", f"data.train_files={folder}/train.parquet", "data.max_prompt_length=64",
            f"data.max_response_length={self.response}", f"actor_rollout_ref.model.path={model}",
            f"critic.model.path={model}", f"actor_rollout_ref.rollout.n={self.samples}",
            "actor_rollout_ref.actor.ppo_mini_batch_size=8", "actor_rollout_ref.rollout.ignore_eos=true",
            f"reward.custom_reward_function.path={folder}/scorer.py", f"trainer.default_local_dir={folder}/run",
            "trainer.logger=[file]", "trainer.total_training_steps=4", "trainer.device=cpu", "trainer.runtime=local",
            "algorithm.adv_estimator=grpo", *self.words,
        ]  # fmt: skip
        return [*{word.partition("=")[0]: word for word in words}.values()]


KL, GAE = ("actor_rollout_ref.actor.use_kl_loss=true",), ("algorithm.adv_estimator=gae", "critic.ppo_mini_batch_size=8")
TIMED = [
    Timed(),
    Timed(response=128),
    Timed(samples=8),
    Timed(layers=8),
    Timed(words=KL),
    Timed(words=GAE),
    Timed(256),
    Timed(256, layers=8, response=32),
    Timed(256, words=("actor_rollout_ref.actor.ppo_mini_batch_size=4",)),
    Timed(384),
    Timed(384, samples=8, response=32),
    Timed(384, response=32, words=("actor_rollout_ref.model.enable_gradient_checkpointing=true",)),
]
CALIBRATED = """
import json
from verl.planner.hardware import to_json
from verl.trainer.planning.calibrate import calibrated
print(json.dumps(to_json(calibrated("cpu"))))
"""
TRAINED = """
import sys
from verl.config import load_config
from verl.trainer.main_ppo import run_ppo
run_ppo(load_config("ppo_trainer", sys.argv[1:]))
"""


def on_clock(script: str, words: Iterable[str], wall: bool, metrics: Path = Path("metrics.jsonl")) -> str:
    """What a script prints last, in a process whose clock is that of the processor or of the wall."""
    clock = "" if wall else "import time; time.perf_counter = time.process_time\n"
    run = subprocess.run(
        [sys.executable, "-c", clock + script, *words], capture_output=True, text=True, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT),
             "VERL_FILE_LOGGER_PATH": str(metrics)},
    )  # fmt: skip
    if run.returncode:
        raise SystemExit(run.stderr[-2000:])
    return run.stdout.splitlines()[-1] if run.stdout else ""


def seconds_of_run(case: Timed, planned: Device, wall: bool) -> dict[str, tuple[float, float]]:
    """Measured and predicted seconds of a step and of its phases."""
    with tempfile.TemporaryDirectory() as temporary:
        words = case.line(Path(temporary))
        log, file = MetricsLog(), Path(temporary) / "metrics.jsonl"
        on_clock(TRAINED, words, wall, file)
        log.refresh(file)
        run = run_plan(read_config("ppo_trainer", words), True, model_shape)
    lengths = [Lengths(float(log.values(f"{part}_length/mean").mean()), most.longest)
               for part, most in (("prompt", run.work.prompt), ("response", run.work.response))]  # fmt: skip
    run = replace(run, work=replace(run.work, prompt=lengths[0], response=lengths[1]))
    estimate = Estimate.of(run, Cluster(planned, 1))
    columns = {
        name.removeprefix("timing_s/"): log.values(name)[1:] for name in log.names if name.startswith("timing_s/")
    }
    return {phase: (float(np.median(sum(columns[stage] for stage in stages if stage in columns))),
                    estimate.phase(phase).likely) for phase, stages in STAGES.items()}  # fmt: skip


def compare_seconds(options: argparse.Namespace, figures: Figures) -> None:
    """The table of seconds."""
    with tempfile.TemporaryDirectory() as temporary:
        file = options.hardware or Path(temporary) / "cpu.json"
        if options.hardware is None:
            file.write_text(on_clock(CALIBRATED, [], options.wall))
        planned = read_device(file)
    rows = []
    for number in options.rows or range(len(TIMED)):
        phases = seconds_of_run(TIMED[number], planned, options.wall)
        measured, predicted = phases.pop("step")
        rows.append((predicted / measured - 1, measured, predicted, TIMED[number].name, phases))
        figures.add(TIMED[number].name, {"measured s": measured, "predicted s": predicted})
    print(f"{'error':>7} {'measured':>9} {'predicted':>9}")
    for error, measured, predicted, name, phases in sorted(rows, key=lambda row: -abs(row[0])):
        parts = ", ".join(f"{phase} {real:.3f} / {likely:.3f}" for phase, (real, likely) in phases.items())
        print(f"{error:>+7.1%} {measured:>7.3f} s {predicted:>7.3f} s  {name} ({parts})")


def make_model(case: Case, folder: Path) -> Path:
    """A folder with random weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    target = folder / case.name.replace("/", "_")
    if not target.exists():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(AutoConfig.for_model(case.family, **case.sizes)).save_pretrained(target)
    return target


def measured(case: Case, folder: Path) -> int:
    """Bytes; a case of several ranks starts processes for them."""
    model = make_model(case, folder)
    if case.ranks == 1:
        with_group = case.strategy != "plain"
        if with_group:
            distributed.join_group(device="cpu")
        peak = measure(case, model).peak
        if with_group:
            distributed.leave_group()
        return peak
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={case.ranks}"]
    command += [__file__, "--rank-of", json.dumps(asdict(case)), "--model", str(model)]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])


def rank_of(case: Case, model: Path) -> None:
    """One process of a case of several; rank 0 prints its peak."""
    ranks = distributed.join_group(device="cpu")
    peak = measure(case, model).peak
    if ranks.is_first:
        print(peak)
    distributed.leave_group()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="a few rows")
    parser.add_argument("--seconds", action="store_true", help="seconds of steps, not bytes")
    parser.add_argument("--wall", action="store_true", help="by the clock of the wall")
    parser.add_argument("--hardware", type=Path, help="a file of calibrate, on the same clock")
    parser.add_argument("--rows", type=int, nargs="+", help="numbers of the runs that are timed, from 0")
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    add_json(parser)
    options = parser.parse_args()
    if options.rank_of:
        case = Case(**json.loads(options.rank_of))
        rank_of(replace(case, model=tuple((key, value) for key, value in case.model)), Path(options.model))
        return
    figures, rows = Figures(), []
    if options.seconds:
        compare_seconds(options, figures)
        figures.write(options.json)
        return
    with tempfile.TemporaryDirectory() as temporary:
        for case in QUICK if options.quick else CASES:
            real, predicted = measured(case, Path(temporary)), predict(case)
            rows.append((predicted / real - 1, real, predicted, case.name))
            figures.add(case.name, {"measured MB": real / 1e6, "predicted MB": predicted / 1e6,
                                    "error %": 100 * rows[-1][0]})  # fmt: skip
    print(f"{'error':>7} {'measured':>11} {'predicted':>11}")
    for error, real, predicted, name in sorted(rows, key=lambda row: -abs(row[0])):
        print(f"{error:>+7.1%} {real / 1e6:>8.2f} MB {predicted / 1e6:>8.2f} MB  {name}")
    figures.write(options.json)


if __name__ == "__main__":
    main()
