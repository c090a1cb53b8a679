"""Short help: the commands, and of each program the settings that matter; everything else by ``--help-all``."""

from __future__ import annotations

COMMANDS = {
    "train METHOD": "reinforcement learning: grpo (default), ppo, dapo, rloo, ...",
    "sft": "supervised fine-tuning on conversations",
    "dpo": "preference training on chosen and rejected answers",
    "rm": "a reward model, from the same pairs",
    "resume FOLDER": "go on with a run, bit for bit",
    "generate": "answers of a model to a file of prompts",
    "eval": "scores of such answers: pass@k, majority, intervals",
    "plots RUN ...": "draw the curves of runs",
    "view RUN ...": "look at runs in a browser: curves, groups, samples, tokens",
    "data FILE": "look at a data file: columns, lengths, first rows",
    "doctor": "versions, devices, and what is missing",
    "completion SHELL": "print a completion script for bash, zsh or fish",
}
FLAGS = {
    "--config FILE.yaml": "settings of a file; the command line wins over it",
    "--preset NAME": "settings of a known setup: quickstart, gsm8k-0.5b, 8xH100-7b",
    "--dry-run": "check everything and say where it would run; nothing starts",
    "--cfg job": "print every setting as it would be",
    "--help, --help-all [WORD]": "these settings; all of them, or those with a word in them",
}
_ACTOR, _ROLLOUT, _MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
_SUPERVISED = (
    "model.path", "data.train_files", "data.val_files", "data.max_length", "data.train_batch_size", "optim.lr",
    "optim.lr_scheduler_type", "model.lora_rank", "engine.dtype", "engine.strategy", "trainer.total_epochs",
    "trainer.total_training_steps", "trainer.test_freq", "trainer.save_freq", "trainer.default_local_dir",
    "trainer.resume_mode", "trainer.logger", "trainer.device", "trainer.seed",
)  # fmt: skip
SETTINGS = {
    "ppo_trainer": (
        f"{_MODEL}.path", "data.train_files", "data.val_files", "reward.custom_reward_function.path",
        "data.max_prompt_length", "data.max_response_length", "data.train_batch_size",
        f"{_ACTOR}.ppo_mini_batch_size", f"{_ACTOR}.optim.lr", f"{_ACTOR}.use_kl_loss", f"{_MODEL}.lora_rank",
        f"{_ROLLOUT}.n", f"{_ROLLOUT}.temperature", f"{_ROLLOUT}.name", "trainer.n_gpus_per_node", "trainer.nnodes",
        "trainer.total_epochs", "trainer.test_freq", "trainer.save_freq", "trainer.default_local_dir",
    ),
    "sft_trainer": _SUPERVISED,
    "dpo_trainer": ("dpo.beta", *_SUPERVISED),
    "rm_trainer": ("rm.centering", *_SUPERVISED),
    "generation": (
        "model.path", "data.path", "data.prompt_key", "data.output_path", "data.n_samples", "rollout.name",
        "rollout.temperature", "rollout.top_k", "rollout.top_p", "rollout.prompt_length", "rollout.response_length",
        "trainer.device", "trainer.seed",
    ),
    "evaluation": (
        "data.path", "data.response_key", "custom_reward_function.path", "report.right_from", "report.compare",
        "report.markdown", "report.json", "report.samples", "report.timeout",
    ),
}  # fmt: skip
"""The settings that a person looks for first, by program."""
MANUAL = """\
Every setting: docs/reference/configuration.md, and configuration_more.md for supervised runs.
Settings are key=value, lists key=[a,b]."""


def overview() -> str:
    """``verl --help``."""
    lines = ["verl COMMAND [key=value ...]", "", *_table(COMMANDS), "", "Flags of train, sft, dpo and rm:"]
    lines += [*_table(FLAGS), "", "verl COMMAND --help names its settings.", "", "Example:"]
    lines += ["  verl train grpo --preset quickstart actor_rollout_ref.model.path=MODEL data.train_files=prompts.jsonl"]
    return "\n".join(lines)


def command_line(command: str) -> str:
    """The line of the overview that says what a command does."""
    return next(f"verl {name}: {meaning}" for name, meaning in COMMANDS.items() if name.split()[0] == command)


def program_help(command: str, configuration: str) -> str:
    """``verl train grpo --help`` and its siblings: at most 60 lines."""
    from verl.api.methods import BY_REWARD
    from verl.config.loading.groups import line, program_of
    from verl.config.schema.node import schema_of

    leaves = schema_of(program_of(configuration)[0].root).leaves
    is_method = command in BY_REWARD
    shown = {"reward_model": "rm"}.get(command, f"train {command}" if is_method else command)
    lines = [f"verl {shown} [key=value ...]", ""]
    if is_method:
        lines += ["Methods:", *_table({name: method.meaning for name, method in BY_REWARD.items()}), ""]
        lines += [f"{command} means {' '.join(BY_REWARD[command].defaults)}", ""]
    lines += [*(line(leaves[key]) for key in SETTINGS[configuration]), "", *_table(FLAGS), "", MANUAL]
    return "\n".join(lines)


def all_settings(configuration: str, search: str) -> str:
    """``--help-all``: every setting, or those in whose name or meaning a word stands."""
    from verl.config.loading.groups import line, program_of, usage
    from verl.config.schema.node import schema_of
    from verl.errors import suggest

    program = program_of(configuration)[0]
    if not search:
        return usage(program)
    leaves = schema_of(program.root).leaves
    matches = [leaf for leaf in leaves.values() if search.lower() in f"{leaf.key} {leaf.meaning}".lower()]
    if matches:
        return "\n".join(map(line, matches))
    near = suggest(search, {key.rpartition(".")[2]: None for key in leaves})
    return f"No setting has the word {search!r}. {near}".strip()


def _table(rows: dict[str, str]) -> list[str]:
    width = max(map(len, rows))
    return [f"  {name:<{width}}  {meaning}" for name, meaning in rows.items()]
