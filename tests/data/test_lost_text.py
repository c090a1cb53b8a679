"""What a tokenizer cannot represent is said with file and row; what it only writes in another way is no loss."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.harness.rows import write_prompts
from verl.config import DataConfig, SFTDataConfig
from verl.data.lost_text import lost_characters
from verl.data.preference import PreferenceDataset
from verl.data.rl_dataset import RLHFDataset
from verl.data.sft_dataset import MultiTurnSFTDataset
from verl.errors import DataError
from verl.metrics import notices, reset_notices

TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% if m['role'] == 'assistant' %}</s>{% endif %}{% endfor %}"
ENDED = "{% for m in messages %}{{ m['content'] }}</s>{% endfor %}"


def of(model, normalizer=None, pre=None, decoder=None, template=ENDED, **special):
    backend = Tokenizer(model)
    backend.normalizer, backend.pre_tokenizer, backend.decoder = normalizer, pre, decoder
    names = {"eos_token": "</s>", "pad_token": "</s>", **special}
    return PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=template, **names)


def digits_only(template=ENDED):
    """A vocabulary of digits, without byte fallback and without an unknown token."""
    return of(models.BPE(vocab={sign: n for n, sign in enumerate("0123456789+=")}, merges=[]), template=template)


def letters(unk=None):
    vocab = {sign: n for n, sign in enumerate(" abcdefghijklmnopqrstuvwxyz.!?0123456789[]UNK")}
    vocab |= {"[UNK]": len(vocab)}
    return of(models.BPE(vocab=vocab, merges=[], unk_token=unk), **({"unk_token": unk} if unk else {}))


def word_pieces():
    words = ["[UNK]", "the", "cafe", "##s", "of", "paris", "."]
    model = models.WordPiece(vocab={word: n for n, word in enumerate(words)}, unk_token="[UNK]")
    return of(model, normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer(), decoders.WordPiece(),
              unk_token="[UNK]")  # fmt: skip


def pieces():
    vocab = [("<unk>", 0.0), *((sign, -1.0) for sign in "▁abcdefghijklmnopqrstuvwxyz123.")]
    model = models.Unigram(vocab, unk_id=0)
    return of(model, normalizers.NFKC(), pre_tokenizers.Metaspace(), decoders.Metaspace(), unk_token="<unk>")


def lost(tokenizer, text):
    return lost_characters(text, tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer)


@pytest.mark.parametrize(
    ("tokenizer", "text", "missing"),
    [
        (digits_only, "2+2=", ""),
        (digits_only, "say 2+2=", "say"),
        (letters, "größe", "oss"),
        (lambda: letters("[UNK]"), "small ÷ large", "÷"),  # the letters of [UNK] are none of the text's
        (word_pieces, "The Cafés   of  Paris.", ""),  # lower case, no accents, one space
        (word_pieces, "the cats of paris", "cats"),
        (pieces, "ﬁne １２ x.", ""),  # NFKC
        (pieces, "ab é日", "e日"),
    ],
)
def test_lost_characters_are_those_that_no_token_holds(tokenizer, text, missing):
    assert sorted(lost(tokenizer(), text)) == sorted(missing)


@pytest.mark.parametrize("text", ["Grüße, 日本語 🙂 e\u0301 \x00\t ﬁ “x”", "  a\r\n b"])
def test_a_byte_level_tokenizer_loses_nothing(tokenizer, text):
    assert lost(tokenizer, text) == ""


def prompts(tmp_path, tokenizer, *texts, **config):
    rows = [{"prompt": [{"role": "user", "content": text}]} for text in texts]
    return RLHFDataset(write_prompts(tmp_path / "train.parquet", rows), tokenizer, DataConfig(**config))


def test_a_prompt_that_loses_characters_is_said_once_with_file_and_row(tmp_path):
    prompts(tmp_path, digits_only(), "2+2=", "so 2+2=?", "Größe 3?")
    said = notices()["tokenizer"]
    assert "'so?Größe'" in said and "2 of the first 3 rows" in said and "train.parquet, row 1" in said


def test_a_prompt_that_loses_every_character_is_an_error(tmp_path):
    with pytest.raises(DataError, match=r"train.parquet, row 1: the tokenizer has a token for no character.*'This is"):
        prompts(tmp_path, digits_only(), "2+2=", "This is a game.")


@pytest.mark.parametrize("config", [{}, {"truncation": "left"}])
def test_an_empty_prompt_is_an_error_that_names_file_and_row(tmp_path, config):
    # far behind the rows that are looked at
    rows = ["1"] * 50 + ["game"]
    with pytest.raises(DataError, match=r"train.parquet, row 50: the prompt has no token"):
        prompts(tmp_path, digits_only(template=TEMPLATE), *rows, **config)[50]


def test_conversations_and_both_answers_of_pairs_are_looked_at(tmp_path):
    row = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2 yes"}]
    path = write_prompts(tmp_path / "sft.parquet", [{"messages": row}])
    MultiTurnSFTDataset(path, digits_only(), SFTDataConfig())
    assert "'yes'" in notices()["tokenizer"]
    path = write_prompts(tmp_path / "pairs.parquet", [{"prompt": "1", "chosen": "2", "rejected": "no"}])
    reset_notices()
    PreferenceDataset(path, digits_only(), SFTDataConfig())
    assert "'no'" in notices()["tokenizer"]
