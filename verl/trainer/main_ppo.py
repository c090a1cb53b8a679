"""``python -m verl.trainer.main_ppo key=value ...``: PPO, GRPO and every other critic-based or critic-free method."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, cast

from verl.config import PPOTrainerConfig, load_config, replace
from verl.data.look import look_at_prompts
from verl.trainer.command import run_program

if TYPE_CHECKING:
    from verl.trainer.placement import Place


class TaskRunner:
    """Builds a trainer from a configuration and runs it; subclass it to swap the trainer or a worker class.

    ``place`` says where workers live; `run_ppo` sets it before `run`. None is this process.
    """

    place: Place | None = None

    def run(self, config: PPOTrainerConfig) -> None:
        """The whole run, with this process as its controller."""
        from verl.data import hf_tokenizer, processor_of, tokenizer_of

        model = config.actor_rollout_ref.model
        tokenizer_path, trusted = config.data.tokenizer, model.trust_remote_code or config.data.trust_remote_code
        if tokenizer_path:
            template = model.custom_chat_template
            tokenizer = hf_tokenizer(
                tokenizer_path, key="data.tokenizer", trust_remote_code=trusted, custom_chat_template=template
            )
        else:
            tokenizer = tokenizer_of(replace(model, trust_remote_code=trusted))
        processor = processor_of(model, tokenizer, config.data.mm_processor_kwargs)
        trainer = self.make_trainer(config, tokenizer, processor)
        trainer.init_workers()
        trainer.fit()

    def make_trainer(self, config: PPOTrainerConfig, tokenizer: object, processor: object):
        """The trainer with its worker classes and resource pools."""
        from verl.trainer import placement
        from verl.trainer.ppo.ray_trainer import RayPPOTrainer

        place = self.place or placement.Place()
        return RayPPOTrainer(
            config=config,
            tokenizer=tokenizer,
            processor=processor,
            role_worker_mapping=placement.role_worker_mapping(config),
            resource_pool_manager=placement.resource_pools(config, self.place),
            ray_worker_group_cls=place.group_class,
            device_name=place.device if self.place else None,
        )


def _attempts(config: PPOTrainerConfig) -> AbstractContextManager[int]:
    from verl.trainer.restarts import begin_attempts

    return begin_attempts(Path(config.trainer.default_local_dir), config.trainer.max_restarts)


def run_ppo(config: PPOTrainerConfig, task_runner_class: type[TaskRunner] | None = None) -> None:
    """Run a checked configuration; the resolved one is written next to the run's results when it begins.

    With ``trainer.max_restarts`` it is a fork of this process that returns from here.
    """
    report = _attempts(config) if config.trainer.max_restarts else nullcontext(1)
    with report as attempt:
        from verl.trainer import runtime

        with runtime.run_place(config, is_restart=attempt > 1) as (config, place):
            runtime.check_run_folders(config)
            runner = (task_runner_class or TaskRunner)()
            runner.place = place
            runner.run(config)


def main(argv: list[str] | None = None, defaults: Iterable[str] = ()) -> int:
    """Command line; a user's error is one message and exit status 2.

    Args:
        argv: None: this process's.
        defaults: settings of a recipe, ``a.b=c``; files and the command line win over them.
    """
    words = sys.argv[1:] if argv is None else argv

    def start() -> None:
        run_ppo(cast(PPOTrainerConfig, load_config("ppo_trainer", words, look_at_prompts, defaults=defaults)))

    return run_program(start)


if __name__ == "__main__":
    sys.exit(main())
