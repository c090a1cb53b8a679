"""A judge serves a run on Ray from the controller's machine."""

from __future__ import annotations

import pytest

from tests.harness.models import tiny_model_dir
from tests.harness.served_judges import ASKING_SCORER, RM, score_of

pytestmark = pytest.mark.slow


def test_reward_functions_of_a_run_on_ray_reach_the_judge(train, task):
    judge = tiny_model_dir(task / "judge", seed=5)
    (task / "judge.py").write_text(ASKING_SCORER)
    run = train(
        "judged", 1, "reward_model.enable=true", f"{RM}.model_path=judge", f"{RM}.rollout.name=hf_server",
        "reward.custom_reward_function.path=judge.py", "reward.timeout=3000", "trainer.n_gpus_per_node=2",
    )  # fmt: skip
    (step,) = run.samples
    assert step and [sample["score"] for sample in step] == pytest.approx(
        [score_of(judge, sample["answer"]) for sample in step]
    )
    assert run.steps[0]["reward_model/requests"] == len(step) and run.steps[0]["reward_model/restarts"] == 0
