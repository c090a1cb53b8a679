"""Rules about rows and the processes that compute them: into how many parts a batch is cut, and how long a row may be.

Processes of one copy of a Megatron model, and peers that share sequences, compute the same rows. A
token budget is what one process computes: peers that share their sequences have the sum of theirs for a row.
"""

from __future__ import annotations

from verl.config.machine.topology import backend_of, sizes_of
from verl.config.rules.checks import Problems
from verl.config.rules.validate_megatron import MegatronRole, role_of_supervised, roles
from verl.config.schema.root import PPOTrainerConfig, uses_critic, uses_reference
from verl.config.schema.sft import DPOTrainerConfig, RMTrainerConfig, SFTTrainerConfig
from verl.errors import ConfigError

_A, _R, _REF = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.ref"
_ULYSSES = "ulysses_sequence_parallel_size"
_SHARED = {_ULYSSES: "sequences", "expert_parallel_size": "experts"}
_COUNT = "Change it, or the number of processes (trainer.nnodes, trainer.n_gpus_per_node, trainer.resource_pools)."


def problems(cfg: PPOTrainerConfig) -> Problems:
    """Of an RL run: groups of processes, mini-batches, token budgets."""
    by_section = {role.key: role for role in roles(cfg) if role.processes >= 1}
    return [p for role in by_section.values() for p in _groups(role)] or _parts(cfg, by_section) + _budgets(
        cfg, by_section
    )


def sft_problems(cfg: SFTTrainerConfig) -> Problems:
    """Groups of processes and the budget of a supervised run."""
    data, uneven = cfg.data, _started(role_of_supervised(cfg))
    if uneven or not data.use_dynamic_bsz:
        return uneven
    key, factor = "data.max_token_len_per_gpu", sequence_ranks(role_of_supervised(cfg))
    return _fits(key, data.max_token_len_per_gpu, data.max_length, "data.max_length", factor)


def pair_problems(cfg: DPOTrainerConfig | RMTrainerConfig) -> Problems:
    """The same for pairs of answers, which share a micro-batch."""
    data, uneven = cfg.data, _started(role_of_supervised(cfg))
    if uneven or not data.use_dynamic_bsz:
        return uneven
    key, factor = "data.max_token_len_per_gpu", sequence_ranks(role_of_supervised(cfg))
    return _fits(key, data.max_token_len_per_gpu, 2 * data.max_length, "two rows of data.max_length", factor)


def parts_of(role: MegatronRole) -> int:
    """Into how many parts a batch is cut for a role; its processes divide into groups."""
    backend = backend_of(role.section.strategy, role.processes)
    titan = role.section.torchtitan if "torchtitan" in role.section else None
    return sizes_of(backend, role.others[1], role.sizes, role.processes, titan).data


def sequence_ranks(role: MegatronRole) -> int:
    """How many processes a row is shared among."""
    if role.section.strategy == "torchtitan":
        return max(1, role.section.torchtitan.context_parallel_size)
    return max(1, role.sizes.context_parallel_size if role.is_megatron else role.others[1][_ULYSSES])


def _groups(role: MegatronRole) -> Problems:
    """Peers that share something divide the processes, and a model that is trained whole has one."""
    if role.has_own_sizes:
        return []
    if role.section.strategy == "plain" and role.processes > 1 and role.key in (_A, "critic"):
        message = f"the plain engine trains in one process, and the pool has {role.processes}"
        fix = "Leave it out, or set it to fsdp2."
        return [ConfigError(message, key=f"{role.key}.strategy", got="plain", allowed="fsdp2, megatron", fix=fix)]
    key, engine = role.others
    for name, what in _SHARED.items():
        size = engine[name]
        if size < 1 or (role.processes % size == 0 and (size == 1 or role.section.strategy != "plain")):
            continue
        if role.processes == 1 or role.section.strategy == "plain":
            message, allowed = f"one process cannot share its {what} with others", [1]
            fix = "Run several processes with strategy=fsdp2, or leave it out."
        else:
            message = f"{role.processes} processes do not divide into groups of {size} that share their {what}"
            allowed = [n for n in range(1, role.processes + 1) if role.processes % n == 0]
            fix = _COUNT if role.pool else f"Change it, or {role.started}."
        return [ConfigError(message, key=f"{key}.{name}", got=size, allowed=allowed, fix=fix)]
    return []


def _started(role: MegatronRole) -> Problems:
    """The same where torchrun has started several processes; of one alone the engine says it when it is made."""
    return _groups(role) if role.processes > 1 else []


def _parts(cfg: PPOTrainerConfig, by_section: dict[str, MegatronRole]) -> Problems:
    """Every optimizer step, and every pass over the batch, gives each part as many samples."""
    batch = cfg.data.train_batch_size
    sizes = [(_A, f"{_A}.ppo_mini_batch_size", cfg.actor_rollout_ref.actor.ppo_mini_batch_size)]
    if uses_critic(cfg):
        sizes.append(("critic", "critic.ppo_mini_batch_size", cfg.critic.ppo_mini_batch_size))
    if uses_reference(cfg):
        sizes.append((_REF, "data.train_batch_size", batch))
    problems: Problems = []
    for section, key, prompts in sizes:
        role = by_section.get(section)
        if role is None or prompts < 1:
            continue
        samples, parts = prompts * cfg.actor_rollout_ref.rollout.n, parts_of(role)
        if samples % parts:
            problems.append(_uneven(key, prompts, samples, role, parts))
    return problems


def _uneven(key: str, prompts: int, samples: int, role: MegatronRole, parts: int) -> ConfigError:
    among = f"{parts} processes"
    if parts < role.processes:
        among = f"{parts} groups, of {role.processes // parts} processes each that compute the same rows"
    message = f"{prompts} prompts x {_R}.n = {samples} samples cannot be shared evenly by {among}"
    return ConfigError(message, key=key, got=prompts, fix=_COUNT)


def _budgets(cfg: PPOTrainerConfig, by_section: dict[str, MegatronRole]) -> Problems:
    a, needed = cfg.actor_rollout_ref, cfg.data.max_prompt_length + cfg.data.max_response_length
    passes = [
        (_A, f"{_A}.ppo_max_token_len_per_gpu", a.actor.use_dynamic_bsz, a.actor.ppo_max_token_len_per_gpu),
        (_A, f"{_R}.log_prob_max_token_len_per_gpu", a.rollout.log_prob_use_dynamic_bsz,
         a.rollout.log_prob_max_token_len_per_gpu),
        (_REF, f"{_REF}.log_prob_max_token_len_per_gpu", a.ref.log_prob_use_dynamic_bsz,
         a.ref.log_prob_max_token_len_per_gpu),
    ]  # fmt: skip
    if uses_critic(cfg):
        names = ("ppo_max_token_len_per_gpu", "forward_max_token_len_per_gpu")
        passes += [("critic", f"critic.{name}", cfg.critic.use_dynamic_bsz, cfg.critic[name]) for name in names]
    what = "data.max_prompt_length + data.max_response_length"
    model = cfg.reward.reward_model
    problems = [
        problem
        for section, key, is_on, budget in passes
        if is_on and section in by_section
        for problem in _fits(key, budget, needed, what, sequence_ranks(by_section[section]))
    ]
    if model.enable and model.use_dynamic_bsz and "reward.reward_model" in by_section:
        longest = ("reward.reward_model.max_length", model.max_length) if model.max_length else (what, needed)
        key, budget = "reward.reward_model.forward_max_token_len_per_gpu", model.forward_max_token_len_per_gpu
        problems += _fits(key, budget, longest[1], longest[0], sequence_ranks(by_section["reward.reward_model"]))
    return problems


def _fits(key: str, budget: int | None, needed: int, what: str, factor: int) -> Problems:
    """A row has the budgets of all processes that share it; without one it always fits."""
    if budget is None or budget * factor >= needed:
        return []
    least, shared = -(-needed // factor), f" of {factor} processes that share it" if factor > 1 else ""
    message = f"one row may have {what} = {needed} tokens, which do not fit into a micro-batch{shared}"
    return [ConfigError(message, key=key, got=budget, allowed=f"{least} or more", fix=f"Set {key}={least}.")]
