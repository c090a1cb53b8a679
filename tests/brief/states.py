"""What has become of a row: its configurations are read, its modules and names looked for."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass
from typing import Any

from tests.brief.machine import resolve
from tests.brief.small import swapped
from tests.brief.table import Attempt, Row
from tests.sanity.public_names import fault
from verl.errors import ConfigError, NotBuiltError
from verl.metrics import notices

WORKS, REFUSED, WRONG, IDLE = "works", "refused by name", "an error on purpose", "without effect"


@dataclass(frozen=True)
class Outcome:
    """What a command, module or name comes to; ``by`` names settings that refuse it or do nothing."""

    what: str
    state: str
    by: tuple[str, ...] = ()
    error: ConfigError | None = None


def of_attempt(attempt: Attempt) -> Outcome:
    """Read one configuration; any error but a missing feature, or one that is meant, is the caller's."""
    what = attempt.argv if not attempt.yaml else f"{attempt.argv} (a file)"
    what = " ".join(what.split())
    try:
        resolve(attempt)
    except NotBuiltError as error:
        return Outcome(what, REFUSED, refusing(error), error)
    except ConfigError as error:
        if not attempt.wrong:
            raise
        return Outcome(what, WRONG, error=error)
    idle = tuple(key for key, said in notices().items() if "has no effect" in said and key not in attempt.notices)
    return Outcome(what, IDLE, idle) if idle else Outcome(what, WORKS)


def refusing(error: NotBuiltError) -> tuple[str, ...]:
    """The settings that an error names; one that lists several problems has a line for each."""
    lines = str(error).splitlines()
    keys = [re.match(r"\s*[-*]?\s*([\w.+]+): ", line) for line in (lines[1:] if len(lines) > 1 else lines)]
    return tuple(dict.fromkeys(key.group(1) for key in keys if key))


def of_program(module: str) -> Outcome:
    """Whether a module that is run with ``python -m`` exists."""
    try:
        there = importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        there = False
    return Outcome(f"python -m {module}", WORKS if there else REFUSED)


def of_name(name: str) -> Outcome:
    """Whether a public name can be imported."""
    return Outcome(name, WORKS if fault(name, None) is None else REFUSED)


def outcomes(row: Row) -> list[Outcome]:
    """Everything of a row that can work or not."""
    found = [of_attempt(attempt) for attempt in row.config]
    return found + [of_program(module) for module in row.programs] + [of_name(name) for name in row.names]


def state(found: list[Outcome]) -> str:
    """One word for a row."""
    states = {outcome.state for outcome in found if outcome.state != WRONG}
    if not found:
        return "said or shipped"
    if not states:
        return WRONG
    return "partly" if len(states) > 1 else states.pop()


@dataclass(frozen=True)
class Trained:
    """Whether the commands of a row were started and trained here as printed but for sizes; where not, why."""

    word: str
    why: tuple[str, ...] = ()


SAME, OTHERWISE, NOTHING = "yes", "no", "-"
SIZES = "yes: with smaller sizes, own files and one step"


def trained(row: Row) -> Trained:
    """Of a row whose commands are read on the guides' machine; only what a test runs as printed counts."""
    able = [attempt for attempt in row.config if not attempt.wrong and of_attempt(attempt).state in (WORKS, IDLE)]
    if row.instead:
        return Trained(OTHERWISE, (row.instead,))
    if not able:
        return Trained(NOTHING)
    left = [attempt for attempt in able if not is_trained(attempt)]
    if not left:
        return Trained(SAME)
    some = [f"{len(able) - len(left)} of {len(able)} commands"] if len(left) < len(able) else []
    return Trained(OTHERWISE, tuple(dict.fromkeys([*some, *map(not_started, left)])))


def is_trained(attempt: Attempt) -> bool:
    """Whether a test trains this command with the engine, the sampler and the processes that it prints."""
    return attempt.ranks or (attempt.runs and not swapped(attempt))


def not_started(attempt: Attempt) -> str:
    """Why no test starts a command as it is printed."""
    if attempt.program not in ("ppo_trainer", "sft_trainer"):
        return "other tests run this program"
    printed: Any = resolve(attempt)
    if attempt.program == "sft_trainer":
        return "not run"
    rollout, actor = printed.actor_rollout_ref.rollout, printed.actor_rollout_ref.actor
    processes = printed.trainer.nnodes * (printed.trainer.n_gpus_per_node or 1)
    if rollout.quantization == "fp8" and rollout.name != "hf":
        return f"{rollout.quantization} needs a GPU"
    if rollout.name == "vllm":
        size = processes if processes > 1 else rollout.tensor_model_parallel_size
        return (
            f"vLLM on {size} {'device' if size == 1 else 'devices'}; `make test-vllm` has it in 1 and 2 CPU processes"
        )
    if rollout.name == "sglang":
        return "no SGLang server was ever run"
    if rollout.name == "server":
        return "needs a server that runs"
    if actor.strategy == "megatron":
        return "Megatron-Core needs CUDA; tests answer its CUDA calls by a shim"
    attention = str(printed.actor_rollout_ref.model.override_config.get("attn_implementation"))
    if attention.startswith("flash"):
        return f"{attention} needs a GPU"
    if printed.actor_rollout_ref.model.use_liger:
        return "Liger's kernels need a GPU"
    return "not run" if processes == 1 else f"{processes} processes, not run"
