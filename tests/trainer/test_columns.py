"""Whole runs whose columns lie elsewhere between two calls: every stage, estimator and schedule gives the same bits."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from tensordict import TensorDict

from tests.harness.runs import logged_steps, numbers, prepare
from tests.harness.scorers import scorer
from tests.trainer.on_ray.conftest import SETTINGS
from verl.protocol import DataProto, traffic
from verl.protocol.lazy import LazyColumn, store_tensors
from verl.single_controller.local.worker_group import LocalWorkerGroup

GRPO = ("algorithm.adv_estimator=grpo", "algorithm.use_kl_in_reward=false")
RUNS = {
    "grpo that filters groups": (
        *GRPO,
        "algorithm.filter_groups.enable=true",
        "actor_rollout_ref.actor.use_kl_loss=true",
    ),
    "ppo with a critic and a KL in the reward": (),
    "remax with corrected weights": (
        "algorithm.adv_estimator=remax",
        "algorithm.rollout_is_threshold=1.0005",
        "algorithm.rollout_is=true",
        "algorithm.rollout_is_mode=mask",
        "actor_rollout_ref.rollout.dtype=bfloat16",
    ),
    "one step ahead": (*GRPO, "trainer.v1.trainer_mode=one_step_off"),
}


@pytest.fixture(scope="module", autouse=True)
def here(shared_workplace: Path) -> None:
    prepare(scorer("len(solution_str) % 5"), 12)


@pytest.fixture(autouse=True)
def nothing_counted() -> Iterator[None]:
    traffic.take()
    yield
    traffic.take()


def put(rows: Any) -> Future[Any]:
    reference: Future[Any] = Future()
    reference.set_result(rows)
    return reference


def put_away(result: Any) -> Any:
    if not isinstance(result, DataProto) or result.batch is None:
        return result
    columns = store_tensors(dict(result.batch.items()), put, "elsewhere")
    return DataProto(TensorDict(columns, batch_size=len(result)), result.non_tensor_batch, result.meta_info)


def fetched(value: Any) -> Any:
    """What a worker gets: it fetches for itself, which the controller does not count."""
    if not isinstance(value, DataProto) or value.batch is None:
        return value
    columns = {
        k: LazyColumn(copy.copy(v.plan)).value() if isinstance(v, LazyColumn) else v for k, v in value.batch.items()
    }
    return DataProto(TensorDict(columns, batch_size=len(value)), value.non_tensor_batch, value.meta_info)


def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers of this process as those of others: batches that they return leave their columns behind."""
    run = LocalWorkerGroup._run

    def run_and_leave(self: Any, method: str, calls: Any) -> list[Future[Any]]:
        given = [(tuple(map(fetched, args)), {k: fetched(v) for k, v in kwargs.items()}) for args, kwargs in calls]
        futures = run(self, method, given)
        return [f if f.exception() is not None else put(put_away(f.result())) for f in futures]

    monkeypatch.setattr(LocalWorkerGroup, "_run", run_and_leave)


@pytest.mark.parametrize("name", RUNS)
def test_a_run_whose_columns_lie_elsewhere_computes_the_same_bits(name: str, monkeypatch):
    words = (*SETTINGS, "trainer.runtime=local", "trainer.total_training_steps=2", *RUNS[name])
    label = name.replace(" ", "_")
    usual = logged_steps(f"{label}_here", *words)
    elsewhere(monkeypatch)
    lazy = logged_steps(f"{label}_away", *words)
    assert len(usual) == 2
    assert [numbers(step) for step in lazy] == [numbers(step) for step in usual]
    assert not any(key.startswith("perf/controller/") for step in usual for key in step)
    read = sum(step.get("perf/controller/fetched/responses_mb", 0) for step in lazy)
    assert read > 0, "text is scored, and this is counted"
