"""A user's class that is called after every complete checkpoint (``trainer.checkpoint_callback_class``)."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from verl import registry
from verl.config import PPOTrainerConfig
from verl.errors import CheckpointError, ConfigError
from verl.trainer.ppo.callbacks import Callback, RunningTrainer

KEY = "trainer.checkpoint_callback_class"


class CheckpointCallback:
    """Notified of a checkpoint in the controller's process, once every file of it is in place.

    Args:
        config: the whole configuration.

    Example:
        >>> class Register(CheckpointCallback):
        ...     def on_save(self, trainer, global_step, checkpoint_dir, **more):
        ...         models.register(checkpoint_dir, global_step)
    """

    def __init__(self, config: PPOTrainerConfig | None = None):
        self.config = config

    def on_save(
        self, trainer: Any, global_step: int, checkpoint_dir: str, async_save: bool = False, **more: Any
    ) -> None:
        """After a save; an exception ends the run, and the checkpoint stays.

        Args:
            trainer: the running `RayPPOTrainer`.
            checkpoint_dir: the folder ``global_step_N``; retention may delete it after later saves.
            async_save: it was written in the background. It is complete in either case.
            more: what later versions pass in addition.
        """


def build_checkpoint_callback(config: PPOTrainerConfig) -> Any:
    """The callback that the configuration names, made with ``config=config``; one that does nothing without a name.

    Raises:
        ConfigError: there is no such class, it has no method ``on_save``, or it cannot be made like that.
    """
    path = config.trainer.checkpoint_callback_class
    if not path:
        return CheckpointCallback(config)
    try:
        named = registry.load_object(path)
    except ConfigError as error:
        raise ConfigError(error.message, key=KEY, got=path, fix=error.fix) from error
    if not inspect.isclass(named) or not callable(getattr(named, "on_save", None)):
        fix = "Name a class with a method on_save, e.g. of verl.trainer.ppo.checkpoint_callback.CheckpointCallback."
        raise ConfigError("this is no class of checkpoint callbacks", key=KEY, got=path, fix=fix)
    try:
        inspect.signature(named).bind(config=config)
    except TypeError as error:
        fix = "Its __init__ takes the configuration as the parameter config."
        raise ConfigError(f"it cannot be made with config=...: {error}", key=KEY, got=path, fix=fix) from error
    make: Callable[..., Any] = named
    return make(config=config)


class TellSaved(Callback):
    """Calls the user's class after every complete checkpoint."""

    def __init__(self, config: PPOTrainerConfig):
        self._user = build_checkpoint_callback(config)

    def on_load(self, trainer: RunningTrainer) -> None:
        trainer.checkpoints.on_saved = partial(self._saved, trainer)

    def _saved(self, trainer: RunningTrainer, step: int, folder: Path, background: bool) -> None:
        try:
            self._user.on_save(trainer=trainer, global_step=step, checkpoint_dir=str(folder), async_save=background)
        except (Exception, SystemExit) as error:  # boundary: the user's code
            raise CheckpointError(
                f"on_save failed after step {step}: {type(error).__name__}: {error}",
                key=KEY,
                got=trainer.config.trainer.checkpoint_callback_class,
                fix=f"The checkpoint is complete: {folder}.",
            ) from error
