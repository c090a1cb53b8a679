"""A reward model scores alike in this process, beside the policy on Ray, and sharded over a pool of its own."""

from __future__ import annotations

import pytest

from tests.harness.reward_models import reward_model_dir

pytestmark = pytest.mark.slow
WITH = (
    "reward.custom_reward_function.path=null",
    "reward_model.enable=true",
    "reward_model.model.path=rm",
)


def scores(run) -> list[list[float]]:
    return [[sample["rm_score"] for sample in step] for step in run.samples]


def test_sharded_over_its_own_pool_it_gives_the_scores_of_one_process(train, task):
    """In half a pool of uneven size, too: three processes share eight samples."""
    reward_model_dir(task / "rm")
    alone = train("rm_alone", 2, *WITH, "trainer.runtime=local")
    pool = ("reward_model.enable_resource_pool=true", "reward_model.nnodes=1", "reward_model.n_gpus_per_node=3")
    offload = "reward_model.model.fsdp_config.param_offload=true"
    apart = train("rm_apart", 2, *WITH, *pool, offload)
    beside = train("rm_beside", 1, *WITH, "reward_model.strategy=fsdp", "trainer.n_gpus_per_node=2")
    assert scores(alone) and any(score != 0 for score in scores(alone)[0])
    for mine, other in zip(scores(apart) + scores(beside), scores(alone) + scores(alone)[:1], strict=True):
        assert mine == pytest.approx(other, rel=1e-4, abs=1e-5)
    for step in apart.steps:
        assert step["reward_model/failed"] == 0
