"""Teachers on two Ray workers, and in a pool of their own, give the numbers of one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.harness.models import tiny_model_dir
from tests.harness.rows import addition_rows, write_prompts
from tests.trainer.on_ray.conftest import Run

pytestmark = pytest.mark.slow
LOSS = "distillation.distillation_loss"
NAMES = ("distillation/loss", "distillation/student_mass", "distillation/teacher_mass", "actor/loss", "actor/grad_norm")


@pytest.fixture(scope="module")
def command(task: Path) -> list[str]:
    """Two teachers, of which each serves three rows of a step: not a number that two workers can share."""
    tiny_model_dir(task / "teacher", seed=5, initializer_range=0.2)
    rows = [{**row, "data_source": ("test/addition", "test/other")[n % 2]} for n, row in enumerate(addition_rows(12))]
    write_prompts(task / "mixed.parquet", rows)
    return [
        "distillation.enabled=true",
        "+distillation.teacher_models.additions={model_path: teacher, key: test/addition}",
        "+distillation.teacher_models.others={model_path: model}",
        f"{LOSS}.loss_mode=forward_kl_topk",
        f"{LOSS}.topk=8",
        "actor_rollout_ref.rollout.n=3",
        "data.train_batch_size=2",
        "data.train_files=mixed.parquet",
        "data.shuffle=false",
    ]


@pytest.fixture(scope="module")
def alone(train: Callable[..., Run], command: list[str]) -> Run:
    return train("teachers_alone", 2, *command, "trainer.runtime=local")


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("teachers_two", ["trainer.n_gpus_per_node=2"]),
        ("teachers_pool", ["trainer.n_gpus_per_node=1", "distillation.nnodes=1", "distillation.n_gpus_per_node=2"]),
    ],
)
def test_teachers_give_the_same_numbers_wherever_they_are_placed(train, command, alone, name, place):
    ray = train(name, 2, *command, *place)
    assert [[s["output"] for s in step] for step in ray.samples] == [
        [s["output"] for s in step] for step in alone.samples
    ]
    for mine, other in zip(ray.steps, alone.steps, strict=True):
        for key in NAMES:
            assert mine[key] == pytest.approx(other[key], rel=1e-4, abs=1e-5), key
        assert mine["distillation/rows/teacher_additions"] == mine["distillation/rows/teacher_others"] == 3
