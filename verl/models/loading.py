"""Loading language models, as policies and as value functions.

Nothing is filled in silently: weights that a checkpoint lacks would be random numbers, so they are an error, except the
head of a value model, which starts small and seeded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForTokenClassification,
    GenerationConfig,
)

from verl.device import torch_dtype
from verl.errors import ModelError
from verl.metrics import notice
from verl.models import folder
from verl.models.config import load_model_config, quiet_transformers, readable_errors
from verl.models.hollow import hollow
from verl.models.slices import SlicedFolder
from verl.models.vision import family_of
from verl.models.vision.value import value_class

HEAD_NAMES = ("score", "classifier")
"""What token-classification models call their head."""
HOLLOW = "hollow"
"""In place of a device: see `load_causal_lm`."""
VALUE_HEAD = {"num_labels": 1, "classifier_dropout": 0.0, "hidden_dropout": 0.0, "summary_dropout_prob": 0.0}
"""One number per position, and no dropout around it."""


def load_causal_lm(
    path: str,
    dtype: str | torch.dtype = torch.float32,
    override_config: Mapping[str, Any] | None = None,
    trust_remote_code: bool = False,
    attn: str | None = None,
    **options: Any,
) -> nn.Module:
    """A causal language model with all its weights from ``path``.

    Args:
        dtype: of the parameters.
        override_config: see `load_model_config`; its ``attn_implementation`` counts if ``attn`` is None.
        attn: attention implementation of transformers; None is SDPA where the family has it, else eager.
        options: external_lib, hf_config_path: see `load_model_config`. seed: of the initialisation of whatever the
            family itself adds; the global generators stay as they are. device: ``meta`` gives the same model without
            any values, for a backend that fills in its own piece; ``hollow`` one that has what no file holds, on the
            CPU, and no memory for the rest (`verl.models.hollow`).

    Raises:
        ModelError: not a model folder (the message says what is missing), damaged, or incomplete weights.
    """
    model, info = _load(
        AutoModelForCausalLM, path, dtype, dict(override_config or {}), trust_remote_code, attn, **options
    )
    _refuse_missing(path, info["missing_keys"])
    if info["unexpected_keys"]:
        names = sorted(info["unexpected_keys"])
        notice(f"model {path}", f"{len(names)} tensors of the checkpoint are not used, the first is {names[0]}")
    return model


def load_value_model(
    path: str,
    dtype: str | torch.dtype = torch.float32,
    override_config: Mapping[str, Any] | None = None,
    trust_remote_code: bool = False,
    attn: str | None = None,
    *,
    seed: int = 0,
    **options: Any,
) -> nn.Module:
    """A value function: the trunk of a language model with a scalar head on every position.

    ``path`` is a causal language model, or a token or sequence classification checkpoint with one label, whose head is
    then kept. A new head is drawn from N(0, 1/(hidden+1)) with ``seed``, its bias is zero: values start near zero.
    All dropout around the head is off. Other arguments as for `load_causal_lm`.

    Raises:
        ModelError: see `load_causal_lm`; also a family without a token-classification form, or several labels.
    """
    model, info = _load(
        AutoModelForTokenClassification,
        path,
        dtype,
        dict(override_config or {}),
        trust_remote_code,
        attn,
        seed=seed,
        settings=VALUE_HEAD,
        **options,
    )
    name = _head_name(model)
    head_keys = {f"{name}.weight", f"{name}.bias"}
    _refuse_missing(path, set(info["missing_keys"]) - head_keys)
    _initialise_head(
        model.get_submodule(name), {k.split(".")[-1] for k in info["missing_keys"]} & {"weight", "bias"}, seed
    )
    return model


def _capped(config: Any) -> str | None:
    """Eager attention where scores are capped: Gemma 2 in transformers 5.17 has SDPA too, which leaves the cap out."""
    text = config.get_text_config()
    return "eager" if getattr(text, "attn_logit_softcapping", None) else None


def value_head(model: nn.Module) -> nn.Module:
    """The scalar head of a model from `load_value_model`."""
    return model.get_submodule(_head_name(model))


def _load(
    auto: Any,
    path: str,
    dtype: str | torch.dtype,
    override_config: Mapping[str, Any],
    trust_remote_code: bool,
    attn: str | None,
    *,
    external_lib: str | None = None,
    hf_config_path: str | None = None,
    seed: int = 0,
    device: str = "cpu",
    settings: Mapping[str, Any] | None = None,
) -> tuple[nn.Module, dict[str, Any]]:
    """A model of the kind ``auto``, and what transformers says about its weights.

    Args:
        settings: set on the configuration last.
    """
    config = load_model_config(
        path,
        override_config=override_config,
        trust_remote_code=trust_remote_code,
        external_lib=external_lib,
        hf_config_path=hf_config_path,
    )
    for name, value in (settings or {}).items():
        setattr(config, name, value)
    auto = _seeing(auto, config)
    where = folder.resolve_model(path)
    folder.check_model_folder(where)
    converted = _converted_weights(where, device)
    with quiet_transformers(), readable_errors(where), torch.random.fork_rng(devices=_cuda_devices()):
        torch.manual_seed(seed)
        model, info = _source(auto, config, where, converted, trust_remote_code)(
            config=config,
            dtype=torch_dtype(dtype),
            attn_implementation=attn or override_config.get("attn_implementation") or _capped(config),
            output_loading_info=True,
            device_map=None if device == "cpu" else "meta",
        )
        if converted is not None and (Path(where) / "generation_config.json").is_file() and model.can_generate():
            model.generation_config = GenerationConfig.from_pretrained(where)
    if device == HOLLOW:
        hollow(model, info["missing_keys"])
    else:
        _own_memory(model)
    return model, info


def _seeing(auto: Any, config: Any) -> Any:
    """What loads a model of this kind, where its configuration has a tower."""
    if family_of(config) is None:
        return auto
    return AutoModelForImageTextToText if auto is AutoModelForCausalLM else value_class(config)


def _source(
    auto: Any, config: Any, where: str, converted: dict[str, Tensor] | None, trust_remote_code: bool
) -> Callable[..., Any]:
    """transformers' loader, bound to the source of the weights; only concrete classes accept a state dict."""
    if converted is None:
        options = {"trust_remote_code": trust_remote_code} if hasattr(auto, "_model_mapping") else {}
        return partial(auto.from_pretrained, where, **options)
    with torch.device("meta"):
        model = auto.from_config(config, trust_remote_code=trust_remote_code)
    return partial(type(model).from_pretrained, None, state_dict=converted)


def _converted_weights(where: str, device: str) -> dict[str, Tensor] | None:
    """Weights of a folder that holds them as Megatron-Core has them; of other folders transformers finds them."""
    if not (Path(where) / folder.CONVERTED).is_file():
        return None
    with SlicedFolder.opened(where) as weights:
        if device != "cpu":
            return {name: torch.empty(weights.shape(name), device="meta") for name in weights.names()}
        return {name: weights.whole(name) for name in weights.names()}


def _own_memory(model: nn.Module) -> None:
    """Move the parameters out of the mapped file, where they lie at the file's odd offsets.

    Kernels round differently on unaligned memory, so equal weights from two files would give different bits; and a
    mapped file must not be overwritten, which saving into the same folder does.
    """
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()


def _refuse_missing(path: str, missing: set[str]) -> None:
    if not missing:
        return
    names = sorted(missing)
    raise ModelError(
        f"the checkpoint lacks {len(names)} tensors of this model, the first is {names[0]}",
        got=path,
        fix="Its weights belong to another kind of model, or its config.json (or override_config) does not fit them.",
    )


def _head_name(model: nn.Module) -> str:
    children = dict(model.named_children())
    for name in HEAD_NAMES:
        if name in children:
            return name
    raise ModelError(f"{type(model).__name__} has no head called {' or '.join(HEAD_NAMES)}")


def _initialise_head(head: nn.Module, fresh: set[str], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            if name == "weight" and name in fresh:
                drawn = torch.randn(parameter.shape, generator=generator) / (parameter.shape[-1] + 1)
                parameter.copy_(drawn)
            elif name in fresh:
                parameter.zero_()


def _cuda_devices() -> list[int]:
    return list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
