"""GRPO on TorchTitan's models over FSDP2 x tensor parallel processes learns the quickstart's task.

    PYTHONPATH=. python benchmarks/bench_torchtitan.py [--processes 4] [--tensor 2] [--steps 15] [--task FOLDER]

A Qwen3 of the quickstart's size (its Qwen2 has biases, which the engine refuses) is warmed up as `tests/e2e` does it,
by the plain engine; ``--task`` keeps it for the next call. Then actor and reference run on TorchTitan over gloo, with
packed rows and a KL to the reference; the sampler gets the weights before each step. Printed: held-out greedy accuracy
before, every three steps and after, and the mean reward of the first and of the last step. Status 1 where the last
accuracy stays below ``--least``.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from tests.e2e.mixture import write_dense
from tests.harness.programs import PROJECT, command, curve, metrics, run

QUICKSTART = PROJECT / "examples" / "quickstart"
WARM_UP, NAME = 320, "grpo"
ACCURACY = "val-core/arithmetic/reward/mean@1"
COMMON = ("trainer.project_name=titan", "trainer.logger=[file]", "trainer.device=cpu")


def warmed_up(task: Path) -> Path:
    """The folder of the model that can add and goes on after the answer."""
    model = task / "sft" / f"global_step_{WARM_UP}" / "model" / "huggingface"
    if model.exists():
        return model
    task.mkdir(parents=True, exist_ok=True)
    sizes = ["--train_size", "3072", "--sft_size", "4096", "--seed", "0"]
    write = PROJECT / "examples" / "data_preprocess" / "arithmetic.py"
    run([sys.executable, f"{write}", "--local_save_dir", "data", *sizes], cwd=task)
    run([sys.executable, f"{QUICKSTART / 'demonstrations.py'}", "data/sft.parquet", "data/pupil.parquet"], cwd=task)
    run([sys.executable, f"{QUICKSTART / 'model.py'}", "base"], cwd=task)
    write_dense(task / "dense", task / "base")
    changes = ("model.path=dense", "data.train_files=data/pupil.parquet", "data.train_batch_size=128",
               "data.max_length=32", "optim.lr=3e-3", "optim.lr_warmup_steps=20", "optim.lr_scheduler_type=cosine",
               f"trainer.total_training_steps={WARM_UP}", f"trainer.save_freq={WARM_UP}",
               "trainer.default_local_dir=sft", "trainer.experiment_name=sft",
               "checkpoint.save_contents=[model]")  # fmt: skip
    command("verl.trainer.sft_trainer", *COMMON, *changes, cwd=task, timeout=1800)
    return model


def learn(task: Path, model: Path, processes: int, tensor: int, steps: int) -> list[dict]:
    """The steps of a run."""
    changes = ("algorithm.adv_estimator=grpo", "model_engine=torchtitan", f"actor_rollout_ref.model.path={model}",
               f"actor_rollout_ref.actor.torchtitan.tensor_parallel_size={tensor}",
               f"trainer.n_gpus_per_node={processes}", "data.train_files=data/train.parquet",
               "data.val_files=data/test.parquet", "data.train_batch_size=64", "data.max_prompt_length=32",
               "data.max_response_length=8", "actor_rollout_ref.rollout.n=8",
               "actor_rollout_ref.actor.ppo_mini_batch_size=64", "actor_rollout_ref.actor.optim.lr=2e-4",
               "actor_rollout_ref.actor.use_kl_loss=true", "actor_rollout_ref.actor.use_dynamic_bsz=true",
               f"reward.custom_reward_function.path={QUICKSTART / 'reward.py'}", "trainer.test_freq=3",
               f"trainer.total_training_steps={steps}", f"trainer.experiment_name={NAME}",
               "trainer.resume_mode=disable", f"trainer.default_local_dir={NAME}")  # fmt: skip
    (task / "logs" / "titan" / f"{NAME}.jsonl").unlink(missing_ok=True)
    command("verl.trainer.main_ppo", *COMMON, *changes, cwd=task, timeout=1800)
    return metrics(task, "titan", NAME)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--tensor", type=int, default=2)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--least", type=float, default=0.9)
    parser.add_argument("--task", type=Path)
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        task = (arguments.task or Path(folder)).absolute()
        steps = learn(task, warmed_up(task), arguments.processes, arguments.tensor, arguments.steps)
    accuracy, rewards = curve(steps, ACCURACY), curve(steps, "critic/score/mean")
    print(f"accuracy {' '.join(f'{value:.3f}' for value in accuracy)}")
    print(f"mean reward {rewards[0]:.3f} -> {rewards[-1]:.3f}")
    return 0 if accuracy[-1] >= arguments.least else 1


if __name__ == "__main__":
    raise SystemExit(main())
