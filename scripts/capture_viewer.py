"""Train twice for a minute, look at both runs in a browser without a window, and keep what it shows as pictures.

    VERL_SHARED=FOLDER PYTHONPATH=. python scripts/capture_viewer.py   # writes docs/images/viewer_*.png

``$VERL_SHARED/models/tinystories-260k`` learns by GRPO to write of happy things, at two learning rates. Needs Chromium
and its driver.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pandas as pd

from tests.viewer.chromium import Chromium
from tests.viewer.served import TOKEN, served

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ROOT / "docs" / "images"
MODEL = Path(os.environ.get("VERL_SHARED", "")) / "models" / "tinystories-260k"
BEGINNINGS = (
    "The cat and the dog", "It was a sunny day", "A big red ball", "Lily went to the park", "The bird sat in a tree",
    "One day, a boy named Tom", "The little fish", "Mom and dad",
)  # fmt: skip
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    words = solution_str.lower().split()
    count = sum(word.strip(".,!") in ("happy", "fun", "love", "loved", "smiled", "play", "played") for word in words)
    return {"score": min(count, 3) / 3, "happy_words": count, "distinct": len(set(words)) / max(len(words), 1)}
"""
STEP = 6
"""Of which the groups and a sample are shown."""


def missing() -> list[str]:
    """What this script needs and does not have."""
    lacks = [] if MODEL.is_dir() else [f"{MODEL}: set the variable VERL_SHARED to the folder that has models/"]
    programs = ("chromium", "chromedriver")
    return lacks + [f"{name}: install it, and put it on PATH" for name in programs if shutil.which(name) is None]


def train(folder: Path, rate: str) -> Path:
    """A run of twelve steps; its folder."""
    run = folder / f"stories-lr-{rate}"
    words = [
        "algorithm.adv_estimator=grpo", "data.train_files=train.parquet", "data.val_files=train.parquet",
        "data.train_batch_size=8", "data.max_prompt_length=32", "data.max_response_length=48",
        f"actor_rollout_ref.model.path={MODEL}", "actor_rollout_ref.rollout.n=6",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8", f"actor_rollout_ref.actor.optim.lr={rate}",
        "actor_rollout_ref.rollout.calculate_log_probs=true", "trainer.skip_old_log_prob=false",
        "reward.custom_reward_function.path=reward.py", "trainer.logger=[file]", "trainer.total_epochs=12",
        "trainer.total_training_steps=12", "trainer.test_freq=4", "trainer.save_freq=6",
        f"trainer.experiment_name={run.name}", f"trainer.default_local_dir={run}",
        f"trainer.rollout_data_dir={run / 'samples'}",
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "VERL_FILE_LOGGER_PATH": str(run / "metrics.jsonl")}
    subprocess.run([sys.executable, "-m", "verl.trainer.main_ppo", *words], cwd=folder, env=environment, check=True)
    return run


def main() -> None:
    if lacks := missing():
        sys.exit("\n".join(lacks))
    with tempfile.TemporaryDirectory(prefix="runs-") as temporary:
        folder = Path(temporary)
        (folder / "reward.py").write_text(REWARD)
        rows = [
            {"prompt": [{"role": "user", "content": text}], "data_source": "stories",
             "reward_model": {"style": "rule", "ground_truth": "happy"}} for text in BEGINNINGS
        ]  # fmt: skip
        pd.DataFrame(rows).to_parquet(folder / "train.parquet")
        programs = [str(shutil.which(name)) for name in ("chromium", "chromedriver")]
        runs = [train(folder, rate) for rate in ("3e-4", "1e-3")]
        browser = Chromium(*programs, folder)
        try:
            with served(*runs) as site:
                site.indexed("samples")
                best = site.get("samples", step=STEP, sort="score", descending=1)["rows"][0]["id"]
                views = {
                    "overview": "#/overview?smooth=0.5&metric=critic/score/mean&metric=actor/entropy",
                    "group": f"#/step?run=0&step={STEP}", "sample": f"#/sample?run=0&id={best}&token=7",
                }  # fmt: skip
                browser.size(1280, 760)
                browser.scheme("light")
                browser.enter(f"http://127.0.0.1:{site.port}/?token={TOKEN}")
                for name, view in views.items():
                    browser.open(view)
                    browser.picture(IMAGES / f"viewer_{name}.png")
        finally:
            browser.driver.quit()


if __name__ == "__main__":
    main()
