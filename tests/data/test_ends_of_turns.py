"""Where an answer ends, behind what it is trained, and in which form its calls are written."""

from __future__ import annotations

import json

import pytest

from tests.harness.template_structures import STRUCTURES, structure_tokenizer
from verl.data.chat_template import ChatTemplate
from verl.data.turns import TurnFinder
from verl.errors import DataError
from verl.metrics import notices

USER, ANSWER = {"role": "user", "content": "what is it"}, {"role": "assistant", "content": "a cat"}
TOOL = {"role": "tool", "content": "fur", "name": "look"}


def called(arguments):
    call = {"type": "function", "function": {"name": "look", "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def encode(name, messages, **options):
    tokenizer = structure_tokenizer(STRUCTURES.get(name, name))
    ids, mask = TurnFinder(ChatTemplate(tokenizer), **options).encode(messages)
    turns, trained = [], False
    for token, target in zip(ids, mask):
        if target and not trained:
            turns.append([])
        if target:
            turns[-1].append(token)
        trained = bool(target)
    return tokenizer.decode(ids), [tokenizer.decode(turn) for turn in turns]


def test_a_token_that_opens_the_next_turn_is_trained_if_nothing_ends_one():
    text, turns = encode("glm-4", [USER, ANSWER, TOOL, ANSWER, USER, ANSWER])
    assert turns == ["\na cat<|observation|>", "\na cat<|user|>", "\na cat"]
    assert text == structure_tokenizer(STRUCTURES["glm-4"]).apply_chat_template(
        [USER, ANSWER, TOOL, ANSWER, USER, ANSWER], tokenize=False
    )
    assert "eos_token_id" in notices()["the chat template's end of a turn"]
    assert "where to stop" in notices()["the chat template"]


def test_a_call_that_ends_with_a_special_token_is_followed_by_the_opener():
    _, turns = encode("glm-4.5", [USER, called({"at": "it"}), TOOL, ANSWER])
    assert turns[0].endswith("</tool_call><|observation|>")


def test_two_answers_in_a_row_have_no_opener_between_them():
    _, turns = encode("glm-4", [USER, ANSWER, ANSWER])
    assert turns == ["\na cat", "\na cat"]


@pytest.mark.parametrize("keep", [False, True])
def test_what_ends_every_rendering_is_no_part_of_a_turn(keep):
    text, turns = encode("phi-3", [USER, ANSWER, USER, ANSWER], keep_produced=keep)
    assert turns == ["a cat<|end|>", "a cat<|end|>"]
    assert text.count("<|endoftext|>") == 1 and text.endswith("<|end|>\n<|endoftext|>")


def test_an_end_of_text_that_only_ends_the_rendering_is_trained_there_only():
    template = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
    template += "{% if add_generation_prompt %}<|assistant|>{% else %}<|endoftext|>{% endif %}"
    _, turns = encode(template, [USER, ANSWER, USER, ANSWER])
    assert turns == ["a cat<|user|>", "a cat<|endoftext|>"]


def test_both_tokens_of_an_end_of_two_are_trained():
    _, turns = encode("command-r7b", [USER, ANSWER, USER, ANSWER])
    assert [turn[-len("<|END_RESPONSE|><|END_OF_TURN_TOKEN|>") :] for turn in turns] == [
        "<|END_RESPONSE|><|END_OF_TURN_TOKEN|>"
    ] * 2


def test_text_that_ends_a_turn_stays_in_it():
    template = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }} over.\n{% endfor %}"
    template += "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    _, turns = encode(template, [USER, ANSWER, USER, ANSWER])
    assert turns == ["a cat over.\n<|user|>", "a cat over.\n"]


def test_another_end_in_the_middle_than_at_the_end_is_refused_as_before():
    with pytest.raises(DataError, match=r"a cat<\|return\|>' becomes .*a cat<\|end\|>'"):
        encode("gpt-oss", [USER, ANSWER, USER, ANSWER])


@pytest.mark.parametrize(
    ("name", "messages", "where"),
    [("deepseek-r1", [USER, ANSWER], "an answer"), ("qwen3-thinking-2507", [USER, ANSWER] * 2, "an earlier answer")],
)
def test_a_generation_prompt_that_is_not_before_an_answer_is_named(name, messages, where):
    encode(name, messages)
    said = notices()[f"the chat template's generation prompt before {where}"]
    assert r"'<think>\n'" in said and "custom_chat_template" in said


ARGUMENTS = '{"x":  1.50, "y": "ü"}'


def written(name, arguments):
    text, _ = encode(name, [USER, called(arguments)])
    return text


def test_arguments_as_text_stay_the_text_where_a_template_writes_text():
    for name in ("deepseek-v3", "magistral"):
        assert ARGUMENTS in written(name, ARGUMENTS)


def test_arguments_as_text_become_an_object_where_a_template_writes_one():
    for name in ("hermes-3", "llama-3.1", "mistral-v3"):
        assert '{"x": 1.5, "y": "ü"}' in written(name, ARGUMENTS)
    assert "<arg_key>x</arg_key><arg_value>1.5</arg_value>" in written("glm-4.5", ARGUMENTS)


def test_an_object_becomes_text_where_a_template_only_writes_text():
    for name in ("deepseek-v3", "hermes-3"):
        assert '{"x": 1.5, "y": "ü"}' in written(name, json.loads(ARGUMENTS))


def test_an_object_is_given_where_text_would_be_written_in_another_form():
    template = (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% for c in m.tool_calls or [] %}"
        "{% set given = c.function.arguments %}{{ c.function.name }}({% if given is string %}{{ given }}{% else %}"
        "{% for k, v in given.items() %}{{ k }}:{{ v }},{% endfor %}{% endif %}){% endfor %}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    assert "look(x:1.5,y:ü,)" in written(template, ARGUMENTS)


def test_what_is_no_object_stays_as_it_was_given():
    for name in ("hermes-3", "magistral"):
        assert "just look" in written(name, "just look")
