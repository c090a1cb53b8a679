"""`verl.train` and its siblings: from Python's objects to the settings of a program, which runs in this process.

The door adds no other way to train: rows become a file, a function becomes a file, everything else is settings, and
the program is the one that the command line starts. `Run.command` prints that line.
"""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

from verl import env
from verl.api.functions import Reward, reward_settings
from verl.api.methods import METHODS, Method, method_of
from verl.api.rows import Data, files_of
from verl.api.run import METRICS, RECORD, Run, open_run, write_run_record
from verl.api.settings import Model, word_of, words_of
from verl.config.loading.configuration import writable, write_private
from verl.errors import ConfigError, VerlError
from verl.observability.backends.notebook import in_notebook
from verl.protocol.tokenizer import Tokenizer

FOLDER, LOGGER = "trainer.default_local_dir", "trainer.logger=[console,file]"
RUNS = "runs"
"""The folder of all runs that name none of their own."""
MODEL_KEYS = {"ppo_trainer": "actor_rollout_ref.model"}
SOURCE = "rows"
"""Of rows that name no ``data_source`` and are rewarded by a function: metrics call them so."""
SAVE = 1_000_000
"""A ``trainer.save_freq`` beyond any run: only its last step is saved."""
ROWS = 16
"""Most rows of a step, where nothing else is said."""


def train(
    method: str = "grpo",
    *,
    model: Model,
    data: Data,
    reward: Reward | None = None,
    val: Data | None = None,
    tokenizer: Tokenizer | None = None,
    **settings: Any,
) -> Run:
    """Reinforcement learning: sample answers to prompts, reward them, update the model.

    Args:
        method: of `verl.api.methods.BY_REWARD`: ``grpo``, ``ppo``, ``rloo``, ``dapo``, ...
        model: a hub name, a folder, or a loaded model of transformers, which is copied and stays as it is.
        data: a path, or rows with ``prompt`` (a text or chat messages) and ``answer`` or ``ground_truth`` (see
            `verl.api.rows`); other columns reach the reward in ``extra_info``.
        reward: ``f(solution_str, ground_truth, ...)`` -> a number, or ``file.py:name``; None: the scorer of each row's
            ``data_source``.
        val: held-out rows, as ``data``.
        tokenizer: of a loaded model.
        settings: those of the command line, nested (``trainer={"total_epochs": 3}``) or dotted
            (``**{"trainer.total_epochs": 3}``); without them rows are gone through once, at most 16 a step.

    Raises:
        VerlError: what the command line would refuse, with the same words.

    Example:
        >>> rows = [{"prompt": f"What is {a} plus 1?", "answer": str(a + 1)} for a in range(64)]
        >>> def right(solution_str, ground_truth): return float(ground_truth in solution_str)
        >>> run = verl.train(model="HuggingFaceTB/SmolLM2-135M-Instruct", data=rows, reward=right)
    """
    method_of(method)
    return _from_objects(method, model, data, val, tokenizer, reward, settings)


def sft(
    *, model: Model, data: Data, val: Data | None = None, tokenizer: Tokenizer | None = None, **settings: Any
) -> Run:
    """Supervised fine-tuning on rows with ``messages``, or with ``prompt`` and ``response``; arguments as `train`."""
    return _from_objects("sft", model, data, val, tokenizer, None, settings)


def dpo(
    *, model: Model, data: Data, val: Data | None = None, tokenizer: Tokenizer | None = None, **settings: Any
) -> Run:
    """Preference training on rows with ``prompt``, ``chosen`` and ``rejected``; arguments as `train`."""
    return _from_objects("dpo", model, data, val, tokenizer, None, settings)


def reward_model(
    *, model: Model, data: Data, val: Data | None = None, tokenizer: Tokenizer | None = None, **settings: Any
) -> Run:
    """A model with a scalar head, from rows with ``prompt``, ``chosen`` and ``rejected``; arguments as `train`."""
    return _from_objects("reward_model", model, data, val, tokenizer, None, settings)


def resume(run: Run | str | Path, **settings: Any) -> Run:
    """Go on with a run from its newest checkpoint, bit for bit; without one it begins again.

    Args:
        run: or its folder, also of a process that is gone.
        settings: what is to change, such as ``trainer={"total_epochs": 6}``.
    """
    run = run if isinstance(run, Run) else open_run(run)
    return begin(run.method, [*run.words, *words_of(METHODS[run.method].configuration, settings)])


def _from_objects(
    name: str,
    model: Model,
    data: Data,
    val: Data | None,
    tokenizer: Tokenizer | None,
    reward: Reward | None,
    settings: Mapping[str, Any],
) -> Run:
    """Write what no setting can hold into the run's folder, and begin; a run that is refused leaves no folder."""
    method = METHODS[name]
    words = words_of(method.configuration, settings)
    folder, is_new = folder_in(words), False
    if folder is None:
        folder, is_new = new_folder(name), True
    try:
        derived = {FOLDER: str(folder)} if is_new else {}
        source = SOURCE if reward is not None else None
        derived |= _data(method, folder, data, val, source) | model_setting(
            method.configuration, model, tokenizer, folder
        )
        if reward is not None:
            function = reward_settings(reward, folder / "reward.py")
            derived |= {f"reward.custom_reward_function.{key}": value for key, value in function.items()}
        keys = {word.partition("=")[0] for word in words}
        derived = {key: value for key, value in derived.items() if key not in keys}
        return begin(name, [*words_of(method.configuration, derived), *words])
    except VerlError:
        if is_new and not any(folder.glob("*.yaml")):  # nothing of it ran
            shutil.rmtree(folder, ignore_errors=True)
        raise


def begin(name: str, words: Sequence[str], stops: bool = True) -> Run:
    """Run a method's program in this process on the settings of a command line.

    A run is in ``trainer.default_local_dir``; where nothing names it, in ``runs/<method>-<date>-<time>``. Metrics,
    checkpoints and a record for `resume` are there.

    Args:
        stops: a signal ends the run and gives a `Run` that says so; else `RunStopped` leaves the program.

    Raises:
        VerlError: what the program refuses.
    """
    from verl.config import load_config
    from verl.trainer.signals import RunStopped

    method = METHODS[name]
    named = folder_in(words)
    folder = named or free_folder(name)
    usual = [
        f"trainer.project_name={RUNS}",
        word_of("trainer.experiment_name", folder.name or RUNS),
        LOGGER,
        f"trainer.save_freq={SAVE}",
    ]
    defaults = [*method.defaults, word_of(FOLDER, str(folder)), *usual]
    config = load_config(method.configuration, [*words, *_shown_here(words)], look_of(method), defaults=defaults)
    place = Path(config.trainer.default_local_dir)
    folder_words = [] if named or place != folder else [word_of(FOLDER, str(folder))]
    run = Run(place, name, (*folder_words, *words))
    record, steps = place / RECORD, run.steps
    former = record.read_text(encoding="utf-8") if record.is_file() else None
    with writable(place):
        write_run_record(run)
    with in_process(place):
        try:
            _program(method)(config)
        except VerlError:
            if former is not None and run.steps == steps:  # refused: the run that is there has its former settings
                write_private(record, former)
            raise
        except RunStopped as stop:
            if not stops:
                raise
            return replace(run, stopped=f"{stop.signal.name}: {stop.sentence}")
    return run


def _shown_here(words: Sequence[str]) -> list[str]:
    """A notebook has a table that updates instead of the console's lines."""
    is_said = any(word.startswith("trainer.logger=") for word in words)
    return ["trainer.logger=[notebook,file]"] if in_notebook() and not is_said else []


def folder_in(words: Iterable[str]) -> Path | None:
    """What the words of a command line name as the run's folder."""
    named = [word.partition("=")[2] for word in words if word.lstrip("+").startswith(f"{FOLDER}=")]
    return Path(env.expand(named[-1].strip("'\""))) if named else None


def free_folder(name: str) -> Path:
    """``runs/<method>-<date>-<time>``, which does not exist yet."""
    stamp = Path(RUNS, f"{name}-{time.strftime('%Y%m%d-%H%M%S')}")
    return next(
        place
        for number in count(1)
        if not (place := stamp if number == 1 else stamp.with_name(f"{stamp.name}-{number}")).exists()
    )


def new_folder(name: str) -> Path:
    """`free_folder`, made.

    Raises:
        ConfigError: this place cannot be written.
    """
    while True:
        folder = free_folder(name)
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:
            continue  # another run took it
        except OSError as error:
            raise ConfigError(
                f"no folder for the run can be made here: {error.strerror}",
                key=FOLDER,
                got=str(folder.absolute()),
                fix="Set it to a folder that can be written.",
            ) from error


def _data(method: Method, folder: Path, data: Data, val: Data | None, source: str | None) -> dict[str, Any]:
    """The settings of data files, and of a batch that the rows fill."""
    is_prompts = method.configuration == "ppo_trainer"
    train = files_of(data, folder / "data" / "train.parquet", "data", is_prompts, source)
    held_out = None if val is None else files_of(val, folder / "data" / "val.parquet", "val", is_prompts, source)
    values = {"data.train_files": train, "data.val_files": held_out, "trainer.total_epochs": 1}
    rows = _number_of_rows(train)
    if rows is not None:
        batch = rows // -(-rows // ROWS)  # rows that fill no batch are not trained on: as few as can be
        values["data.train_batch_size"] = batch
        if is_prompts:
            values["actor_rollout_ref.actor.ppo_mini_batch_size"] = batch
    return values


def _number_of_rows(files: Any) -> int | None:
    """Of a single parquet file on this machine; None for others."""
    if not isinstance(files, str) or not files.endswith(".parquet") or not Path(files).is_file():
        return None
    import pyarrow.parquet as pq

    return int(pq.read_metadata(files).num_rows)


def model_setting(configuration: str, model: Model, tokenizer: Tokenizer | None, folder: Path) -> dict[str, Any]:
    """The settings that name a model; a loaded one is written to the run's folder."""
    key = MODEL_KEYS.get(configuration, "model")
    if isinstance(model, str | Path):
        return {f"{key}.path": str(model)}
    if not hasattr(model, "save_pretrained"):
        raise ConfigError("a model is a hub name, a folder, or a model of transformers", key="model", got=model)
    place = folder / "model"
    if tokenizer is None:
        origin = getattr(model.config, "_name_or_path", "")
        if not origin:
            raise ConfigError("a loaded model needs its tokenizer", key="tokenizer", fix="Pass tokenizer=...")
        from verl.data import hf_tokenizer

        tokenizer = hf_tokenizer(origin)
    model.save_pretrained(place)
    tokenizer.save_pretrained(place)
    return {f"{key}.path": str(place)}


def look_of(method: Method) -> Callable[[Any], None]:
    from verl.data import look

    return {"ppo_trainer": look.look_at_prompts, "sft_trainer": look.look_at_conversations}.get(
        method.configuration, look.look_at_pairs
    )


def _program(method: Method) -> Callable[[Any], None]:
    from verl.trainer import dpo_trainer, launch, main_ppo, rm_trainer, sft_trainer

    if method.configuration == "ppo_trainer":
        return main_ppo.run_ppo
    builds: dict[str, launch.Build] = {
        "sft_trainer": sft_trainer.build_sft,
        "dpo_trainer": dpo_trainer.build_dpo,
        "rm_trainer": rm_trainer.build_rm,
    }
    return lambda config: launch.run_checked(config, builds[method.configuration])


@contextmanager
def in_process(folder: Path) -> Iterator[None]:
    """Metrics go to the run's folder, and the random numbers of the caller go on where they were."""
    import numpy as np
    import torch

    from verl.trainer.runtime import outside_of_loop

    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    named = env.get("VERL_FILE_LOGGER_PATH")
    try:
        with (
            outside_of_loop(),
            env.within({} if named else {"VERL_FILE_LOGGER_PATH": str((folder / METRICS).absolute())}),
        ):
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
