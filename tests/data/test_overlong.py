"""A prompt of megabytes is found too long, or cut, from a part of it: nobody waits for tokens that are dropped."""

from __future__ import annotations

import pytest

from tests.harness.rows import write_prompts
from verl.config import DataConfig, SFTDataConfig
from verl.config.schema.sft import PreferenceDataConfig
from verl.data.overlong import MANY, PART, count_tokens, cut_tokens, truncate
from verl.data.preference import PreferenceDataset
from verl.data.rl_dataset import RLHFDataset
from verl.data.sft_dataset import MultiTurnSFTDataset
from verl.errors import DataError

HUGE = "12+3 " * 600_000
"""3 MB, of which every character is a token of the tests' tokenizer."""


class Counted:
    """A tokenizer by characters, or by words, that counts what it is given."""

    def __init__(self, by_words: bool = False):
        self.by_words, self.seen = by_words, 0

    def __call__(self, texts):
        self.seen += sum(map(len, texts))
        return [[len(word) for word in text.split()] if self.by_words else list(text.encode()) for text in texts]


def test_the_beginning_of_a_huge_text_is_enough_to_see_that_it_is_too_long():
    encode = Counted()
    assert count_tokens(["abc", HUGE, "x" * PART], 512, encode) == [3, MANY, PART]
    assert encode.seen == 3 + 2 * PART


def test_a_huge_text_of_few_tokens_is_counted_to_its_end():
    encode = Counted(by_words=True)
    assert count_tokens(["x" * 9 * PART + " y"], 512, encode) == [2]
    assert encode.seen < 30 * PART  # the parts double, so all together they are at most twice the text


@pytest.mark.parametrize("how", ["left", "right", "middle"])
@pytest.mark.parametrize("text", [HUGE, "x y " * (PART // 4), "a" * 3 * PART + " b c d"])
def test_a_cut_of_a_huge_text_is_the_cut_of_all_its_tokens(how, text):
    for by_words in (False, True):
        encode = Counted(by_words)
        cut = cut_tokens(text, 7, how, encode)
        seen = encode.seen
        assert cut == truncate(encode([text])[0], 7, how)
        if text is HUGE:
            assert seen <= 2 * PART


def test_every_data_set_refuses_a_huge_row_without_its_length_and_names_what_cuts_it(tmp_path, tokenizer):
    said = [{"role": "user", "content": HUGE}, {"role": "assistant", "content": "2"}]
    row = {"prompt": said[:1], "messages": said, "chosen": "2", "rejected": "3"}
    file = str(write_prompts(tmp_path / "rows.parquet", [row]))
    with pytest.raises(DataError, match=r"row 0.*has more than 1024 tokens.*Set data\.truncation to left, right"):
        RLHFDataset(file, tokenizer, DataConfig())
    with pytest.raises(DataError, match=r"row 0.*has more than 2048 tokens.*Set data\.truncation to left or right"):
        MultiTurnSFTDataset(file, tokenizer, SFTDataConfig())
    with pytest.raises(DataError, match=r"row 0.*has more than 2048 tokens.*Set data\.truncation to left or right"):
        PreferenceDataset(file, tokenizer, PreferenceDataConfig())


def test_a_huge_prompt_is_cut_to_what_its_whole_would_be_cut_to(tmp_path, tokenizer):
    file = str(write_prompts(tmp_path / "rows.parquet", [{"prompt": [{"role": "user", "content": HUGE[: 2 * PART]}]}]))
    for how in ("left", "right", "middle"):
        data = RLHFDataset(file, tokenizer, DataConfig(max_prompt_length=50, truncation=how, return_full_prompt=True))
        row = data[0]
        assert row["raw_prompt_ids"] == truncate(tokenizer(row["full_prompts"])["input_ids"], 50, how)


def test_a_huge_row_of_fine_tuning_is_left_out_when_asked(tmp_path, tokenizer):
    ask = {"role": "user", "content": "1+1="}
    rows = [{"messages": [{**ask, "content": text}, {"role": "assistant", "content": "2"}]} for text in (HUGE, "1+1=")]
    data = MultiTurnSFTDataset(
        str(write_prompts(tmp_path / "rows.parquet", rows)), tokenizer, SFTDataConfig(filter_invalid=True)
    )
    assert len(data) == 1 and data.describe(0).endswith("row 1")
