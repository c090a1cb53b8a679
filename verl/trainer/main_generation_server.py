"""``python -m verl.trainer.main_generation_server key=value ... +data.output_path=out.parquet``.

Batch generation with the keys of `main_ppo`, over stand-alone servers that are started for it (or over those of
``rollout.server.url``). Each is `verl.rollout.server.host` in a separate process; one that dies is noticed and its
prompts go to another. ``data.train_files`` are the prompts, ``rollout.n`` the answers to each.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import cast

from verl.config import PPOTrainerConfig, load_config, replace
from verl.config.machine.pools import spec_of
from verl.config.rules.checks import missing_folder
from verl.errors import ConfigError, ModelError
from verl.trainer.command import run_program

OUTPUT = "data.output_path"
IN_FLIGHT = 128


def run_generation_server(config: PPOTrainerConfig, output: str, argv: list[str]) -> str:
    """Run a checked configuration; returns the path of the output.

    Args:
        argv: the command line that the configuration came from, which the servers get too.
    """
    from verl import device
    from verl.agent_loop.served import served
    from verl.config.schema.data import ImageDataConfig
    from verl.data import processor_of, tokenizer_of
    from verl.storage import copy_to_local
    from verl.trainer import runtime
    from verl.trainer.generation import Job, generate_file, model_identity, sampling_of

    runtime.prepare_process(config.trainer.seed)
    policy = config.actor_rollout_ref
    path = copy_to_local(
        policy.model.path, use_shm=policy.model.use_shm, error=ModelError, key="actor_rollout_ref.model.path"
    )
    model, rollout = replace(policy.model, path=path), replace(policy.rollout, calculate_log_probs=False)
    tokenizer, data = tokenizer_of(model), config.data
    processor = processor_of(model, tokenizer, data.mm_processor_kwargs)
    job = Job(
        files=data.train_files,
        output=output,
        num_samples=rollout.n,
        in_flight=IN_FLIGHT,
        sampling=sampling_of(rollout, tokenizer, data.max_response_length),
        prompt_key=data.prompt_key,
        max_prompt_length=data.max_prompt_length,
        images={} if processor is None else {name: data[name] for name in ImageDataConfig.__dataclass_fields__},
        files_key="data.train_files",
        length_key="data.max_prompt_length",
        truncation=data.truncation,
        identity={"model": model_identity(policy.model.path), "engine": rollout.name},
    )
    on = device.resolve_device(config.trainer.device)
    with served(rollout, model, count_of(config), on, argv) as sampler:
        return str(generate_file(job, sampler, tokenizer, processor))


def count_of(config: PPOTrainerConfig) -> int:
    """How many servers: one per ``rollout.tensor_model_parallel_size`` x ``pipeline_model_parallel_size`` processes."""
    processes = config.trainer.nnodes * (config.trainer.n_gpus_per_node or 1)
    return processes // spec_of(config.actor_rollout_ref.rollout).devices


def split_output(argv: list[str]) -> tuple[str, list[str]]:
    """The output path, which the configuration of training does not have, and the rest of the command line.

    Raises:
        ConfigError: it is missing, or its folder does not exist.
    """
    from verl import env

    output, rest = "", []
    for word in argv:
        key, equals, value = word.lstrip("+").partition("=")
        if key == OUTPUT and equals:
            output = value
        else:
            rest.append(word)
    if not output.endswith(".parquet"):
        fix = f"Add +{OUTPUT}=answers.parquet."
        raise ConfigError("names the parquet file to write", key=OUTPUT, got=output or None, fix=fix)
    path = env.expand(output)
    for problem in missing_folder(OUTPUT, str(Path(path).parent)):  # before servers are started for it
        raise problem
    return path, rest


def with_lengths(argv: list[str]) -> list[str]:
    """The lengths of the rollout as those of the data, where these are not given: here both mean the same."""
    keys = {word.lstrip("+").partition("=")[0]: word.partition("=")[2] for word in argv}
    pairs = [(f"actor_rollout_ref.rollout.{kind}_length", f"data.max_{kind}_length") for kind in ("prompt", "response")]
    return [*argv, *(f"{ours}={keys[theirs]}" for theirs, ours in pairs if theirs in keys and ours not in keys)]


def main(argv: list[str] | None = None) -> int:
    """Command line; a user's error is one message and exit status 2."""

    def work() -> None:
        output, rest = split_output(with_lengths(sys.argv[1:] if argv is None else argv))
        config = cast(PPOTrainerConfig, load_config("ppo_trainer", rest, served=True))
        print(run_generation_server(config, output, rest))

    return run_program(work)


if __name__ == "__main__":
    sys.exit(main())
