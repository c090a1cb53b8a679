"""``skip.rollout``: the samples of selected steps are written to files, and taken from there by later runs.

A file holds all samples of one call of the sampler, before they are scored, with what they depend on: prompts, sampling
settings and the model that the run began with. What differs is an error, so a file never stands for samples that this
run would not have drawn. It does not hold the weights of its step: with another learning rate the samples of step 5
are those of another policy, which the log-probs that came with them say.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from verl import env
from verl.config import PPOTrainerConfig, to_dict
from verl.errors import ConfigError, DataError
from verl.metrics import notice
from verl.protocol import DataProto
from verl.rewards.managers.rows import EARLY
from verl.trainer.generation import model_identity

KEY, NOTE = "skip.rollout", "written_for"
OF_ROLLOUT = (
    "n", "temperature", "top_k", "top_p", "repetition_penalty", "do_sample", "ignore_eos", "seed", "prompt_length",
    "response_length", "max_model_len", "calculate_log_probs", "logprobs_mode", "multi_turn",
)  # fmt: skip
OF_DATA = ("max_prompt_length", "min_response_length", "truncation", "train_batch_size", "gen_batch_size")
"""Settings on which samples depend; the engine is not among them, since engines agree up to rounding."""
OTHER = f"Set the run's own {KEY}.dump_dir, or delete the file to sample again."


class RolloutReplay:
    """The files of one run's name.

    Args:
        folder: of the files.
        steps: whose samples are written, and taken where they are there.
        repeats: the other steps after them take theirs, too, in turn.
        settings: what samples depend on, by name.
    """

    def __init__(self, folder: Path, steps: tuple[int, ...], repeats: bool, settings: Mapping[str, Any]):
        self.folder, self.steps, self.repeats, self.settings = folder, steps, repeats, dict(settings)

    @classmethod
    def of(cls, config: PPOTrainerConfig) -> RolloutReplay | None:
        """From the configuration; None where it names no step."""
        settings = config.skip.rollout
        if not settings.steps:
            return None
        name = re.sub(r"[^\w.-]+", "_", f"{config.trainer.project_name}/{config.trainer.experiment_name}")
        folder = Path(env.expand(settings.dump_dir)) / name
        steps = tuple(sorted(set(settings.steps)))
        also = "; all other steps after them repeat these" if settings.action == "repeat" else ""
        notice(KEY, f"the samples of steps {list(steps)} are taken from {folder}, or sampled and written there{also}")
        return cls(folder, steps, settings.action == "repeat", _settings(config))

    def find(self, prompts: DataProto, step: int, number: int) -> DataProto | None:
        """The samples of these prompts from a file, or of others where they are repeated; None: they are to be sampled.

        Args:
            number: of the batch of prompts in its step, from 1.

        Raises:
            ConfigError: they were sampled with other settings, or of another model.
            DataError: of other prompts; or the file is none.
        """
        if step not in self.steps:
            return self._repeated(step, number) if self.repeats else None
        file = self._file(step, number)
        return _of_prompts(self._read(file), prompts, file) if file.is_file() else None

    def keep(self, samples: DataProto, step: int, number: int) -> None:
        """Write the samples of a step that is to be replayed; arguments as above."""
        if step not in self.steps:
            return
        columns = {name: column for name, column in samples.non_tensor_batch.items() if name != EARLY}
        note = {"step": step, "settings": self.settings}
        DataProto(samples.batch, columns, {**samples.meta_info, NOTE: note}).save_to_disk(str(self._file(step, number)))

    def _file(self, step: int, number: int) -> Path:
        return self.folder / f"step_{step}_{number}.safetensors"

    def _read(self, file: Path) -> DataProto:
        samples = DataProto.load_from_disk(str(file))
        note = samples.meta_info.pop(NOTE, None)
        if not isinstance(note, dict) or not isinstance(note.get("settings"), dict):
            raise DataError(f"this batch was not written by {KEY}", key=str(file), fix=OTHER)
        for name in sorted({*self.settings, *note["settings"]}):
            now, then = self.settings.get(name), note["settings"].get(name)
            if now != then:
                raise ConfigError(
                    f"the samples in {file} were made with {name}={then}", key=name, got=now, fix=f"Set it so. {OTHER}"
                )
        return samples

    def _repeated(self, step: int, number: int) -> DataProto | None:
        """The samples of an earlier step, as another step's: their prompts get identities of their own."""
        earlier = [past for past in self.steps if past < step and self._file(past, 1).is_file()]
        if not earlier:
            return None
        source = earlier[(step - earlier[-1] - 1) % len(earlier)]
        file = self._file(source, number)
        samples = self._read(file if file.is_file() else self._file(source, 1))
        columns = samples.non_tensor_batch
        columns["uid"] = np.array([_other_uid(uid, step, number) for uid in columns["uid"]], dtype=object)
        samples.meta_info["global_steps"] = step
        return samples


def _other_uid(uid: Any, step: int, number: int) -> str:
    return hashlib.blake2b(f"{uid}@{step}.{number}".encode(), digest_size=8).hexdigest()


def _settings(config: PPOTrainerConfig) -> dict[str, Any]:
    policy = config.actor_rollout_ref
    rollout, data = to_dict(policy.rollout), to_dict(config.data)
    return {
        "actor_rollout_ref.model.path": model_identity(str(policy.model.path)),
        **{f"actor_rollout_ref.rollout.{name}": rollout[name] for name in OF_ROLLOUT},
        "actor_rollout_ref.rollout.agent.default_agent_loop": policy.rollout.agent.default_agent_loop,
        **{f"data.{name}": data[name] for name in OF_DATA},
    }


def _of_prompts(samples: DataProto, prompts: DataProto, file: Path) -> DataProto:
    """The samples with the columns of this run's prompts, of which they must be.

    Everything that only the reward reads (ground truths, ...) may have changed.
    """
    for name in ("uid", "sample_index", "raw_prompt_ids", "raw_prompt"):
        now, then = prompts.non_tensor_batch.get(name), samples.non_tensor_batch.get(name)
        if now is None and then is None:
            continue
        wrong = [0]
        if now is not None and then is not None and len(now) == len(then):
            wrong = [row for row in range(len(now)) if _plain(now[row]) != _plain(then[row])]
        if wrong:
            raise DataError(
                f"its samples are not those of this step's prompts: {name} of row {wrong[0]} differs",
                key=str(file),
                fix=f"Did the data, its order or a seed change? {OTHER}",
            )
    samples.non_tensor_batch = {**samples.non_tensor_batch, **prompts.non_tensor_batch}
    samples.meta_info = {**samples.meta_info, **prompts.meta_info}
    return samples


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, (np.ndarray, np.generic)) else value
