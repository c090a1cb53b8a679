"""Rules that compare the sections of an RL run, and rules about rows and the processes that compute them.

Processes of one copy of a Megatron model, and peers that share sequences, compute the same rows. A token budget is what
one process computes: peers that share their sequences have the sum of theirs for a row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from verl import registry
from verl.config.machine.pools import EngineRole, role_of_supervised, roles
from verl.config.machine.topology import backend_of, sizes_of
from verl.config.rules.checks import NOTICE, Problems, Rule, divisors_of, set_names, tell_names, value_at
from verl.config.schema.node import ConfigNode, changed_names
from verl.config.schema.root import (
    PPOTrainerConfig,
    learns_from_pairs,
    learns_from_teachers_alone,
    of_estimator,
    of_schedule,
    skips_old_log_prob,
    uses_critic,
    uses_reference,
)
from verl.errors import ConfigError
from verl.metrics import notice

if TYPE_CHECKING:
    from verl.config.schema.sft import SupervisedConfig

_A, _R, _REF = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.ref"
_ULYSSES = "ulysses_sequence_parallel_size"
_SHARED = {_ULYSSES: "sequences", "expert_parallel_size": "experts"}
_CHANGE = "Change it, or the number of processes (trainer.nnodes, trainer.n_gpus_per_node, trainer.resource_pools)."


def row_problems(cfg: PPOTrainerConfig) -> Problems:
    """Of an RL run: groups of processes, mini-batches, token budgets."""
    by_section = {role.key: role for role in roles(cfg) if role.processes >= 1}
    return [p for role in by_section.values() for p in _groups(role)] or _parts(cfg, by_section) + _budgets(
        cfg, by_section
    )


def sft_row_problems(cfg: SupervisedConfig) -> Problems:
    """Groups of processes and the budget of a supervised run; the two rows of a pair share a micro-batch."""
    data, role = cfg.data, role_of_supervised(cfg)
    problems = _started(role)
    if problems or not data.use_dynamic_bsz:
        return problems
    count, what = (2, "two rows of data.max_length") if "chosen_key" in data else (1, "data.max_length")
    budget, factor = data.max_token_len_per_gpu, sequence_ranks(role)
    return _fits("data.max_token_len_per_gpu", budget, count * data.max_length, what, factor)


def parts_of(role: EngineRole) -> int:
    """Into how many parts a batch is cut for a role; its processes divide into groups."""
    backend = backend_of(role.section.strategy, role.processes)
    titan = role.section.torchtitan if "torchtitan" in role.section else None
    return sizes_of(backend, role.others[1], role.sizes, role.processes, titan).data


def sequence_ranks(role: EngineRole) -> int:
    """How many processes a row is shared among."""
    if role.section.strategy == "torchtitan":
        return max(1, role.section.torchtitan.context_parallel_size)
    return max(1, role.sizes.context_parallel_size if role.is_megatron else role.others[1][_ULYSSES])


def _groups(role: EngineRole) -> Problems:
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
            allowed = divisors_of(role.processes)
            fix = _CHANGE if role.pool else f"Change it, or {role.started}."
        return [ConfigError(message, key=f"{key}.{name}", got=size, allowed=allowed, fix=fix)]
    return []


def _started(role: EngineRole) -> Problems:
    """The same where torchrun has started several processes; of one alone the engine says it when it is made."""
    return _groups(role) if role.processes > 1 else []


def _parts(cfg: PPOTrainerConfig, by_section: dict[str, EngineRole]) -> Problems:
    """Every optimizer step gives each part as many rows; where samples do not divide, masked ones fill up the parts."""
    sizes = [(_A, f"{_A}.ppo_mini_batch_size", cfg.actor_rollout_ref.actor.ppo_mini_batch_size)]
    if uses_critic(cfg):
        sizes.append(("critic", "critic.ppo_mini_batch_size", cfg.critic.ppo_mini_batch_size))
    problems: Problems = []
    for section, key, prompts in sizes:
        role = by_section.get(section)
        if role is not None and prompts > 0:
            problems += _shares(cfg, key, prompts, role)
    return problems


def _shares(cfg: PPOTrainerConfig, key: str, prompts: int, role: EngineRole) -> Problems:
    """A notice of rows that fill up, or an error where they would count."""
    parts, pairs, n = parts_of(role), learns_from_pairs(cfg), cfg.actor_rollout_ref.rollout.n
    count, what = (
        (prompts, f"{prompts} pairs") if pairs else (prompts * n, f"{prompts} prompts x {_R}.n = {prompts * n} samples")
    )
    if count % parts == 0:
        return []
    among = f"{parts} processes"
    if parts < role.processes:
        among = f"{parts} groups, of {role.processes // parts} processes each that compute the same rows"
    if pairs or (role.is_megatron and role.section.megatron.override_mcore_model_config.get("moe_z_loss_coeff")):
        return [ConfigError(f"{what} cannot be shared evenly by {among}", key=key, got=prompts, fix=_CHANGE)]
    again = f"the shortest is computed {-count % parts} more time(s), masked, so that each gets as many"
    notice(key, f"{what} do not divide by {among}: {again}")
    return []


def _budgets(cfg: PPOTrainerConfig, by_section: dict[str, EngineRole]) -> Problems:
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


_MODEL, _NO_KL = "actor_rollout_ref.model", "has no effect without algorithm.use_kl_in_reward=true"
_TURNS = {"enable", "num_repeat_rollouts"}


def _copy(key: str, of: str, says: str, fix: str) -> Rule:
    """A setting that is to be another one's copy."""
    return Rule(key, says, lambda cfg: value_at(cfg, key) != value_at(cfg, of), f"Set {fix} alone.")


def _compares(cfg: PPOTrainerConfig) -> bool:
    alone = cfg.actor_rollout_ref.rollout.n < 2 and cfg.algorithm.singleton == "raw"
    return of_estimator(cfg).groups and not alone and not learns_from_teachers_alone(cfg)


def _longest(cfg: PPOTrainerConfig) -> int:
    return cfg.data.max_prompt_length + cfg.data.max_response_length


_LENGTH = "it is the same length as data.{0}, which is {{data.{0}}}"
_COUNT = f"it is the same number as {_R}.n, which is {{actor_rollout_ref.rollout.n}}"
ROWS = (
    Rule("trainer.best_metric", "checkpoints are compared by validations, and there are no files to validate on",
         lambda cfg: cfg.trainer.best_metric and not cfg.data.val_files, "Set data.val_files."),
    Rule("trainer.resume_mode", "a run that starts again (trainer.max_restarts) continues from its newest checkpoint",
         lambda cfg: cfg.trainer.max_restarts and cfg.trainer.resume_mode != "auto", "Leave it out.", "auto"),
    Rule("data.min_response_length", "out of range",
         lambda cfg: not 0 <= cfg.data.min_response_length <= cfg.data.max_response_length,
         allowed="0 to data.max_response_length={data.max_response_length}"),
    Rule(f"{_R}.keep_unfinished", "samples that began in an earlier step are not those of this step's prompts",
         lambda cfg: cfg.skip.rollout.enable and cfg.actor_rollout_ref.rollout.keep_unfinished, "Leave one out."),
    Rule(f"{_R}.n", "the estimator {algorithm.adv_estimator!r} compares the samples of one prompt and needs several",
         lambda cfg: _compares(cfg) and cfg.actor_rollout_ref.rollout.n < 2,
         f"Set e.g. {_R}.n=8, algorithm.adv_estimator=gae for a critic, or algorithm.singleton=raw for scores without a baseline.",
         "2 or more"),
    Rule(f"{_R}.do_sample", "greedy samples of one prompt are all the same, so the estimator {algorithm.adv_estimator!r} has "
         "nothing to compare",
         lambda cfg: _compares(cfg) and cfg.actor_rollout_ref.rollout.n > 1 and not cfg.actor_rollout_ref.rollout.do_sample,
         "Set {key}=true."),
    Rule("critic.enable", "the estimator {algorithm.adv_estimator!r} needs the values of a critic",
         lambda cfg: of_estimator(cfg).values and not uses_critic(cfg),
         f"Leave it out, or take an estimator without a critic: algorithm.adv_estimator=grpo {_R}.n=8."),
    _copy(f"{_R}.prompt_length", "data.max_prompt_length", _LENGTH.format("max_prompt_length"), "data.max_prompt_length"),
    _copy(f"{_R}.response_length", "data.max_response_length", _LENGTH.format("max_response_length"),
          "data.max_response_length"),
    *(_copy(f"{section}.rollout_n", f"{_R}.n", _COUNT, f"{_R}.n") for section in (_A, "critic")),
    Rule(f"{_R}.max_model_len",
         lambda cfg: f"data.max_prompt_length + data.max_response_length = {_longest(cfg)} tokens do not fit",
         lambda cfg: 0 < (cfg.actor_rollout_ref.rollout.max_model_len or 0) < _longest(cfg),
         lambda cfg: f"Set {_R}.max_model_len={_longest(cfg)} or shorter lengths."),
    Rule("reward.reward_manager.module.path", "reward.reward_manager.source=importlib needs a file",
         lambda cfg: cfg.reward.reward_manager.source == "importlib" and cfg.reward.reward_manager.module.path is None,
         "Name the Python file that holds the reward manager's class."),
    Rule("trainer.checkpoint_callback_class", "this is no path of a class",
         lambda cfg: cfg.trainer.checkpoint_callback_class and not registry.is_dotted(cfg.trainer.checkpoint_callback_class),
         allowed="package.module:MyCallback"),
    Rule("reward.reward_model.fsdp_config.model_dtype", "weights that are kept in float16 lose small updates",
         lambda cfg: cfg.reward.reward_model.enable and of_schedule(cfg).reward_model
         and cfg.reward.reward_model.fsdp_config.model_dtype.removeprefix("torch.") in ("fp16", "float16", "half"),
         "Keep them in fp32, and set reward.reward_model.fsdp_config.dtype=float16 for products in float16."),
    Rule("data.val_files", "trainer.val_only=true leaves nothing to do without validation files",
         lambda cfg: cfg.trainer.val_only and not cfg.data.val_files, "Set data.val_files, or trainer.val_only=false."),

    Rule("algorithm.use_kl_in_reward", f"the KL to the reference is charged twice: {_A}.use_kl_loss is on as well",
         lambda cfg: cfg.algorithm.use_kl_in_reward and cfg.actor_rollout_ref.actor.use_kl_loss, kind=NOTICE),
    Rule("algorithm.filter_groups.enable", f"drops nothing with {_R}.n=1: a single sample is always kept",
         lambda cfg: cfg.algorithm.filter_groups.enable and cfg.actor_rollout_ref.rollout.n < 2, kind=NOTICE),
    Rule("critic.enable", "a critic is trained, but the estimator {algorithm.adv_estimator!r} does not use its values",
         lambda cfg: uses_critic(cfg) and not of_estimator(cfg).values
         and not registry.is_dotted(cfg.algorithm.adv_estimator), kind=NOTICE),
    Rule("trainer.critic_warmup", "there is no critic to warm up: the policy just waits for that many steps",
         lambda cfg: cfg.trainer.critic_warmup > 0 and not uses_critic(cfg), kind=NOTICE),
    Rule(f"{_MODEL}.lora.merge", f"has no effect without {_MODEL}.lora_rank",
         lambda cfg: cfg.actor_rollout_ref.model.lora.merge
         and not (cfg.actor_rollout_ref.model.lora_rank or cfg.actor_rollout_ref.model.lora_adapter_path), kind=NOTICE),
    Rule("critic.model.lora.merge", "has no effect: no sampler takes a critic's weights",
         lambda cfg: cfg.critic.model.lora.merge, kind=NOTICE),
    Rule("skip.rollout.enable", "has no effect: skip.rollout.steps names no step",
         lambda cfg: cfg.skip.rollout.enable and not cfg.skip.rollout.steps, kind=NOTICE),
    Rule("data.val_files", "no validation files are given, so nothing is validated",
         lambda cfg: not cfg.data.val_files, kind=NOTICE),
    Rule(f"{_R}.val_kwargs.n", "greedy validation gives the same response {got} times; set "
         f"{_R}.val_kwargs.do_sample=true and a temperature",
         lambda cfg: cfg.data.val_files and cfg.actor_rollout_ref.rollout.val_kwargs.n > 1
         and not cfg.actor_rollout_ref.rollout.val_kwargs.do_sample, kind=NOTICE),
)  # fmt: skip


def uneven_mini_batches(cfg: PPOTrainerConfig) -> Problems:
    """A step is a number of mini-batches, of the actor and of the critic."""
    sections = {_A: cfg.actor_rollout_ref.actor, **({"critic": cfg.critic} if uses_critic(cfg) else {})}
    sizes = {f"{key}.ppo_mini_batch_size": section.ppo_mini_batch_size for key, section in sections.items()}
    return [problem for key, mini in sizes.items() for problem in _divides(key, mini, cfg.data.train_batch_size)]


def _divides(key: str, mini: int, batch: int) -> Problems:
    if mini < 1 or batch < 1 or batch % mini == 0:
        return []
    sizes = divisors_of(batch)
    near = sorted(sizes, key=lambda size: abs(size - mini))[:4]
    message = f"data.train_batch_size={batch} prompts cannot be cut into mini-batches of {mini}"
    allowed = f"a divisor of {batch}, such as {', '.join(str(size) for size in sorted(near))}"
    return [ConfigError(message, key=key, got=mini, allowed=allowed, fix=f"Set {key}={near[0]}.")]


# ---- notices of several settings -----------------------------------------------------------------------------------


def also(names: list[str], text: str = "; nor have {}") -> str:
    """The settings after the first, which shares its notice with them."""
    return text.format(", ".join(names[1:])) if names[1:] else ""


def tell(cfg: PPOTrainerConfig) -> None:
    """Notices of several settings at once."""
    for part in (
        _conversations,
        _kl,
        _automatic_micro_batches,
        _skipped_pass,
        _correction,
        _critic,
        _reward_model,
        _engines,
    ):
        part(cfg)


def _conversations(cfg: PPOTrainerConfig) -> None:
    rollout = cfg.actor_rollout_ref.rollout
    names = sorted(set(changed_names(rollout.multi_turn)) - _TURNS)
    if names and not rollout.multi_turn.enable and rollout.agent.default_agent_loop == "single_turn_agent":
        text = f"has effect only for rows with agent_name=tool_agent, unless {_R}.multi_turn.enable=true"
        notice(f"{_R}.multi_turn.{names[0]}", text + also(names, "; so has {}"))


def _kl(cfg: PPOTrainerConfig) -> None:
    algorithm = cfg.algorithm
    hint = f" ({_A}.kl_loss_coef weighs the KL in the loss)" if cfg.actor_rollout_ref.actor.use_kl_loss else ""
    for name in changed_names(algorithm.kl_ctrl):
        if not algorithm.use_kl_in_reward:
            notice(f"algorithm.kl_ctrl.{name}", f"{_NO_KL}{hint}")
        elif name in ("target_kl", "horizon") and algorithm.kl_ctrl.type != "adaptive":
            notice(f"algorithm.kl_ctrl.{name}", "has no effect without algorithm.kl_ctrl.type=adaptive")


def _automatic_micro_batches(cfg: PPOTrainerConfig) -> None:
    a = cfg.actor_rollout_ref
    passes: list[tuple[str, ConfigNode, str, str, bool]] = [
        (_A, a.actor, "ppo_micro_batch_size", "use_dynamic_bsz", True),
        (_R, a.rollout, "log_prob_micro_batch_size", "log_prob_use_dynamic_bsz", not skips_old_log_prob(cfg)),
        (_REF, a.ref, "log_prob_micro_batch_size", "log_prob_use_dynamic_bsz", uses_reference(cfg)),
        ("critic", cfg.critic, "ppo_micro_batch_size", "use_dynamic_bsz", uses_critic(cfg)),
    ]
    names = [
        f"{key}.{name}_per_gpu"
        for key, node, name, dynamic, happens in passes
        if happens and not node[dynamic] and node[name] is None and node[f"{name}_per_gpu"] is None
    ]
    if names:
        text = "micro-batches get an automatic token budget, on which no result depends"
        notice(names[0], f"not set{also(names, ' (nor {})')}: {text}")


def _skipped_pass(cfg: PPOTrainerConfig) -> None:
    rollout = cfg.actor_rollout_ref.rollout
    names = [n for n in ("log_prob_micro_batch_size", "log_prob_micro_batch_size_per_gpu") if rollout[n] is not None]
    if not names or not skips_old_log_prob(cfg):
        return
    why = "one mini-batch and one epoch leave old log-probs unused, so that pass is skipped (trainer.skip_old_log_prob)"
    if cfg.algorithm.rollout_correction.bypass_mode:
        why = "the bypass mode takes the sampler's log-probs"
    elif cfg.actor_rollout_ref.actor.use_rollout_log_probs:
        why = f"{_A}.use_rollout_log_probs takes the sampler's log-probs"
    elif learns_from_pairs(cfg):
        why = "the loss on pairs reads no old log-probs"
    notice(f"{_R}.{names[0]}", f"has no effect: {why}")


def _correction(cfg: PPOTrainerConfig) -> None:
    older = [name for name in changed_names(cfg.algorithm) if name.startswith("rollout_is")]
    if older and cfg.algorithm.rollout_is_threshold is None:
        notice(f"algorithm.{older[0]}", "has no effect without algorithm.rollout_is_threshold, e.g. 2.0")


def _critic(cfg: PPOTrainerConfig) -> None:
    critic, estimator = cfg.critic, cfg.algorithm.adv_estimator
    if uses_critic(cfg):
        return
    names = [f"critic.{n}" for n in changed_names(critic) if n in ("cliprange_value", "grad_clip", "enable")]
    names += [f"critic.optim.{n}" for n in changed_names(critic.optim) if n != "lr"]
    names += ["critic.optim.lr"] * (critic.optim.lr != type(critic)().optim.lr)
    names += ["critic.model.path"] * (critic.model.path != cfg.actor_rollout_ref.model.path)
    if names:
        why = f"since {estimator!r} has no critic" if critic.enable is None else "since critic.enable is false"
        notice(names[0], f"has no effect, {why}{also(names)}")


def _reward_model(cfg: PPOTrainerConfig) -> None:
    names = [] if cfg.reward.reward_model.enable else changed_names(cfg.reward.reward_model)
    if names:
        why = "has no effect without reward.reward_model.enable=true"
        notice(f"reward.reward_model.{names[0]}", why + also(names))


def _engines(cfg: PPOTrainerConfig) -> None:
    """Sections of the engines that a role does not run on."""
    for role in roles(cfg):
        strategy, (key, fsdp) = role.section.strategy, role.others
        if role.has_own_sizes:
            why = f"has no effect with {role.key}.strategy={strategy}: its settings are {role.key}.{strategy}"
            tell_names(key, set_names(fsdp), why)
        for name in ("megatron", "torchtitan"):
            if name in role.section and strategy != name:
                why = f"has no effect without {role.key}.strategy={name}"
                tell_names(f"{role.key}.{name}", set_names(role.section[name]), why)
