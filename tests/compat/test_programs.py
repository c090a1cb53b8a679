"""Programs that are `main_ppo` with other defaults: the command line wins, and upstream's words are understood."""

from __future__ import annotations

import pytest

from recipe.one_step_off_policy.main_ppo import main as of_recipe
from verl.compat.forms import programs
from verl.compat.forms.programs import ONE_STEP_OFF, with_defaults
from verl.config.loading.configuration import read_config
from verl.experimental.one_step_off_policy.main_ppo import main as of_experimental

APART = "actor_rollout_ref.hybrid_engine=False"


def of(*words: str):
    return read_config("ppo_trainer", with_defaults(ONE_STEP_OFF, words))


def test_the_defaults_are_those_of_the_schedule_and_the_command_line_wins():
    config = of()
    assert config.trainer.v1.trainer_mode == "one_step_off" and config.algorithm.rollout_correction.bypass_mode
    assert config.actor_rollout_ref.rollout.nnodes == 0, "samplers beside the trainers have no pool"
    changed = of("algorithm.rollout_correction.bypass_mode=false", "trainer.v1.trainer_mode=sync")
    assert not changed.algorithm.rollout_correction.bypass_mode and changed.trainer.v1.trainer_mode == "sync"


@pytest.mark.parametrize(("devices", "backend"), [(0, "gloo"), (8, "nccl")])
def test_samplers_apart_get_a_pool_and_a_way_for_weights(monkeypatch: pytest.MonkeyPatch, devices: int, backend: str):
    monkeypatch.setattr(programs.device, "device_count", lambda kind: devices)
    rollout = of(APART).actor_rollout_ref.rollout
    assert (rollout.nnodes, rollout.checkpoint_engine.backend) == (1, backend)
    said = of(APART, "rollout.nnodes=3", "rollout.n_gpus_per_node=2", "trainer.n_gpus_per_node=6")
    rollout = said.actor_rollout_ref.rollout
    assert (rollout.nnodes, rollout.n_gpus_per_node, said.trainer.n_gpus_per_node) == (3, 2, 6)


def test_upstreams_names_of_configurations_and_of_the_program_are_understood(capsys: pytest.CaptureFixture[str]):
    words = with_defaults((), ["--config-path=config", "--config-name=one_step_off_ppo_megatron_trainer.yaml"])
    assert words == ["--config-path=config", "--config-name=ppo_megatron_trainer.yaml"]
    assert of_experimental is of_recipe is programs.one_step_off
    with pytest.raises(SystemExit) as left:
        of_recipe(["--cfg", "job"])
    assert left.value.code == 0 and "trainer_mode: one_step_off" in capsys.readouterr().out
