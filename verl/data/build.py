"""Datasets and samplers from the configuration: ours, or a class in the user's own file."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.utils.data import Dataset, Sampler

from verl.data.files import check_files
from verl.data.loader import EpochSampler, HasState, LearnsFromSteps
from verl.data.mixture import Mixture, MixtureSampler
from verl.data.preference import PreferenceDataset, UnpairedDataset
from verl.data.rl_dataset import RLHFDataset
from verl.data.settings import read
from verl.data.sft_dataset import MultiTurnSFTDataset
from verl.errors import ConfigError
from verl.metrics import notice
from verl.registry import load_from_module

if TYPE_CHECKING:
    from verl.config.schema.node import SettingsSource
    from verl.data.vision.processor import VisionProcessor
    from verl.protocol.tokenizer import Tokenizer

Files = str | Path | Iterable[str | Path]


def create_rl_dataset(
    files: Files,
    config: SettingsSource,
    tokenizer: Tokenizer,
    processor: VisionProcessor | None = None,
    is_train: bool = True,
    max_samples: int = -1,
) -> Dataset:
    """The prompts of ``files`` as ``data.custom_cls`` or as `RLHFDataset`.

    Args:
        config: the ``data`` section.
        is_train: names the setting in messages; both kinds of data are read in the same way.
        max_samples: -1 keeps all rows.
    """
    cls = dataset_class(config, RLHFDataset)
    files = check_files(files, "data.train_files" if is_train else "data.val_files")
    return cls(data_files=files, tokenizer=tokenizer, config=config, processor=processor, max_samples=max_samples)


def create_sft_dataset(
    files: Files,
    config: SettingsSource,
    tokenizer: Tokenizer,
    processor: VisionProcessor | None = None,
    max_samples: int = -1,
) -> Dataset:
    """The conversations of ``files`` as ``data.custom_cls`` or as `MultiTurnSFTDataset`."""
    cls = dataset_class(config, MultiTurnSFTDataset)
    files = check_files(files, "data.train_files")
    return cls(parquet_files=files, tokenizer=tokenizer, config=config, processor=processor, max_samples=max_samples)


def create_preference_datasets(
    config: SettingsSource, tokenizer: Tokenizer, processor: VisionProcessor | None = None, unpaired: bool = False
) -> tuple[Any, Any]:
    """The training and the validation pairs (None without files) as ``data.custom_cls`` or as `PreferenceDataset`;
    ``unpaired``: answers with labels, as `UnpairedDataset`.

    The class is called with ``processor`` only where the model takes images: a class for text need not accept it.
    """
    cls = dataset_class(config, UnpairedDataset if unpaired else PreferenceDataset)
    images = {} if processor is None else {"processor": processor}
    datasets: list[Any] = []
    for split in ("train", "val"):
        files, most = read(config, f"{split}_files"), read(config, f"{split}_max_samples", -1)
        if not files and split == "val":
            datasets.append(None)
            continue
        paths = check_files(files, f"data.{split}_files")
        datasets.append(cls(parquet_files=paths, tokenizer=tokenizer, config=config, max_samples=most, **images))
    return datasets[0], datasets[1]


def create_rl_sampler(config: SettingsSource, dataset: Any) -> Sampler[int]:
    """The order of the training prompts: ``data.sampler.class_path/class_name`` of the user, else seeded epochs, in
    which sources have their shares (``data.source_weights``).

    A user's class is called with ``data_source`` and ``data_config`` and must be a torch `Sampler`. One that learns
    from steps (`verl.data.loader.LearnsFromSteps`) and keeps no state is named in a notice: a resumed run resets it.
    """
    custom = read(config, "sampler")
    path = read(custom, "class_path") if custom is not None else None
    if not path:
        shuffle, seed = bool(read(config, "shuffle", True)), read(config, "seed")
        if not read(config, "source_weights"):
            return EpochSampler(len(dataset), shuffle=shuffle, seed=seed)
        return MixtureSampler(Mixture.of(dataset, config), shuffle=shuffle, seed=seed)
    cls = _user_class(str(path), str(read(custom, "class_name", "")), Sampler, "data.sampler.class_name")
    sampler = cls(data_source=dataset, data_config=config)
    if isinstance(sampler, LearnsFromSteps) and not isinstance(sampler, HasState):
        text = f"{cls.__name__} has no state_dict and load_state_dict: a resumed run forgets what it learned from steps"
        notice("data.sampler", text)
    return sampler


def dataset_class(config: SettingsSource, default: type[Dataset]) -> type[Any]:
    """``data.custom_cls``, which must be a torch `Dataset`, or ``default`` where none is set."""
    custom = read(config, "custom_cls")
    path = read(custom, "path") if custom is not None else None
    if not path:
        return default
    return _user_class(str(path), str(read(custom, "name", "")), Dataset, "data.custom_cls.name")


def _user_class(path: str, name: str, base: type, key: str) -> type[Any]:
    if not name:
        raise ConfigError("the path of a class is set, but not its name", key=key, got=path)
    user_class = load_from_module(path, name)
    if not isinstance(user_class, type) or not issubclass(user_class, base):
        module = "torch.utils.data." + base.__name__
        raise ConfigError(f"{name!r} in {path} is not a class derived from {module}", key=key, got=user_class)
    return user_class
