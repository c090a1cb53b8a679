"""Datasets and samplers from the configuration, of ours and of the user's."""

from __future__ import annotations

import pytest

from tests.harness.rows import write_prompts
from verl.config import DataConfig, SFTDataConfig
from verl.config.schema.data import CustomClassConfig
from verl.config.schema.sft import PreferenceDataConfig
from verl.data import (
    RLHFDataset,
    create_preference_datasets,
    create_rl_dataset,
    create_rl_sampler,
    create_sft_dataset,
)
from verl.data.loader import EpochSampler
from verl.errors import ConfigError, DataError
from verl.metrics import notices

USERS_FILE = """
from torch.utils.data import Dataset, Sampler
from verl.data.rl_dataset import RLHFDataset

class Polite(RLHFDataset):
    def build_messages(self, row, item):
        messages = super().build_messages(row, item)
        return [{"role": "system", "content": "Please."}, *messages]

class Own(Dataset):
    def __init__(self, data_files, tokenizer, config, processor=None, max_samples=-1):
        self.files, self.max_samples = data_files, max_samples

class Pairs(Dataset):
    def __init__(self, parquet_files, tokenizer, config, max_samples=-1):
        self.files, self.max_samples = parquet_files, max_samples

class NotOne:
    pass

class Backwards(Sampler):
    def __init__(self, data_source, data_config):
        self.rows = len(data_source)
    def __len__(self):
        return self.rows
    def __iter__(self):
        return iter(reversed(range(self.rows)))

class Forgetful(Backwards):
    def update(self, batch):
        pass
"""


@pytest.fixture
def users_file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(USERS_FILE)
    return str(path)


@pytest.fixture
def prompts(tmp_path):
    return write_prompts(tmp_path / "train.parquet", 4)


def custom(path, name):
    return DataConfig(custom_cls=CustomClassConfig(path=path, name=name))


def test_without_a_class_of_the_users_it_is_ours(prompts, tokenizer):
    found = create_rl_dataset(prompts, DataConfig(), tokenizer, max_samples=3)
    assert type(found) is RLHFDataset and len(found) == 3


def test_a_subclass_of_ours_in_a_users_file_is_used(prompts, tokenizer, users_file):
    found = create_rl_dataset(str(prompts), custom(users_file, "Polite"), tokenizer)
    assert [m["role"] for m in found[0]["raw_prompt"]] == ["system", "user"]


def test_a_dataset_of_the_users_own_gets_the_files_as_named(prompts, tokenizer, users_file):
    found = create_rl_dataset([str(prompts)], custom(users_file, "Own"), tokenizer, max_samples=2)
    assert found.files == [str(prompts)] and found.max_samples == 2


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("NotOne", r"data\.custom_cls\.name: 'NotOne' in .* is not a class derived from torch\.utils\.data\.Dataset"),
        ("Polit", "has no 'Polit'.*Did you mean 'Polite'"),
        (None, "the path of a class is set, but not its name"),
    ],
)
def test_a_class_that_cannot_be_used_is_refused(prompts, tokenizer, users_file, name, message):
    with pytest.raises(ConfigError, match=message):
        create_rl_dataset(prompts, custom(users_file, name), tokenizer)


def test_a_missing_users_file_names_the_near_one(prompts, tokenizer, users_file):
    with pytest.raises(ConfigError, match=r"no such Python file.*Did you mean 'mine\.py'"):
        create_rl_dataset(prompts, custom(users_file.replace("mine", "mines"), "Polite"), tokenizer)


def test_missing_files_name_the_setting_that_named_them(tmp_path, tokenizer):
    for is_train, key in ((True, "data.train_files"), (False, "data.val_files")):
        with pytest.raises(DataError) as caught:
            create_rl_dataset(tmp_path / "none.parquet", DataConfig(), tokenizer, is_train=is_train)
        assert caught.value.key == key
        with pytest.raises(DataError, match="no file is named"):
            create_rl_dataset(None, DataConfig(), tokenizer, is_train=is_train)


def test_supervised_data_is_built_the_same_way(tmp_path, tokenizer):
    path = write_prompts(tmp_path / "sft.parquet", [{"question": "1+1=", "answer": "2"}] * 3)
    assert len(create_sft_dataset(path, SFTDataConfig(), tokenizer, max_samples=2)) == 2


def test_a_class_for_pairs_of_text_need_not_take_a_processor(prompts, tokenizer, users_file):
    config = PreferenceDataConfig(
        train_files=str(prompts), train_max_samples=2, custom_cls=CustomClassConfig(users_file, "Pairs")
    )
    train, val = create_preference_datasets(config, tokenizer)
    assert (train.files, train.max_samples, val) == ([str(prompts)], 2, None)
    with pytest.raises(TypeError, match="processor"):
        create_preference_datasets(config, tokenizer, processor=object())


def test_the_order_of_prompts_is_seeded_or_the_users(prompts, tokenizer, users_file):
    found = create_rl_dataset(prompts, DataConfig(), tokenizer)
    sampler = create_rl_sampler(DataConfig(seed=4), found)
    assert isinstance(sampler, EpochSampler) and sampler.seed == 4 and sampler.shuffle
    assert list(create_rl_sampler(DataConfig(shuffle=False), found)) == [0, 1, 2, 3]
    own = {"sampler": {"class_path": users_file, "class_name": "Backwards"}}
    assert list(create_rl_sampler(own, found)) == [3, 2, 1, 0]
    assert "data.sampler" not in notices()
    learning = {"sampler": {"class_path": users_file, "class_name": "Forgetful"}}
    assert list(create_rl_sampler(learning, found)) == [3, 2, 1, 0]
    assert "Forgetful has no state_dict" in notices()["data.sampler"]
    with pytest.raises(ConfigError, match=r"data\.sampler\.class_name: 'NotOne'.*torch\.utils\.data\.Sampler"):
        create_rl_sampler({"sampler": {"class_path": users_file, "class_name": "NotOne"}}, found)
