"""Where the KL over the full vocabulary (``full``) can be computed: two models' logits meet on one worker.

The reference runs inside the actor's passes: it must be colocated with the actor, and neither may cut its vocabulary or
its rows over ranks.
"""

from __future__ import annotations

from verl.config.machine.pools import Pools
from verl.config.rules.checks import Problems
from verl.config.schema.engine import FSDPEngineConfig
from verl.config.schema.root import PPOTrainerConfig, kl_kinds
from verl.errors import ConfigError, NotBuiltError

_A = "actor_rollout_ref"
_INSTEAD = "Or take low_var_kl, an estimate of the same KL from the sampled tokens."


def problems(cfg: PPOTrainerConfig) -> Problems:
    """What stands in the way of an exact KL, one problem for each setting; none where no KL is ``full``."""
    keys = [key for key, kind in kl_kinds(cfg).items() if kind == "full"]
    if not keys:
        return []
    problems = [*_layout(cfg, keys[0]), *_placement(cfg, keys[0])]
    bypass = "algorithm.rollout_correction.bypass_mode"
    if "algorithm.kl_penalty" in keys and cfg.algorithm.rollout_correction.bypass_mode:
        why = "the bypass mode has of the old policy only what the sampler tells of the sampled tokens"
        problems.append(ConfigError(why, key="algorithm.kl_penalty", got="full", fix=f"Set {bypass}=false. {_INSTEAD}"))
    return problems


def _layout(cfg: PPOTrainerConfig, key: str) -> Problems:
    policy, problems = cfg.actor_rollout_ref, []
    if policy.model.use_fused_kernels:
        problems.append(_refused(key, "the fused head never has the logits", f"{_A}.model.use_fused_kernels=false"))
    roles = {
        "actor": (policy.actor.strategy, policy.actor.fsdp_config),
        "ref": (policy.ref.strategy, policy.ref.fsdp_config),
    }
    for role, (strategy, engine) in roles.items():
        if strategy == "megatron":
            why = "Megatron-Core's engine shards the vocabulary over its ranks"
            problems.append(_refused(key, why, f"{_A}.{role}.strategy=fsdp2"))
        elif strategy == "torchtitan":
            why = "it was not tried on TorchTitan's models"
            problems.append(_refused(key, why, f"{_A}.{role}.strategy=fsdp2"))
        else:
            problems += _shared_rows(key, f"{_A}.{role}.fsdp_config", engine)
    return problems


def _shared_rows(key: str, section: str, engine: FSDPEngineConfig) -> Problems:
    name = "ulysses_sequence_parallel_size"
    return [_refused(key, "several ranks share a row", f"{section}.{name}=1")] if engine[name] > 1 else []


def _placement(cfg: PPOTrainerConfig, key: str) -> Problems:
    pools = Pools.of(cfg)
    actor, ref = pools.of_role("actor"), pools.of_role("ref")
    if actor == ref:
        return []
    why = f"the reference policy lives apart from the actor, in the pool {ref.name!r}"
    return [_refused(key, why, "trainer.resource_pools without ref")]


def _refused(key: str, why: str, instead: str) -> ConfigError:
    return NotBuiltError(
        f"the exact KL needs the logits of both models on one worker, and {why}",
        key=key,
        got="full",
        fix=f"Set {instead}. {_INSTEAD}",
    )
