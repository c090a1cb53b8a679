"""``python -m verl.trainer.main_generation key=value ...``: answers to every prompt of a file, in this process."""

from __future__ import annotations

import sys
from typing import cast

from verl.config import load_config, record_reads, replace, unread
from verl.config.loading.configuration import read_config
from verl.config.schema.generation import GenerationConfig
from verl.data.look import look_at_questions
from verl.errors import ModelError
from verl.metrics import notice
from verl.trainer.command import run_program


def run_generation(config: GenerationConfig) -> str:
    """Run a checked configuration; returns the path of the output."""
    from verl import device
    from verl.config.schema.data import ImageDataConfig
    from verl.data import processor_of, tokenizer_of
    from verl.registry import SAMPLERS
    from verl.storage import copy_to_local
    from verl.trainer import runtime
    from verl.trainer.generation import Job, generate_file, model_identity, sampling_of

    runtime.prepare_process(config.trainer.seed)
    path = copy_to_local(config.model.path, use_shm=config.model.use_shm, error=ModelError, key="model.path")
    model = replace(config.model, path=path)
    tokenizer = tokenizer_of(model)
    on = device.resolve_device(config.trainer.device)
    # The length of an answer bounds what the engine must hold; log-probs are not written.
    rollout = replace(config.rollout, calculate_log_probs=False)
    sampler = SAMPLERS.get(rollout.name).from_config(rollout, model, device=on)
    data = config.data
    processor = processor_of(model, tokenizer, data.mm_processor_kwargs)
    job = Job(
        files=data.path,
        output=data.output_path,
        num_samples=data.n_samples,
        in_flight=data.batch_size,
        sampling=sampling_of(rollout, tokenizer, rollout.response_length),
        prompt_key=data.prompt_key,
        images={} if processor is None else {name: data[name] for name in ImageDataConfig.__dataclass_fields__},
        max_prompt_length=rollout.prompt_length,
        truncation=data.truncation,
        identity={"model": model_identity(config.model.path), "engine": rollout.name},
    )
    return str(generate_file(job, sampler, tokenizer, processor))


def main(argv: list[str] | None = None) -> int:
    """Command line; a user's error is one message and exit status 2."""

    def work() -> None:
        words = sys.argv[1:] if argv is None else argv
        config = cast(GenerationConfig, load_config("generation", words, look_at_questions))
        with record_reads() as reads:
            print(run_generation(config))
        for key in unread(config, read_config("generation", []), reads):
            notice(key, "changed nothing: batch generation with this engine has no use for it")

    return run_program(work)


if __name__ == "__main__":
    sys.exit(main())
