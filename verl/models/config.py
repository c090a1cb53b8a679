"""Model configurations: read, overridden from ours, and checked: transformers accepts any attribute silently."""

from __future__ import annotations

import contextlib
import importlib
import logging
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import AutoConfig, PretrainedConfig
from transformers import logging as transformers_logging

from verl.config.machine import models
from verl.errors import ConfigError, ModelError, suggest
from verl.models import folder

_OF_A_FILE = (OSError, ValueError, KeyError, IndexError, TypeError, AttributeError, ArithmeticError, EOFError,
              RuntimeError, SafetensorError, StrictDataclassError)  # fmt: skip
"""What transformers and torch raise at a file that is not what its name says."""
_NOT_CONFIG = ("attn_implementation", "model_config")  # taken by our own loader, not attributes of the configuration


# Where they are installed, transformers and peft import these two in every process; they warn of unused kernels,
# and of how torchao registers its types with torch.
for _package in ("torchao", "bitsandbytes"):
    logging.getLogger(_package).setLevel(logging.ERROR)
logging.getLogger("torch.utils._pytree").addFilter(lambda record: "register_constant" not in record.getMessage())

_TRUST = "set trust_remote_code=true in the model's section"


def load_model_config(
    path: str,
    *,
    override_config: Mapping[str, Any] | None = None,
    trust_remote_code: bool = False,
    external_lib: str | None = None,
    hf_config_path: str | None = None,
) -> PretrainedConfig:
    """The ``PretrainedConfig`` of a model.

    Args:
        path: folder or hub id.
        override_config: attributes to replace; those under ``model_config`` count too (an older spelling).
        external_lib: module (or comma-separated modules) imported first, which may register model classes.
        hf_config_path: read the configuration from here instead.

    Raises:
        ModelError: not a model, or a kind of model that this transformers does not know.
        NotBuiltError: a model that sees or hears, unless ``external_lib`` may know it.
        ConfigError: ``override_config`` names an attribute that this configuration does not have.
    """
    import_external(external_lib)
    where = folder.resolve_model(hf_config_path or path)
    folder.check_model_folder(where, weights=False)
    with quiet_transformers(), readable_errors(where):
        config = AutoConfig.from_pretrained(where, trust_remote_code=trust_remote_code)
    if not trust_remote_code:
        _refuse_foreign_kernels(config, where)
    if not external_lib:
        models.refuse(config.to_dict(), "path", path)  # a hub name is known only after the download
    apply_overrides(config, override_config or {}, strict=not trust_remote_code)
    return config


def _refuse_foreign_kernels(config: PretrainedConfig, where: str) -> None:
    """A configuration may name kernels of the hub, which transformers would fetch and run."""
    parts = [config, *(part for part in vars(config).values() if isinstance(part, PretrainedConfig))]
    for part in parts:
        for name in ("_attn_implementation", "_experts_implementation"):
            value = getattr(part, name, None)
            if isinstance(value, str) and "/" in value:
                raise ModelError(
                    f"its config.json names code of the hub as {name.lstrip('_')}",
                    got=value,
                    key=where,
                    fix=f"Take it out of config.json. If you trust it, {_TRUST}.",
                )


def apply_overrides(config: PretrainedConfig, override: Mapping[str, Any], strict: bool = True) -> None:
    """Set attributes on a configuration; an unknown one is an error unless ``strict`` is off (remote code)."""
    fields = config.to_dict()
    flat = {k: v for k, v in override.items() if k not in _NOT_CONFIG} | dict(override.get("model_config") or {})
    if "rope_parameters" in fields:
        flat = _current_rope_names(flat)
    for key, value in flat.items():
        if strict and key not in fields:
            raise ConfigError(
                f"the configuration of a {config.model_type} model has no such attribute",
                key=f"override_config.{key}",
                fix=suggest(key, fields),
            )
        current = fields.get(key)
        if isinstance(value, Mapping) and isinstance(current, Mapping):
            value = {**current, **value}
        setattr(config, key, value)


def _current_rope_names(override: Mapping[str, Any]) -> dict[str, Any]:
    """``rope_theta`` and ``rope_scaling`` of older configurations are fields of ``rope_parameters`` today."""
    settings = {key: value for key, value in override.items() if key not in ("rope_theta", "rope_scaling")}
    rope = dict(override.get("rope_scaling") or {})
    if "type" in rope:
        rope["rope_type"] = rope.pop("type")
    if "rope_theta" in override:
        rope["rope_theta"] = override["rope_theta"]
    if rope:
        settings["rope_parameters"] = {**rope, **(settings.get("rope_parameters") or {})}
    return settings


def import_external(external_lib: str | None) -> None:
    """Import what ``model.external_lib`` names."""
    for name in (external_lib or "").split(","):
        if not name.strip():
            continue
        try:
            importlib.import_module(name.strip())
        except ModuleNotFoundError as error:
            if error.name and not name.strip().startswith(error.name):
                raise  # the person's module exists and lacks something: that traceback is the message
            raise ConfigError(
                "no such module", key="external_lib", got=name, fix="Is its folder on PYTHONPATH?"
            ) from error


@contextlib.contextmanager
def readable_errors(where: str) -> Iterator[None]:
    """What transformers and safetensors raise about a model, as one `ModelError`."""
    try:
        yield
    except ImportError as error:
        raise ModelError(f"this model needs a package that is missing: {error}", got=where) from error
    except torch.serialization.pickle.UnpicklingError as error:
        raise ModelError(
            "the weights are a pickle that holds more than tensors: it could run any code, so it is not loaded",
            got=where,
            fix="Take the model's safetensors files, or convert it where you trust it: model.save_pretrained(folder).",
        ) from error
    except _OF_A_FILE as error:
        if isinstance(error, ModelError | ConfigError):
            raise
        first = str(error).strip().split("\n")[0] or type(error).__name__
        fix = (
            "If you trust its code, set trust_remote_code=true in the model's section."
            if "trust_remote_code" in str(error)
            else ""
        )
        raise ModelError(f"this model cannot be loaded: {first}", got=where, fix=fix) from error


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """No progress bars and no load report: what matters in them is checked and said by our own loader."""
    level = transformers_logging.get_verbosity()
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
        if bars:
            transformers_logging.enable_progress_bar()
