"""Loss masks of the real chat templates, token by token, against texts that were split by hand."""

from __future__ import annotations

import pytest

from verl.data.chat_template import ChatTemplate
from verl.data.turns import TurnFinder
from verl.errors import DataError
from verl.metrics import notices

TWO_TURNS = [
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "and 3?"},
    {"role": "assistant", "content": "5 it is"},
]
# By hand: every second piece, from the second on, is what the assistant says with the token that ends its turn.
EXPECTED = {
    "qwen2.5": [
        "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n"
        "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n",
        "2<|im_end|>",
        "\n<|im_start|>user\nand 3?<|im_end|>\n<|im_start|>assistant\n",
        "5 it is<|im_end|>",
        "\n",
    ],
    "qwen3": [
        "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n",
        "2<|im_end|>",
        "\n<|im_start|>user\nand 3?<|im_end|>\n<|im_start|>assistant\n",
        "<think>\n\n</think>\n\n5 it is<|im_end|>",
        "\n",
    ],
    "llama-3": [
        "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\n1+1?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        "2<|eot_id|>",
        "<|start_header_id|>user<|end_header_id|>\n\nand 3?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
        "5 it is<|eot_id|>",
        "",
    ],
    "gemma": [
        "<start_of_turn>user\n1+1?<end_of_turn>\n<start_of_turn>model\n",
        "2<end_of_turn>",
        "\n<start_of_turn>user\nand 3?<end_of_turn>\n<start_of_turn>model\n",
        "5 it is<end_of_turn>",
        "\n",
    ],
    "mistral": ["<s>[INST] 1+1? [/INST]", " 2</s>", "[INST] and 3? [/INST]", " 5 it is</s>", ""],
    "kimi-k2": [
        "<|im_system|>system<|im_middle|>You are a helpful assistant<|im_end|>"
        "<|im_user|>user<|im_middle|>1+1?<|im_end|><|im_assistant|>assistant<|im_middle|>",
        "2<|im_end|>",
        "<|im_user|>user<|im_middle|>and 3?<|im_end|><|im_assistant|>assistant<|im_middle|>",
        "5 it is<|im_end|>",
        "",
    ],
}


def expected(tokenizer, pieces):
    ids = [tokenizer(piece, add_special_tokens=False)["input_ids"] for piece in pieces]
    return [i for piece in ids for i in piece], [n % 2 for n, piece in enumerate(ids) for _ in piece]


def encode(tokenizer, messages, *, keep_produced=False, **arguments):
    return TurnFinder(ChatTemplate(tokenizer), keep_produced=keep_produced).encode(messages, **arguments)


def targets(tokenizer, encoded):
    return tokenizer.decode([i for i, m in zip(*encoded) if m])


@pytest.mark.parametrize("name", EXPECTED)
def test_two_turns_are_masked_token_by_token(family, name):
    tokenizer = family(name)
    assert encode(tokenizer, TWO_TURNS) == expected(tokenizer, EXPECTED[name])


@pytest.mark.parametrize("name", EXPECTED)
def test_the_special_tokens_of_the_family_are_single_ids(family, name):
    tokenizer = family(name)
    for token in tokenizer.all_special_tokens:
        assert len(tokenizer(token, add_special_tokens=False)["input_ids"]) == 1


@pytest.mark.parametrize("name", ["qwen2.5", "qwen3", "llama-3", "gemma", "mistral", "kimi-k2"])
def test_a_system_message_is_never_a_target(family, name):
    tokenizer = family(name)
    encoded = encode(tokenizer, [{"role": "system", "content": "Be brief."}, *TWO_TURNS[:2]])
    alone = encode(tokenizer, TWO_TURNS[:2])
    assert "Be brief." in tokenizer.decode(encoded[0])
    assert targets(tokenizer, encoded) == targets(tokenizer, alone)


@pytest.mark.parametrize("name", ["qwen2.5", "llama-3", "gemma", "mistral", "kimi-k2"])
def test_masked_whole_equals_what_the_tokenizer_itself_renders(family, name):
    tokenizer = family(name)
    ids, _ = encode(tokenizer, TWO_TURNS)
    assert ids == tokenizer.apply_chat_template(TWO_TURNS)["input_ids"]


def test_the_prompt_before_a_target_is_what_the_model_sees_when_it_samples(family):
    tokenizer = family("qwen3")
    ids, mask = encode(tokenizer, TWO_TURNS)
    prompt = tokenizer.apply_chat_template(TWO_TURNS[:1], add_generation_prompt=True)["input_ids"]
    assert ids[: mask.index(1)] == prompt


def test_qwen3_thinking_of_the_last_turn_is_learned(family):
    tokenizer = family("qwen3")
    messages = [TWO_TURNS[0], {"role": "assistant", "content": "<think>\none and one\n</think>\n\n2"}]
    pieces = [EXPECTED["qwen3"][0], "<think>\none and one\n</think>\n\n2<|im_end|>", "\n"]
    assert encode(tokenizer, messages) == expected(tokenizer, pieces)


def test_qwen3_reasoning_in_its_own_field_is_learned_too(family):
    tokenizer = family("qwen3")
    messages = [TWO_TURNS[0], {"role": "assistant", "reasoning_content": "one and one", "content": "2"}]
    pieces = [EXPECTED["qwen3"][0], "<think>\none and one\n</think>\n\n2<|im_end|>", "\n"]
    assert encode(tokenizer, messages) == expected(tokenizer, pieces)


def test_qwen3_without_thinking_leaves_the_empty_block_to_the_prompt(family):
    tokenizer = family("qwen3")
    pieces = [*EXPECTED["qwen3"][:2], EXPECTED["qwen3"][2] + "<think>\n\n</think>\n\n", "5 it is<|im_end|>", "\n"]
    assert encode(tokenizer, TWO_TURNS, enable_thinking=False) == expected(tokenizer, pieces)


THINKING_TWICE = [
    TWO_TURNS[0],
    {"role": "assistant", "content": "<think>\none and one\n</think>\n\n2"},
    TWO_TURNS[2],
    {"role": "assistant", "content": "<think>\ntwo and three\n</think>\n\n5 it is"},
]


def test_qwen3_dropping_an_earlier_thought_is_refused_with_both_token_lists(family):
    tokenizer = family("qwen3")
    with pytest.raises(DataError, match="changes an earlier assistant turn") as caught:
        encode(tokenizer, THINKING_TWICE)
    kept = tokenizer("<think>\none and one\n</think>\n\n2<|im_end|>")["input_ids"]
    left = tokenizer("2<|im_end|>")["input_ids"]
    assert str(kept) in str(caught.value) and str(left) in str(caught.value)
    assert "data.ignore_input_ids_mismatch=true" in str(caught.value)


def test_qwen3_keeps_every_thought_when_turns_are_taken_as_produced(family):
    tokenizer = family("qwen3")
    start, _, middle, _, end = EXPECTED["qwen3"]
    pieces = [
        start,
        "<think>\none and one\n</think>\n\n2<|im_end|>",
        middle,
        "<think>\ntwo and three\n</think>\n\n5 it is<|im_end|>",
        end,
    ]
    assert encode(tokenizer, THINKING_TWICE, keep_produced=True) == expected(tokenizer, pieces)


def test_qwen3_thinking_between_tool_calls_stays(family):
    tokenizer = family("qwen3")
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 1}}}
    messages = [
        TWO_TURNS[0],
        {"role": "assistant", "content": "<think>\nask\n</think>\n\n", "tool_calls": [call]},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "<think>\nso\n</think>\n\nIt is 2"},
    ]
    pieces = [
        "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n",
        '<think>\nask\n</think>\n\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 1}}\n</tool_call><|im_end|>',
        "\n<|im_start|>user\n<tool_response>\n2\n</tool_response><|im_end|>\n<|im_start|>assistant\n",
        "<think>\nso\n</think>\n\nIt is 2<|im_end|>",
        "\n",
    ]
    assert encode(tokenizer, messages) == expected(tokenizer, pieces)


def test_qwen25_tool_calls_are_learned_and_tool_answers_are_not(family):
    tokenizer = family("qwen2.5")
    schema = {"type": "function", "function": {"name": "add", "parameters": {}}}
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    messages = [
        TWO_TURNS[0],
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "7"},
        {"role": "tool", "content": "8"},
        {"role": "assistant", "content": "15"},
    ]
    encoded = encode(tokenizer, messages, tools=[schema])
    said = '\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>15<|im_end|>'
    # The template puts no newline after the role of a turn without text, so the call begins in the header's place.
    assert targets(tokenizer, encoded) == said.removeprefix("\n")


def test_two_assistant_messages_in_a_row_are_both_learned(family):
    tokenizer = family("qwen3")
    messages = [TWO_TURNS[0], {"role": "assistant", "content": "2"}, {"role": "assistant", "content": "or so"}]
    assert targets(tokenizer, encode(tokenizer, messages)) == "2<|im_end|><think>\n\n</think>\n\nor so<|im_end|>"


@pytest.mark.parametrize("name", ["qwen2.5", "qwen3", "kimi-k2"])
def test_a_conversation_may_begin_with_the_assistant(family, name):
    tokenizer = family(name)
    messages = [{"role": "assistant", "content": "Hello."}, *TWO_TURNS[:2]]
    assert targets(tokenizer, encode(tokenizer, messages)).startswith("Hello.<|im_end|>")


def test_a_template_that_refuses_the_order_of_roles_speaks_for_itself(family):
    with pytest.raises(DataError, match="must alternate user/assistant"):
        encode(family("gemma"), [TWO_TURNS[0], TWO_TURNS[0], TWO_TURNS[1]])


def test_a_conversation_without_assistant_is_refused(family):
    with pytest.raises(DataError, match="no assistant message"):
        encode(family("qwen2.5"), TWO_TURNS[:1])


def test_an_answer_that_merges_with_the_header_is_refused_with_both_token_lists(family):
    tokenizer = family("qwen2.5")
    header, answer = tokenizer("assistant\n")["input_ids"], tokenizer("\n\nyes")["input_ids"]
    whole = tokenizer("assistant\n\n\nyes")["input_ids"]
    assert header + answer != whole  # the newlines merge: this is what the test is about
    messages = [TWO_TURNS[0], {"role": "assistant", "content": "\n\nyes"}]
    with pytest.raises(DataError, match="the turns one by one have other tokens"):
        encode(tokenizer, messages)
    ids, mask = encode(tokenizer, messages, keep_produced=True)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert [i for i, m in zip(ids, mask) if m] == [*answer, end]


def test_a_tokenizer_that_looks_ahead_over_the_header_is_refused(shared):
    # GPT-2's cut leaves the last newline before a word alone: the header's two are one token at inference, two here.
    from tests.harness.families import family_template

    tokenizer = gpt2_like_tokenizer(family_template(shared, "llama-3"))
    prompt = tokenizer.apply_chat_template(TWO_TURNS[:1], add_generation_prompt=True)["input_ids"]
    with pytest.raises(DataError, match="the turns one by one have other tokens"):
        encode(tokenizer, TWO_TURNS[:2])
    ids, mask = encode(tokenizer, TWO_TURNS[:2], keep_produced=True)
    assert ids[: mask.index(1)] == prompt


def gpt2_like_tokenizer(template):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*alphabet, "ĊĊ"])}  # the byte-level spelling of two newlines
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[("Ċ", "Ċ")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<|begin_of_text|>", eos_token="<|eot_id|>", chat_template=template
    )


def test_thinking_against_enable_thinking_false_is_refused(family):
    messages = [TWO_TURNS[0], {"role": "assistant", "content": "<think>\nhm\n</think>\n\n2"}]
    with pytest.raises(DataError, match=r"cannot be told.*enable_thinking=false"):
        encode(family("qwen3"), messages, enable_thinking=False)


def test_a_template_without_end_token_is_noticed(shared):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(shared / "models" / "tinystories-260k")
    messages = [{"role": "user", "content": "Once upon"}, {"role": "assistant", "content": " a time"}]
    ids, mask = encode(tokenizer, messages)
    # This tokenizer writes a space before every text: a turn by itself has other tokens than in the conversation.
    assert ids == tokenizer("<s>Once upon a time", add_special_tokens=False)["input_ids"]
    assert tokenizer.convert_ids_to_tokens([i for i, m in zip(ids, mask) if m]) == ["▁a", "▁time"]
    assert "the chat template" in notices()
