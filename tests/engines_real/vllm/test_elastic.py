"""Engines of vLLM that are killed and stopped amid a run on Ray, which continues with the right weights."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
from pathlib import Path

import pytest

from tests.harness.programs import command, curve, metrics, replica_processes
from tests.harness.rows import write_prompts

pytestmark = pytest.mark.slow
STEPS, GROUPS, SAMPLES, LENGTH = 3, 4, 2, 48
GATED = """import pathlib, time

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    while not pathlib.Path("go").exists():
        time.sleep(0.05)
    return len(set(solution_str)) / 10
"""
SETTINGS = (
    "algorithm.adv_estimator=grpo",
    "data.train_files=train.parquet",
    f"data.train_batch_size={GROUPS}",
    "data.max_prompt_length=64",
    f"data.max_response_length={LENGTH}",
    f"actor_rollout_ref.rollout.n={SAMPLES}",
    f"actor_rollout_ref.actor.ppo_mini_batch_size={GROUPS}",
    "actor_rollout_ref.actor.optim.lr=1e-3",
    "actor_rollout_ref.rollout.name=vllm",
    "actor_rollout_ref.rollout.calculate_log_probs=true",
    "actor_rollout_ref.rollout.ignore_eos=true",
    "actor_rollout_ref.rollout.max_num_seqs=2",
    "actor_rollout_ref.rollout.max_replacements=6",
    "actor_rollout_ref.rollout.nnodes=1",
    "actor_rollout_ref.rollout.n_gpus_per_node=2",
    "actor_rollout_ref.rollout.checkpoint_engine.backend=shared_memory",
    "actor_rollout_ref.hybrid_engine=false",
    "reward.custom_reward_function.path=gated.py",
    "trainer.v1.trainer_mode=fully_async",
    "async_training.staleness_threshold=0",  # so that every token is of the version that the trainer has
    "async_training.trigger_parameter_sync_step=1",
    "trainer.runtime=ray",
    "trainer.device=cpu",
    "trainer.n_gpus_per_node=1",
    "trainer.hang_seconds=30",
    f"trainer.total_training_steps={STEPS}",
    "trainer.skip_old_log_prob=false",  # so that the trainer's log-probs are there to compare with
    "trainer.default_local_dir=run",
    "trainer.project_name=e2e",
    "trainer.experiment_name=run",
    "trainer.logger=[file]",
    "ray_kwargs.ray_init.num_cpus=8",
)


def disturb(folder: Path, over: threading.Event) -> None:
    """Stop both replicas amid requests, kill the first, and open the gate when two others are there."""

    def until(condition, pause=0.005):
        while not condition() and not over.wait(pause):
            pass

    def asked():
        return ledger.read_text().count('"asked"') if ledger.exists() else 0

    run = folder / "run"
    ledger = run / "journal.jsonl"
    # Looking for processes takes longer than the requests may: they are known before the first one comes.
    until(lambda: len(replica_processes()) == 2, pause=0.5)
    first = replica_processes()
    until(asked)
    for pid in first if not over.is_set() else ():
        os.kill(pid, signal.SIGSTOP)
    until(lambda: asked() >= GROUPS)  # there are more samples than one of them has slots
    if over.is_set():
        return
    os.kill(min(first), signal.SIGKILL)
    until(lambda: len(replica_processes() - first) == 2, pause=0.5)
    (folder / "go").touch()


def test_engines_that_die_and_hang_amid_a_run_sample_with_its_weights_and_lose_nothing(
    folder, tmp_path, own_ray_folder
):
    """The trainer's log-probs are those of every replica in every step, so each had its version before it served."""
    (tmp_path / "gated.py").write_text(GATED)
    write_prompts(tmp_path / "train.parquet", STEPS * GROUPS)
    over = threading.Event()
    thread = threading.Thread(target=disturb, args=(tmp_path, over))
    thread.start()
    try:
        model = f"actor_rollout_ref.model.path={folder}"
        done = command("verl.trainer.main_ppo", *SETTINGS, model, cwd=tmp_path, timeout=900)
    finally:
        over.set()
        thread.join()
    steps, said = metrics(tmp_path, "e2e", "run"), done.stdout + done.stderr
    assert len(steps) == STEPS and max(curve(steps, "training/rollout_probs_diff_max")) < 1e-4
    assert curve(steps, "rollout/replicas/alive")[-1] >= 1 and curve(steps, "rollout/replicas/replaced")[-1] >= 2
    assert re.search(
        r"process \d+ on node [\d.]+, stopped by a signal\) has not answered for .*It has \d+ requests, ", said
    )
    lines = [json.loads(line) for line in (tmp_path / "run" / "journal.jsonl").read_text().splitlines()]
    assert 0 < sum(curve(steps, "rollout/replicas/resent")) <= sum(line["event"] == "moved" for line in lines)
    assert curve(steps, "count/total_generated_samples")[-1] == STEPS * GROUPS * SAMPLES
