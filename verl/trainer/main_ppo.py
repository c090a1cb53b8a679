"""``python -m verl.trainer.main_ppo key=value ...``: PPO, GRPO and every other critic-based or critic-free method."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import cast

from verl.config import PPOTrainerConfig, load_config, save_config
from verl.errors import VerlError


class TaskRunner:
    """Builds a trainer from a configuration and runs it; subclass it to swap the trainer or a worker class."""

    def run(self, config: PPOTrainerConfig) -> None:
        """The whole run, in this process."""
        from verl.data import hf_processor, hf_tokenizer

        model = config.actor_rollout_ref.model
        tokenizer = hf_tokenizer(
            config.data.tokenizer or model.tokenizer_path or model.path,
            trust_remote_code=model.trust_remote_code or config.data.trust_remote_code,
            custom_chat_template=model.custom_chat_template,
        )
        processor = hf_processor(model.path, trust_remote_code=model.trust_remote_code)
        trainer = self.make_trainer(config, tokenizer, processor)
        trainer.init_workers()
        trainer.fit()

    def make_trainer(self, config: PPOTrainerConfig, tokenizer: object, processor: object):
        """The trainer with its worker classes and resource pools."""
        from verl.trainer import build
        from verl.trainer.ppo.ray_trainer import RayPPOTrainer

        return RayPPOTrainer(
            config=config,
            tokenizer=tokenizer,
            processor=processor,
            role_worker_mapping=build.role_worker_mapping(config),
            resource_pool_manager=build.resource_pools(config),
        )


def run_ppo(config: PPOTrainerConfig, task_runner_class: type[TaskRunner] | None = None) -> None:
    """Run a checked configuration; the resolved one is written beside the run's results."""
    from verl.trainer import build, runtime

    runtime.start(config.trainer.seed, config.trainer.runtime, config.trainer.nnodes * build.processes_per_node(config))
    save_config(config, Path(config.trainer.default_local_dir) / "config.yaml")
    (task_runner_class or TaskRunner)().run(config)


def main(argv: list[str] | None = None) -> int:
    """Command line; an error that is the user's to mend is one message and exit status 2."""
    try:
        config = load_config("ppo_trainer", sys.argv[1:] if argv is None else argv)
        run_ppo(cast(PPOTrainerConfig, config))
    except VerlError as error:
        print(f"error: {error}", file=sys.stderr)
        if error.__cause__ is not None:
            print(f"  caused by {type(error.__cause__).__name__}: {error.__cause__}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
