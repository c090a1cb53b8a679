"""What a machine does not have: kernels of a GPU on a CPU, and packages that are not installed."""

from __future__ import annotations

import importlib.util
from typing import Any

from verl.config.rules import megatron_fields, optimizers, validate_torchtitan
from verl.config.rules.checks import Problems, caught, looks_local, missing_folder
from verl.config.rules.validate_megatron import MegatronRole, missing_or_other, role_of_supervised, roles
from verl.config.schema.bounds import one_of
from verl.config.schema.root import PPOTrainerConfig
from verl.config.schema.sft import SFTTrainerConfig
from verl.errors import ConfigError

_ATTENTION = {
    "eager": None, "sdpa": None, "flex_attention": None, "paged|eager": None, "flash_attention_2": "flash_attn",
    "flash_attention_3": "flash_attn_interface", "flash_attention_4": "flash_attn.cute",
}  # fmt: skip
"""What transformers calls them, and the package that each needs; a name with a slash is fetched from the hub."""


def problems(cfg: PPOTrainerConfig) -> Problems:
    """Of every model of an RL run."""
    return _of(list(roles(cfg)), cfg.trainer.device) + optimizers.missing(cfg)


def sft_problems(cfg: SFTTrainerConfig) -> Problems:
    """Of the one model of a supervised run."""
    return _of([role_of_supervised(cfg)], cfg.trainer.device) + optimizers.sft_missing(cfg)


def _of(megatron_roles: list[MegatronRole], device: str | None) -> Problems:
    from verl import device as devices  # torch is loaded only once there is something to validate

    on_megatron = [role for role in megatron_roles if role.is_megatron]
    problems = missing_or_other(f"{on_megatron[0].key}.strategy") if on_megatron else []
    on_titan = [role for role in megatron_roles if validate_torchtitan.is_chosen(role)]
    problems += validate_torchtitan.missing_or_other(f"{on_titan[0].key}.strategy") if on_titan else []
    if caught(devices.resolve_device, device):
        return problems  # another rule reports it
    kind = devices.resolve_device(device)
    for role in megatron_roles:
        problems += _attention(role, kind) + _adapter(role) + _fp8(role)
        problems += [] if role.has_own_sizes else _on_gpu(role, kind)
    return list({problem.key: problem for problem in problems}.values())  # the reference has the actor's model


def _attention(role: MegatronRole, kind: str) -> Problems:
    key, name = f"{role.model_key}.override_config.attn_implementation", _named(role.model)
    if name is None or "/" in name or role.has_own_sizes:
        return []
    if name not in _ATTENTION:  # a module of one's own may have registered it
        return [] if role.model.external_lib else one_of(key, name, _ATTENTION)
    package = _ATTENTION[name] if not _is_installed("kernels") else None  # which fetches those that are missing
    fix = "Set it to sdpa, or leave it out: packed rows have an attention of their own."
    if package is not None and not _is_installed(package):
        return [ConfigError(f"it needs the package {package}, which is not installed", key=key, got=name, fix=fix)]
    if name == "flex_attention" and kind == "cpu":
        return [ConfigError("flex attention has no backward pass on a CPU", key=key, got=name, fix=fix)]
    return []


def _named(model: Any) -> str | None:
    name = (model.override_config or {}).get("attn_implementation")
    return name if isinstance(name, str) else None


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # of a package inside another one
        return False


def _on_gpu(role: MegatronRole, kind: str) -> Problems:
    model, key, problems = role.model, role.model_key, []
    if "use_liger" in model and model.use_liger:
        if kind == "cpu":
            message, fix = "Liger's kernels need a GPU", f"Set {key}.use_liger=false on a CPU."
            problems.append(ConfigError(message, key=f"{key}.use_liger", got=True, fix=fix))
        elif not _is_installed("liger_kernel"):
            fix = "In the checkout: pip install -e '.[liger]', or leave it out."
            message = "the package liger-kernel is not installed"
            problems.append(ConfigError(message, key=f"{key}.use_liger", got=True, fix=fix))
    is_fused = "use_fused_kernels" in model and model.use_fused_kernels
    if kind == "cpu" and is_fused and model.fused_kernel_options.impl_backend == "triton":
        name, message = f"{key}.fused_kernel_options.impl_backend", "the triton kernels need a GPU"
        fix = "Set it to torch, which works on any device."
        problems.append(ConfigError(message, key=name, got="triton", fix=fix))
    return problems


def _fp8(role: MegatronRole) -> Problems:
    if not role.is_megatron or _is_installed("transformer_engine"):
        return []
    return caught(megatron_fields.refuse_low_precision, role.of("override_mcore_model_config"), role.section.megatron)


def _adapter(role: MegatronRole) -> Problems:
    path = role.model.lora_adapter_path if "lora_adapter_path" in role.model else None
    if not path or role.adapter is None or not looks_local(path):
        return []
    return missing_folder(f"{role.model_key}.lora_adapter_path", path)
