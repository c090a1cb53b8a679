"""Programs that are `verl.trainer.main_ppo` with other defaults: those of upstream's asynchronous trainers.

What the command line says wins over what stands here.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence

from verl import device
from verl.trainer import main_ppo

ONE_STEP_OFF = (
    "trainer.v1.trainer_mode=one_step_off",
    # a token's old log-prob is the sampler's own, by the version that drew it
    "algorithm.rollout_correction.bypass_mode=true",
    "actor_rollout_ref.rollout.calculate_log_probs=true",
    # samplers in a pool of their own share no device with a trainer, so there is nothing to free memory for
    "actor_rollout_ref.rollout.free_cache_engine=false",
)
FULLY_ASYNC = (
    "trainer.v1.trainer_mode=fully_async",
    # a prompt at a time; a step trains on trigger_parameter_sync_step x require_batches mini-batches
    "data.gen_batch_size=1",
    "async_training.partial_rollout=true",
    *ONE_STEP_OFF[2:],
)
_CONFIG_NAME = re.compile(
    r"^(--config-name=|-cn=)?(?:one_step_off|fully_async)_(?:ppo|dapo)_((?:megatron_)?trainer(?:\.yaml)?)$"
)


def with_defaults(defaults: Sequence[str], argv: Sequence[str]) -> list[str]:
    """The words for `main_ppo`: defaults first, so that the command line's win.

    Upstream's configurations of these programs are its PPO configuration of the engine with such defaults.
    """
    words = [_CONFIG_NAME.sub(r"\1ppo_\2", word) for word in argv]
    overrides = dict(word.lstrip("+").lower().partition("=")[::2] for word in words)
    return [*defaults, *_own_pool(overrides), *words]


def _own_pool(overrides: Mapping[str, str]) -> list[str]:
    """What samplers in a pool of their own need besides: a size, and a way for weights to get there."""
    if overrides.get("actor_rollout_ref.hybrid_engine") != "false":
        return []
    backend = "nccl" if device.device_count("cuda") else "gloo"
    needs = [f"actor_rollout_ref.rollout.checkpoint_engine.backend={backend}"]
    sized = {"rollout.nnodes", "actor_rollout_ref.rollout.nnodes", "trainer.resource_pools"}
    return needs if sized & overrides.keys() else [*needs, "actor_rollout_ref.rollout.nnodes=1"]


def one_step_off(argv: Sequence[str] | None = None) -> int:
    """`verl.experimental.one_step_off_policy.main_ppo`; the exit status is that of `verl.trainer.main_ppo`."""
    return main_ppo.main(with_defaults(ONE_STEP_OFF, sys.argv[1:] if argv is None else argv))


def fully_async(argv: Sequence[str] | None = None) -> int:
    """`verl.experimental.fully_async_policy.fully_async_main`; the exit status is that of `verl.trainer.main_ppo`."""
    return main_ppo.main(with_defaults(FULLY_ASYNC, sys.argv[1:] if argv is None else argv))
