"""On several ranks, too, a configuration of a run resolves if and only if it starts: the matrix on Ray.

And commands of the guides that print several processes train with as many, on the same worker processes.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.brief.small import small
from tests.brief.table import rows
from tests.harness.models import tiny_model_dir
from tests.harness.rows import write_prompts
from tests.harness.scorers import LETTERS
from tests.matrix.cells import prepare, reason, start, unchecked, usual
from tests.matrix.test_starts import GRPO, SHIM, A, P, R, disagreeing
from tests.trainer.on_ray.kept import Kept, kept_processes
from verl.config import load_config
from verl.config.machine.topology import Topology
from verl.trainer import main_ppo

pytestmark = pytest.mark.slow
TWO = "trainer.n_gpus_per_node=2"
OWN_POOL = ("actor_rollout_ref.hybrid_engine=false", f"{R}.nnodes=1", f"{R}.n_gpus_per_node=1")
SENT = f"{R}.checkpoint_engine.backend=shared_memory"
FSDP2, MEGATRON = f"{A}.strategy=fsdp2", (f"{A}.strategy=megatron", f"actor_rollout_ref.{SHIM}")
ULYSSES, TENSOR = f"{A}.ulysses_sequence_parallel_size=2", f"{A}.megatron.tensor_model_parallel_size=2"
PIPELINE = f"{A}.megatron.pipeline_model_parallel_size=2"
ONE_KV, ODD = "actor_rollout_ref.model.path=@one_kv", "actor_rollout_ref.model.path=@odd_heads"
CELLS = [
    (*GRPO, FSDP2, ULYSSES, *OWN_POOL, SENT),
    (*GRPO, FSDP2, f"{A}.use_kl_loss=true", "actor_rollout_ref.model.lora_rank=4"),
    ("algorithm.adv_estimator=gae", "critic.model.path=@dense", P, f"{A}.strategy=fsdp", "critic.strategy=fsdp2"),
    (*GRPO, FSDP2, ULYSSES, ONE_KV),
    (*GRPO, *MEGATRON, TENSOR),
    (*GRPO, *MEGATRON, PIPELINE, *OWN_POOL, SENT),
    (*GRPO, FSDP2, ULYSSES, ODD),
    (*GRPO, *MEGATRON, TENSOR, ONE_KV),
    (*GRPO, *MEGATRON, PIPELINE, ONE_KV),
    (*GRPO, FSDP2, f"{A}.optim.optimizer=Adafactor"),
    (*GRPO, FSDP2, *OWN_POOL),
    (*GRPO, FSDP2, *OWN_POOL, SENT, f"{R}.tensor_model_parallel_size=2"),
]
GUIDES = [
    pytest.param(attempt, id=f"{row.id}-{number}")
    for row in rows()
    for number, attempt in enumerate(row.config, start=1)
    if attempt.ranks
]
STARTING = 6
"""The first cells; the others are refused.

Trainers and samplers in the same two processes, or a sampler in a third; sizes that divide and that do not.
"""


@pytest.fixture(scope="module")
def kept() -> Iterator[Kept]:
    with kept_processes(8) as made:
        yield made


def test_what_resolves_starts_on_two_ranks_and_what_is_refused_does_not(kept: Kept, tmp_path: Path):
    prepare(tmp_path)
    answers, before = [], kept.started
    for number, words in enumerate(CELLS):
        line = usual("ppo_trainer", tmp_path, number, [TWO, *words])
        refused = reason(load_config, "ppo_trainer", line)
        began = time.monotonic()
        with unchecked():
            failed = reason(start, "ppo_trainer", line, None)
        answers.append([refused, failed])
        print(f"{time.monotonic() - began:5.1f} s {' '.join(words)}\n   {refused}\n   {failed}")
    assert disagreeing([("ppo_trainer", words, True) for words in CELLS], answers) == []
    assert [refused is None for refused, _ in answers] == [True] * STARTING + [False] * (len(CELLS) - STARTING)
    assert kept.started - before <= 3, "the cells share their processes"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model, prompts and a scorer."""
    folder = tmp_path_factory.mktemp("guides")
    tiny_model_dir(folder / "model")
    write_prompts(folder / "train.parquet", 8)
    (folder / "scorer.py").write_text(LETTERS)
    return folder


@pytest.mark.parametrize("attempt", GUIDES)
def test_a_command_of_the_guides_trains_on_as_many_processes_as_it_prints(attempt, kept, home, tmp_path, monkeypatch):
    monkeypatch.chdir(home)
    monkeypatch.setenv("VERL_FILE_LOGGER_ROOT", str(tmp_path))
    words = [*small(attempt, rows=8), "trainer.device=cpu", f"trainer.default_local_dir={tmp_path}/run"]
    printed: Any = load_config("ppo_trainer", words)
    kept.given.clear()
    began = time.monotonic()
    assert main_ppo.main(words) == 0
    print(f"{time.monotonic() - began:5.1f} s on {kept.given}")
    assert len(kept.given) == Topology.of(printed).processes >= 2
    logged = json.loads((tmp_path / "guide" / "run.jsonl").read_text().splitlines()[-1])
    assert logged["step"] == 1 and math.isfinite(logged["data"]["actor/pg_loss"])
