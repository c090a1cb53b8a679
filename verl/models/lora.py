"""LoRA adapters on a model of transformers, through peft (Hu et al. 2021, arXiv 2106.09685).

The adapter is put into the model's own modules, so that the model stays what it is: engines, samplers and checkpoints
see the same class. Its tensors are called on disk as peft calls them; everything else a model has is frozen and never
saved, except what is trained besides (a new value head).
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from verl import env
from verl.config.schema.model import HFModelConfig
from verl.errors import ConfigError, ModelError, suggest
from verl.json_text import read_json

if TYPE_CHECKING:
    from peft import LoraConfig
    from transformers import PreTrainedModel

NAME = "default"
PREFIX = "base_model.model."
_LAYERS = re.compile(r"^.*\.\d+\.")
"""What stands in front of a name within its layer."""
CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"


@dataclass(frozen=True)
class LoraSettings:
    """What the ``model`` section says about an adapter.

    Args:
        rank: inner size of the two factors.
        alpha: their product is scaled by alpha / rank.
        target_modules: ``all-linear``, or names (or the ends of names) of linear modules.
        exclude_modules: names that get none.
        adapter_path: folder of an adapter to resume from; its own settings count then.
        target_parameters: names (or the ends of names) of weights outside linear modules: stacked experts, routers.
    """

    rank: int
    alpha: int = 16
    target_modules: str | tuple[str, ...] = "all-linear"
    exclude_modules: str | tuple[str, ...] | None = None
    adapter_path: str | None = None
    target_parameters: tuple[str, ...] | None = None

    @classmethod
    def of(cls, model: HFModelConfig) -> LoraSettings | None:
        """None where all weights are trained."""
        if model.lora_rank < 0:
            raise ConfigError("the rank of an adapter is positive", key="lora_rank", got=model.lora_rank)
        targets, excluded = model.target_modules, model.exclude_modules
        settings = cls(
            rank=model.lora_rank,
            alpha=model.lora_alpha,
            target_modules=targets if isinstance(targets, str) else tuple(targets),
            exclude_modules=tuple(excluded) if isinstance(excluded, list) else excluded,
            adapter_path=model.lora_adapter_path,
            target_parameters=None if model.target_parameters is None else tuple(model.target_parameters),
        )
        return settings if settings.rank or settings.adapter_path else None


def add_adapter(model: PreTrainedModel, settings: LoraSettings, seed: int, also: nn.Module | None = None) -> None:
    """Freeze a model and give it an adapter, which starts as no change at all or as what ``adapter_path`` holds.

    The adapter is float32, also over a base of 16 bits.

    Args:
        seed: of the first factor; the second is zero.
        also: a module that is trained as a whole besides (a value head), and gets no adapter.

    Raises:
        ConfigError: names that match no linear module, or settings that contradict the adapter to resume from.
        ModelError: the adapter to resume from cannot be read or belongs to another model.
    """
    from peft import inject_adapter_in_model

    config, weights = _peft_config(settings), None
    if settings.adapter_path:
        config, weights = read_adapter(settings.adapter_path)
        config.inference_mode = False  # as files have it; this one is trained on
        if settings.rank not in (0, config.r):
            raise ConfigError(
                "the adapter to go on from has another rank",
                key="lora_rank",
                got=settings.rank,
                allowed=f"{config.r}, or leave it out",
            )
    _check_names(model, config)
    targets = settings.target_modules
    excluded = [name for name, module in model.named_modules() if module is also]
    if excluded:
        config.exclude_modules = [*_as_list(config.exclude_modules), *excluded]
    on_meta = next(model.parameters()).is_meta
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            inject_adapter_in_model(config, model, NAME, low_cpu_mem_usage=on_meta)
    except ValueError as error:
        raise ConfigError(
            f"no adapter can be put on {type(model).__name__}: {str(error).splitlines()[0]}",
            key="target_modules",
            got=targets,
        ) from error
    for name, parameter in model.named_parameters():
        if ".lora_" in name and parameter.itemsize < 4:
            parameter.data = parameter.data.float()  # 16 bits would round its updates away
    key, got = ("lora_adapter_path", settings.adapter_path) if settings.adapter_path else ("target_modules", targets)
    _refuse_unmergeable(model, key, got)
    if also is not None:
        also.requires_grad_(True)
    if weights is not None and not on_meta:
        _load(model, weights, settings.adapter_path or "")


def read_adapter(path: str | Path) -> tuple[Any, dict[str, Tensor]]:
    """The peft configuration and the tensors of an adapter's folder.

    Raises:
        ModelError: no such folder, no adapter in it, or one that is no LoRA adapter.
    """
    from peft import LoraConfig
    from safetensors.torch import load_file

    folder = Path(env.expand(str(path)))
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        if not (folder / name).is_file():
            raise ModelError(f"this folder is no adapter: it has no {name}", key="lora_adapter_path", got=str(path))
    facts = read_json((folder / CONFIG_FILE).read_text(encoding="utf-8"))
    kind = "aLoRA" if facts.get("alora_invocation_tokens") else facts.get("peft_type")
    if kind != "LORA":
        raise ModelError("this adapter is no LoRA adapter", key="lora_adapter_path", got=kind, allowed="LORA")
    return LoraConfig.from_pretrained(str(folder)), load_file(folder / WEIGHTS_FILE)


def config_of(settings: LoraSettings) -> LoraConfig:
    """peft's configuration of an adapter with these settings.

    Raises:
        ModelError: the adapter to resume from cannot be read.
    """
    return read_adapter(settings.adapter_path)[0] if settings.adapter_path else _peft_config(settings)


def write_adapter_config(model: PreTrainedModel, folder: Path, base: str) -> None:
    """Write ``adapter_config.json`` beside an adapter's tensors, so that peft and transformers load the folder."""
    import copy

    config: Any = copy.deepcopy(model.peft_config[NAME])
    config.base_model_name_or_path, config.inference_mode = base, True
    config.task_type = "CAUSAL_LM" if model.can_generate() else "TOKEN_CLS"
    config.save_pretrained(str(folder))


def has_adapter(model: PreTrainedModel) -> bool:
    """Whether `add_adapter` was here."""
    return NAME in (getattr(model, "peft_config", None) or {})


def adapter_names(model: PreTrainedModel) -> dict[str, str]:
    """Name in memory -> name on disk of everything that is trained in a model with an adapter."""
    return {name: disk_name(name) for name, p in model.named_parameters() if p.requires_grad}


def base_weights(model: nn.Module) -> dict[str, Tensor]:
    """The frozen weights under an adapter themselves, as the model without one calls them in memory."""
    return {name.replace(".base_layer", ""): p.detach() for name, p in model.named_parameters() if ".lora_" not in name}


def adapted_tensors(model: nn.Module) -> list[str]:
    """Modules whose weights peft adapts as bare tensors, because they are no linear modules: experts, routers.

    It swaps the weight for the adapted one within each call, so it must be whole there, and a parameter.
    """
    return [name for name, module in model.named_modules() if type(module).__name__ == "ParamWrapper"]


def stacked_factors(model: nn.Module) -> list[nn.Parameter]:
    """Factors of stacked weights, which are those of all experts in one matrix."""
    layers: list[Any] = [model.get_submodule(name) for name in adapted_tensors(model)]
    both = [(layer.lora_A[NAME].weight, layer.lora_B[NAME].weight) for layer in layers if layer.num_experts > 1]
    return [factor for pair in both for factor in pair]


def disk_name(name: str) -> str:
    """As peft calls it in an adapter's file."""
    return PREFIX + name.replace(f".{NAME}.", ".") if f".{NAME}." in name else PREFIX + name


def module_name(name: str) -> str:
    """The adapted module, of a factor's name on disk."""
    return name.removeprefix(PREFIX).partition(".lora_")[0]


def is_adapter(names: Mapping[str, Tensor]) -> bool:
    """Whether these are the tensors of an adapter, by their names on disk."""
    return bool(names) and all(name.startswith(PREFIX) for name in names)


@torch.no_grad()
def leave_casts_to_autocast(model: nn.Module) -> None:
    """Give adapters their input as it is; peft casts it to float32 first, which autocast undoes: two copies of it."""
    for module in model.modules():
        if hasattr(module, "cast_input_dtype_enabled"):
            setattr(module, "cast_input_dtype_enabled", False)  # noqa: B010  # typed as a tensor or a module


def merge_adapter(model: PreTrainedModel, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights as the base model names them, the adapter's product added to those it changes.

    Args:
        model: only its modules' settings count; it may be without values.
        tensors: name in memory -> full tensor; a module's own and its two factors come together.
    """
    first = f".lora_A.{NAME}.weight"
    owners = [name.removesuffix(first) for name in tensors if name.endswith(first)]
    changed = {adapted_weight(model, owner): owner for owner in owners}
    weights: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if ".lora_" in name:
            continue
        plain = name.replace(".base_layer", "")
        owner = changed.get(plain)
        if owner is not None:
            factors = (tensors[f"{owner}.lora_{which}.{NAME}.weight"] for which in "AB")
            tensor = _with_product(model.get_submodule(owner), tensor, *factors)
        weights[plain] = tensor
    return weights


def adapted_weight(model: PreTrainedModel, owner: str) -> str:
    """The weight that a module with an adapter changes, as the model without one calls it.

    Adapters on several weights of one module are wrapped around each other, each in the ``base_layer`` of the next.
    """
    kind = getattr(model.get_submodule(owner), "parameter_name", "weight")
    return f"{owner.replace('.base_layer', '')}.{kind}"


def _with_product(layer: Any, weight: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """A weight and the scaled product of its two factors; those of stacked weights lie in one matrix, as peft has them.

    Args:
        weight: (out, in); (E, out, in) or (E, in, out) where it is stacked.
        first: (r, in), or (E r, in) expert by expert.
        second: (out, r), or (out, r E) with the experts of one number of the r side by side.
    """
    scale = layer.scaling[NAME]
    if weight.dim() < 3:
        product = second @ first
        return weight + (scale * (product.t() if layer.fan_in_fan_out else product)).to(weight)
    left = second.unflatten(1, (-1, len(weight))).permute(2, 0, 1)
    product = left @ first.unflatten(0, (len(weight), -1))
    is_transposed = getattr(layer.get_base_layer(), "is_transposed", False)  # (E, in, out), as transformers marks it
    return weight + (scale * (product.transpose(1, 2) if is_transposed else product)).to(weight)


@contextlib.contextmanager
def without_adapter(model: nn.Module) -> Iterator[None]:
    """Within the block the model is its base: the reference policy of a run with LoRA, without a second copy."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers: list[Any] = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    if not layers:
        raise ModelError("this model has no adapter that could be switched off")
    for layer in layers:
        layer._disable_adapters = True  # peft's own switch also changes what is trained, which sharding cannot follow
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def _peft_config(settings: LoraSettings) -> Any:
    from peft import LoraConfig

    targets, excluded = settings.target_modules, settings.exclude_modules
    return LoraConfig(
        r=settings.rank or 8,
        lora_alpha=settings.alpha,
        lora_dropout=0.0,
        target_modules=targets if isinstance(targets, str) else list(targets),
        exclude_modules=excluded if isinstance(excluded, str) else _as_list(excluded) or None,
        target_parameters=None if settings.target_parameters is None else list(settings.target_parameters),
        bias="none",
    )


def _check_names(model: nn.Module, config: Any) -> None:
    """Every name must match a linear module, or a weight: one that matches none is a typing error, not a wish."""
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    _check_ends(model, "target_modules", config.target_modules, linear, "linear module")
    _check_ends(model, "exclude_modules", config.exclude_modules, linear, "linear module")
    others = [name for name, p in model.named_parameters() if p.dim() > 1 and name.rpartition(".")[0] not in linear]
    embeddings = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, nn.Embedding)}
    stacked = [name for name in others if name not in embeddings]
    _check_ends(model, "target_parameters", config.target_parameters, stacked, "weight outside linear modules")


def _check_ends(model: nn.Module, key: str, names: Any, modules: list[str], kind: str) -> None:
    """Raise `ConfigError` where a name is the end of none of the known ones."""
    ends = sorted({name.rpartition(".")[2] if kind == "linear module" else _LAYERS.sub("", name) for name in modules})
    for end in [] if isinstance(names, str) else _as_list(names):
        if not any(name == end or name.endswith(f".{end}") for name in modules):
            raise ConfigError(
                f"no {kind} of {type(model).__name__} has this name",
                key=key,
                got=end,
                allowed=ends,
                fix=suggest(end, ends),
            )


def _refuse_unmergeable(model: PreTrainedModel, key: str, got: Any) -> None:
    """Raise `ConfigError` where plain weights, which files and samplers have, could not hold what is trained.

    So it is of a weight with several names, of which the adapter changes one alone, and of more than two factors.
    """
    ends = tuple(f".lora_{which}.{NAME}.weight" for which in "AB")
    odd = [name for name in adapter_names(model) if not name.endswith(ends)]
    if odd:
        raise ConfigError(
            f"an adapter is two factors of each weight here, and this one trains {odd[0].replace(f'.{NAME}', '')} too",
            key=key,
            got=got,
            fix="Name linear modules alone, and leave out DoRA, biases, modules_to_save and trainable tokens.",
        )
    names: dict[int, list[str]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        names.setdefault(id(tensor), []).append(name.replace(".base_layer", ""))
    changed = {adapted_weight(model, name.partition(".lora_")[0]) for name in adapter_names(model)}
    for shared in names.values():
        adapted = sorted(changed.intersection(shared))
        if adapted and len(shared) > 1:
            module, others = adapted[0].removesuffix(".weight"), ", ".join(n for n in shared if n != adapted[0])
            raise ConfigError(
                f"an adapter on {module} cannot be merged: its weight is that of {others}, too, which would change",
                key=key,
                got=got,
                fix=f"Leave {module} out, or take a model whose config.json says tie_word_embeddings=false.",
            )


def _load(model: PreTrainedModel, weights: Mapping[str, Tensor], path: str) -> None:
    targets = {disk: name for name, disk in adapter_names(model).items()}
    tensors = dict(model.named_parameters())
    absent, unknown = sorted(set(targets) - set(weights)), sorted(set(weights) - set(targets))
    if absent or unknown:
        what = f"lacks {absent[0]}" if absent else f"has {unknown[0]}, which this model has not"
        raise ModelError(f"the adapter belongs to another model: it {what}", got=path)
    with torch.no_grad():
        for disk, name in targets.items():
            if tensors[name].shape != weights[disk].shape:
                raise ModelError(
                    f"the adapter belongs to another model: {disk} has another shape",
                    got=tuple(weights[disk].shape),
                    allowed=str(tuple(tensors[name].shape)),
                )
            tensors[name].copy_(weights[disk])


def _as_list(names: Any) -> list[str]:
    return [] if names is None else [names] if isinstance(names, str) else list(names)
