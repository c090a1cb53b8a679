"""`verl.generate` and `verl.evaluate`: answers of a model to prompts, and their scores."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl.api.functions import Reward, reward_settings
from verl.api.rows import Data, files_of
from verl.api.settings import Model, words_of
from verl.api.start import SOURCE, in_process, model_setting, new_folder
from verl.config import load_config
from verl.errors import VerlError
from verl.json_text import read_json
from verl.protocol.tokenizer import Tokenizer

if TYPE_CHECKING:
    import pandas as pd


def generate(
    model: Model, prompts: Data, *, n: int = 1, tokenizer: Tokenizer | None = None, **settings: Any
) -> pd.DataFrame:
    """Sample answers.

    Args:
        model: a hub name, a folder, a loaded model of transformers, or ``run.model_path``.
        prompts: a path, texts, or rows with ``prompt``.
        n: answers to each.
        settings: of ``verl.trainer.main_generation``, nested or dotted (``rollout={"temperature": 0.7}``).

    Returns:
        The rows, with their ``n`` answers in the column ``responses``.

    Raises:
        VerlError: what the program refuses.
    """
    from verl.data.look import look_at_questions
    from verl.trainer.main_generation import run_generation

    folder = new_folder("generate")
    derived = {
        "data.path": files_of(prompts, folder / "data" / "prompts.parquet", "prompts", is_prompts=True),
        "data.output_path": str(folder / "answers.parquet"),
        "data.n_samples": n,
        **model_setting("generation", model, tokenizer, folder),
    }
    return _frame(_run("generation", derived, settings, folder, run_generation, look_at_questions))


def evaluate(answers: Data, reward: Reward | None = None, **settings: Any) -> dict[str, Any]:
    """Score answers.

    Args:
        answers: what `generate` returned, or a path of such rows: ``prompt``, ``responses``, and the truth.
        reward: as in `verl.train`; None: the scorer of each row's ``data_source``.
        settings: of ``verl.trainer.main_eval``.

    Returns:
        The report: ``test_score/<data source>``, and per data source pass@k, majority and intervals.

    Raises:
        VerlError: what the program refuses.
    """
    from verl.trainer.main_eval import run_eval

    folder = new_folder("evaluate")
    report = folder / "report.json"
    source = SOURCE if reward is not None else None
    derived = {
        "data.path": files_of(answers, folder / "data" / "answers.parquet", "answers", is_prompts=True, source=source),
        "report.json": str(report),
    }
    if reward is not None:
        function = reward_settings(reward, folder / "reward.py")
        derived |= {f"custom_reward_function.{key}": value for key, value in function.items()}
    _run("evaluation", derived, settings, folder, run_eval)
    scores: dict[str, Any] = read_json(report.read_text(encoding="utf-8"))
    return scores


def _run(
    configuration: str,
    given: Mapping[str, Any],
    settings: Mapping[str, Any],
    folder: Path,
    program: Callable[[Any], str],
    look: Callable[[Any], None] | None = None,
) -> str:
    words = [*words_of(configuration, given), *words_of(configuration, settings)]
    try:
        config: Any = load_config(configuration, words, look)
    except VerlError:
        shutil.rmtree(folder)  # nothing ran
        raise
    with in_process(folder):
        return program(config)


def _frame(path: str) -> pd.DataFrame:
    import pandas as pd

    return pd.read_parquet(path)
