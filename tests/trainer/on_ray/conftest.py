"""Two Ray nodes on this machine and one tiny task: every run of this folder joins the nodes and trains on the task."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from scripts.count_frames import counted
from tests.harness.models import tiny_model_dir
from tests.harness.rows import write_prompts
from tests.harness.runs import logged, records
from tests.harness.scorers import LETTERS
from verl.trainer import main_ppo

SETTINGS = (
    "algorithm.adv_estimator=gae",
    "algorithm.use_kl_in_reward=true",
    "algorithm.kl_ctrl.type=adaptive",
    "data.train_files=train.parquet",
    "data.train_batch_size=4",
    "data.max_prompt_length=64",
    "data.max_response_length=6",
    "actor_rollout_ref.model.path=model",
    "actor_rollout_ref.rollout.n=2",
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    "actor_rollout_ref.actor.ppo_epochs=2",
    "actor_rollout_ref.actor.shuffle=true",
    "actor_rollout_ref.actor.optim.lr=1e-2",
    "actor_rollout_ref.actor.optim.lr_warmup_steps=3",
    "reward.custom_reward_function.path=scorer.py",
    "trainer.device=cpu",
    "trainer.logger=[file]",
)


@dataclass(frozen=True)
class Run:
    """What a run left: its metrics and its samples by step, its folder, and where they were counted its frames."""

    steps: list[dict[str, Any]]
    samples: list[list[dict[str, Any]]]
    folder: Path
    frames: tuple[str, ...] = ()

    def weights(self, step: int) -> dict[tuple[str, str], Any]:
        """Every tensor of a checkpoint but the random states, by file and name."""
        root = self.folder / f"global_step_{step}"
        files = sorted(root.rglob("*.safetensors"))
        found = {(str(f.relative_to(root)), name): t for f in files for name, t in load_file(f).items()}
        return {key: tensor for key, tensor in found.items() if not key[1].startswith("rng/")}


@pytest.fixture(scope="session")
def two_nodes(own_ray_folder: str) -> Iterator[str]:
    """The address of a cluster of two nodes with three CPUs each."""
    from ray.cluster_utils import Cluster

    from verl.single_controller.ray import security

    security.demand_token()
    node = {"num_cpus": 3, "object_store_memory": 120 << 20, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=node)
    try:
        cluster.add_node(**node)
        # The cluster lives to the end of all tests; a run that is given no address starts one of its own beside it.
        Path(own_ray_folder, "ray", "ray_current_cluster").unlink(missing_ok=True)
        yield cluster.address
    finally:
        cluster.shutdown()


@pytest.fixture(scope="session", autouse=True)
def ray_of_our_own(own_ray_folder: str) -> None:
    """Every test of this folder."""


@pytest.fixture(scope="session")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, prompts and a scorer."""
    folder = tmp_path_factory.mktemp("ray_runs")
    tiny_model_dir(folder / "model")
    write_prompts(folder / "train.parquet", 12)
    (folder / "scorer.py").write_text(LETTERS)
    return folder


@pytest.fixture(scope="session")
def train(task: Path, two_nodes: str) -> Callable[..., Run]:
    """``train(name, steps, *changes)``: PPO with a critic, a reference policy, two epochs and two mini-batches."""

    def run(name: str, steps: int, *changes: str) -> Run:
        mine = [
            f"trainer.total_training_steps={steps}",
            f"trainer.default_local_dir={name}",
            f"trainer.experiment_name={name}",
            f"trainer.rollout_data_dir={name}/samples",
            f"ray_kwargs.ray_init.address={two_nodes}",
        ]
        before, os.environ["VERL_FILE_LOGGER_ROOT"] = Path.cwd(), str(task / "logs")
        os.chdir(task)
        try:
            assert main_ppo.main([*SETTINGS, *mine, *changes]) == 0
        finally:
            os.chdir(before)
            del os.environ["VERL_FILE_LOGGER_ROOT"]
        dumped = sorted((task / name / "samples").glob("*.jsonl"), key=lambda file: int(file.stem))
        return Run(logged(task / "logs", name), [records(file) for file in dumped], task / name)

    return run


@pytest.fixture(scope="session")
def alone(train: Callable[..., Run]) -> Run:
    """The run that all others are compared with: four steps in this process."""
    with counted() as frames:
        run = train("alone", 4, "trainer.runtime=local", "trainer.save_freq=4")
    return replace(run, frames=tuple(frames))
