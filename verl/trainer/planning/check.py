"""Faults of a run that show before anything is allocated: in settings, files, first rows, memory, disk."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import cast

from pyarrow.parquet import read_metadata

from verl.config import PPOTrainerConfig, replace
from verl.config.loading.configuration import read_config
from verl.config.machine.topology import schedule_of
from verl.config.rules import validate
from verl.config.schema.root import prompts_at_once
from verl.data import RLHFDataset, hf_tokenizer, processor_of, tokenizer_of
from verl.data.files import check_files
from verl.data.look import look_at_prompts
from verl.errors import ConfigError, RewardError, VerlError
from verl.metrics import notice
from verl.models.shape import model_shape
from verl.planner.estimate import Estimate
from verl.planner.from_config import run_plan
from verl.planner.hardware import Cluster
from verl.rewards import RewardFunction, Scorer, ScoringLimits, default_compute_score, get_custom_reward_fn
from verl.rewards.check import candidates, make_samples, try_one
from verl.rewards.loading import LIMIT_NAMES
from verl.storage import copy_to_local
from verl.storage.formats import read_table
from verl.trainer.build import check_rewards, dataset

ROWS = 4
"""Rows that go through the tokenizer and the reward function."""


def findings(
    words: Sequence[str], cluster: Cluster | None, this_machine: Callable[[PPOTrainerConfig], Cluster]
) -> list[VerlError]:
    """What is wrong with a command line of `verl.trainer.main_ppo`: the key, what it got, what is allowed and the fix.

    A sound run that the planner has no costs of gets a notice, and no finding.

    Args:
        words: the command line without the program.
        cluster: the devices of the run; None: this machine's, which the run's own checks then look at.
        this_machine: its devices, by the configuration.

    Raises:
        ConfigError: ``cluster`` is None, and this machine's devices are unknown.
    """
    try:
        config = cast(PPOTrainerConfig, read_config("ppo_trainer", [*words]))
    except VerlError as error:
        return _each(error)
    rules: Callable[[PPOTrainerConfig], None] = validate.validate if cluster is None else validate.check_printed
    problems = [*_of(look_at_prompts, config), *_of(rules, config)]
    if problems:
        return problems
    devices = cluster or this_machine(config)
    estimate = _estimate(config, devices)
    problems = _of(_rows, config)
    if estimate is not None:
        problems += estimate.problems()
        if cluster is None:  # the run's disk is another one otherwise
            problems += _disk(config, estimate)
    return problems


def _each(error: VerlError) -> list[VerlError]:
    return list(error.problems) if isinstance(error, ConfigError) and error.problems else [error]


def _of(check: Callable[[PPOTrainerConfig], object], config: PPOTrainerConfig) -> list[VerlError]:
    """What a check raises."""
    try:
        check(config)
    except VerlError as error:
        return _each(error)
    return []


def _rows(config: PPOTrainerConfig) -> None:
    """The first rows of the training data through template, tokenizer and reward function, as a run would take them."""
    model, few = config.actor_rollout_ref.model, replace(config.data, train_max_samples=ROWS, shuffle=False)
    trusted = model.trust_remote_code or config.data.trust_remote_code
    if config.data.tokenizer:
        template = model.custom_chat_template
        tokenizer = hf_tokenizer(
            config.data.tokenizer, key="data.tokenizer", trust_remote_code=trusted, custom_chat_template=template
        )
    else:
        tokenizer = tokenizer_of(replace(model, trust_remote_code=trusted))
    processor = processor_of(model, tokenizer, config.data.mm_processor_kwargs)
    sampled = replace(config, data=few)
    prompts = dataset(sampled, tokenizer, processor, is_train=True)
    check_rewards(sampled, prompts)
    if not isinstance(prompts, RLHFDataset):
        return  # rows are up to the user's class
    for row in range(min(ROWS, len(prompts))):
        prompts[row]
    _scores(config, prompts)


def _scores(config: PPOTrainerConfig, prompts: RLHFDataset) -> None:
    """Score made-up answers to the first rows.

    Raises:
        RewardError: a call failed.
    """
    manager = config.reward.reward_manager
    if config.reward.reward_model.enable or manager.source != "register" or manager.name not in ("naive", "dapo"):
        return  # another model, or a manager of the user's, scores
    function = get_custom_reward_fn(config) or RewardFunction.of(default_compute_score)
    rows = [prompts.dataframe[row] for row in range(min(ROWS, len(prompts)))]
    samples = make_samples(rows, config.data.reward_fn_key, function)
    scorer, key = Scorer(function, _limits(config)), "reward.custom_reward_function.path"
    try:
        trials = [try_one(scorer, sample, text) for sample in samples for text in candidates(sample.ground_truth)]
    finally:
        scorer.close()
    failed = next((trial for trial in trials if trial.result.failure or trial.result.caught), None)
    if failed is not None:
        failure = failed.result.failure or failed.result.caught
        assert failure is not None
        message = f"the reward function fails on row {failed.sample.row}: {failure.message}"
        fix = "python -m verl.rewards.check shows the traceback."
        raise RewardError(message, key=key, got=failed.sample.solution_str, fix=fix)


def _limits(config: PPOTrainerConfig) -> ScoringLimits:
    """Those of the run, in one process, where a failure is a result: the manager's own arguments win."""
    limits = {name: config.reward[name] for name in LIMIT_NAMES if name in config.reward}
    limits |= {name: value for name, value in config.reward.reward_kwargs.items() if name in LIMIT_NAMES}
    limits |= {"num_workers": 1, "on_error": "mask"}
    return ScoringLimits(**{name: value for name, value in limits.items() if value is not None})


def _estimate(config: PPOTrainerConfig, cluster: Cluster) -> Estimate | None:
    """What the run takes; None, after a notice, where the planner has no costs of it."""
    try:
        return Estimate.of(run_plan(config, cluster.device.is_cpu, model_shape), cluster)
    except VerlError as error:  # a teacher, another family, a model that is not on this machine
        notice("planner", f"memory and disk are not checked: {error}")
        return None


def _steps(config: PPOTrainerConfig) -> int | None:
    """Steps of the run, at most: prompts that are too long are counted; None: the rows are up to the user's class."""
    if config.trainer.total_training_steps:
        return config.trainer.total_training_steps
    if config.data.custom_cls.path:
        return None
    data, schedule = config.data, schedule_of(config)
    rows, key = 0, "data.train_files"
    for file in check_files(data.train_files, key):
        path = Path(copy_to_local(file, cache_dir=data.cache_dir, key=key))
        rows += read_metadata(path).num_rows if path.suffix.lower() == ".parquet" else len(read_table(path))
    rows = rows if data.train_max_samples < 0 else min(rows, data.train_max_samples)
    return schedule.length_of(config, schedule.steps_of(config, rows // prompts_at_once(data)))


def _disk(config: PPOTrainerConfig, estimate: Estimate) -> Iterator[VerlError]:
    """Room for checkpoints on this machine."""
    trainer = config.trainer
    if trainer.save_freq <= 0:
        return
    steps = _steps(config)
    if steps is None:
        notice("trainer.save_freq", "room for checkpoints is not checked: data.custom_cls says how many rows there are")
        return
    folder = Path(trainer.default_local_dir).expanduser().absolute()
    disk = next(place for place in (folder, *folder.parents) if place.exists())
    saves = -(-steps // trainer.save_freq)  # the last step is saved, too
    needed = 0.0
    for memory in estimate.memory:
        limit = trainer.max_critic_ckpt_to_keep if memory.role == "critic" else trainer.max_actor_ckpt_to_keep
        # A new one is complete before an old one is deleted.
        needed += memory.checkpoint * (saves if limit is None else min(saves, limit + 1))
    free = shutil.disk_usage(disk).free
    if needed > free:
        fix = ("Name a folder on a larger disk, or keep fewer (trainer.max_actor_ckpt_to_keep, "
               "trainer.max_critic_ckpt_to_keep).")  # fmt: skip
        may_be_fewer = config.data.filter_overlong_prompts and not trainer.total_training_steps
        count = f"at most {steps}" if may_be_fewer else str(steps)
        message = f"the checkpoints of {count} step(s) take {needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free"
        yield ConfigError(message, key="trainer.default_local_dir", got=str(folder), fix=fix)
