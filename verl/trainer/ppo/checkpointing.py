"""What an RL run saves and continues from: the trained roles, the place in the data, the controller's own state."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from verl.checkpoint import CheckpointReader, CheckpointWriter, find_checkpoint
from verl.config import PPOTrainerConfig
from verl.errors import CheckpointError
from verl.metrics import notice
from verl.protocol import DataProto
from verl.single_controller.base import Roles
from verl.trainer import rng
from verl.trainer.ppo.context import StepContext
from verl.trainer.ppo.stages import PromptSource

SURPLUS = "surplus"


class RunCheckpoints:
    """Saves and resumes one RL run; holds the lock of its folder while it may write.

    Args:
        roles: every trainable role is saved under its name.
        source: the place in the data.
        ctx: step, KL controller and surplus samples.
    """

    def __init__(self, config: PPOTrainerConfig, roles: Roles, source: PromptSource, ctx: StepContext):
        self.config, self.roles, self.source, self.ctx = config, roles, source, ctx
        trainer = config.trainer
        self.writer: CheckpointWriter | None = None
        if trainer.save_freq > 0:
            keep = {"actor": trainer.max_actor_ckpt_to_keep, "critic": trainer.max_critic_ckpt_to_keep}
            self.writer = CheckpointWriter(trainer.default_local_dir, keep=keep)

    def save(self) -> Path:
        """Write ``global_step_<step>``; earlier checkpoints stay intact if it fails."""
        if self.writer is None:
            raise CheckpointError("saving is off", key="trainer.save_freq", fix="Set trainer.save_freq.")
        parts: dict[str, Callable[[Path], Any]] = {
            name: self._role_writer(name) for name, handle in self.roles.items() if handle.kind == "trainable"
        }
        surplus = self.ctx.pool.peek()
        if surplus is not None:
            parts[SURPLUS] = lambda folder: _save_batch(folder, surplus)
        state = {
            "step": self.ctx.step,
            "data": self.source.state_dict(),
            "kl": self.ctx.kl_controller.state_dict(),
            "rng": rng.rng_state(),
        }
        return self.writer.save(self.ctx.step, parts, trainer_state=state)

    def load(self) -> None:
        """Continue from the checkpoint that ``trainer.resume_mode`` names, if there is one."""
        trainer = self.config.trainer
        folder = find_checkpoint(trainer.default_local_dir, trainer.resume_mode, trainer.resume_from_path)
        if folder is None:
            return
        reader = CheckpointReader(folder)
        for name, handle in self.roles.items():
            if handle.kind == "trainable":
                handle.group.load_checkpoint(str(folder / name), tuple(self._contents(name)["load_contents"]))
        state = reader.trainer_state()
        self.source.load_state_dict(state["data"])
        self.ctx.kl_controller.load_state_dict(state["kl"])
        rng.set_rng_state(state["rng"])
        self.ctx.step = int(state["step"])
        if SURPLUS in reader.parts:
            self.ctx.pool.add(DataProto.load_from_disk(str(folder / SURPLUS / "batch")))
        notice("trainer.resume_mode", f"continues from {folder}")

    def close(self) -> None:
        """Release the folder."""
        if self.writer is not None:
            self.writer.close()

    def _role_writer(self, name: str) -> Callable[[Path], Mapping[str, Any]]:
        group, contents = self.roles[name].group, tuple(self._contents(name)["save_contents"])
        return lambda folder: group.save_checkpoint(str(folder), contents)[0]

    def _contents(self, name: str) -> dict[str, list[str]]:
        """``save_contents`` and ``load_contents``; a role that a recipe added is saved as the actor is."""
        section = self.config.critic if name == "critic" else self.config.actor_rollout_ref.actor
        saved = list(section.checkpoint.save_contents)
        return {"save_contents": saved, "load_contents": list(section.checkpoint.load_contents or saved)}


def _save_batch(folder: Path, batch: DataProto) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    batch.save_to_disk(str(folder / "batch"))
