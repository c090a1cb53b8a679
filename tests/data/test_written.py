"""What a chat template leaves out of a conversation is refused where it would be trained, and named elsewhere."""

from __future__ import annotations

import json

import pytest

from tests.harness.models import tiny_tokenizer
from tests.harness.rows import write_prompts
from tests.harness.template_structures import STRUCTURES, structure_tokenizer
from verl.data.chat_template import ChatTemplate
from verl.data.preference import PreferenceDataset
from verl.data.rl_dataset import RLHFDataset
from verl.data.sft_dataset import MultiTurnSFTDataset
from verl.data.turns import TurnFinder
from verl.errors import DataError
from verl.metrics import notices, reset_notices

USER = {"role": "user", "content": "what is it"}
ANSWER = {"role": "assistant", "content": "a cat"}
CALL = {"type": "function", "function": {"name": "look", "arguments": '{"at": "it"}'}}
CALLS = {"role": "assistant", "content": "", "tool_calls": [CALL]}
THOUGHT = {**ANSWER, "reasoning_content": "it has whiskers"}
SAID = {"role": "assistant", "content": "<think>\nit has whiskers\n</think>\n\na cat"}
TOOLS = [{"type": "function", "function": {"name": "look", "description": "looks", "parameters": {}}}]
NO_SYSTEM = "{% for m in messages if m.role != 'system' %}{{ m.content }}\n{% endfor %}"


@pytest.fixture(scope="module")
def structure():
    made = {}

    def of(name):
        if name not in made:
            made[name] = structure_tokenizer(STRUCTURES.get(name, name))
        return made[name]

    return of


def sft(tmp_path, tokenizer, messages, tools=None, **settings):
    row = {"messages": json.dumps(messages), **({"tools": json.dumps(tools)} if tools else {})}
    path = write_prompts(tmp_path / "sft.parquet", [row] * 2)
    return MultiTurnSFTDataset(path, tokenizer, {"max_length": 600, **settings})


def rl(tmp_path, tokenizer, messages):
    row = {"prompt": messages, "data_source": "d", "reward_model": {"ground_truth": "1"}}
    path = write_prompts(tmp_path / "rl.parquet", [row] * 2)
    return RLHFDataset(path, tokenizer, {"max_prompt_length": 600, "cache_dir": str(tmp_path)})


@pytest.mark.parametrize(
    ("name", "messages", "words"),
    [
        ("chatml", [USER, CALLS, {"role": "tool", "content": "fur"}, ANSWER], "message 1: .* tool_calls"),
        ("chatml", [USER, THOUGHT], "message 1: .* reasoning_content"),
        ("chatml", [USER, {**ANSWER, "function_call": CALL["function"]}], "message 1: .* function_call"),
        ("llama-3.1", [USER, {**CALLS, "content": "let me look"}], "message 1: .* content"),
        ("gpt-oss", [USER, {**CALLS, "tool_calls": [CALL, CALL]}], r"the name of call 2"),
        ("deepseek-r1", [USER, SAID], r"content of assistant messages \(before </think>\)"),
        ("deepseek-v3", [USER, ANSWER, USER, SAID], r"message 3: .*\(before </think>\)"),
    ],
)
def test_what_would_be_trained_and_is_not_written_is_refused(tmp_path, structure, name, messages, words):
    with pytest.raises(DataError, match=words) as caught:
        sft(tmp_path, structure(name), messages)
    assert "sft.parquet, row 0, column 'messages'" in str(caught.value)
    assert "custom_chat_template" in str(caught.value)


def test_a_thought_that_is_not_written_is_refused_in_pairs(tmp_path, structure):
    row = {"prompt": "what is it", "chosen": [THOUGHT], "rejected": [ANSWER]}
    path = write_prompts(tmp_path / "pairs.parquet", [row] * 2)
    with pytest.raises(DataError, match=r"column 'chosen': message 1: .* reasoning_content"):
        PreferenceDataset(path, structure("chatml"), {"max_length": 600})


@pytest.mark.parametrize(
    ("name", "messages", "tools", "key"),
    [
        ("command-r", [USER, ANSWER, {"role": "tool", "content": "fur"}, ANSWER], None, "content of tool messages"),
        ("chatml", [USER, ANSWER], TOOLS, "tools"),
        ("gpt-oss", [USER, ANSWER], TOOLS, "tools (descriptions)"),
        ("chatml", [{**USER, "note": "be brief"}, ANSWER], None, "note of user messages"),
    ],
)
def test_what_is_only_read_and_is_not_written_is_named(tmp_path, structure, name, messages, tools, key):
    sft(tmp_path, structure(name), messages, tools)
    said = notices()[f"the chat template and {key}"]
    assert "does not write" in said and "custom_chat_template" in said


def test_a_system_message_that_a_prompt_loses_is_named_with_a_way_out(tmp_path, structure):
    data = rl(tmp_path, structure(NO_SYSTEM), [{"role": "system", "content": "be brief"}, USER])
    assert "be brief" not in data.tokenizer.decode(data[0]["raw_prompt_ids"])
    assert "first user message" in notices()["the chat template and content of system messages"]


def test_thoughts_that_a_template_drops_on_purpose_have_their_notice(tmp_path, structure):
    rl(tmp_path, structure("qwen3-thinking-2507"), [USER, THOUGHT, USER])
    assert set(notices()) == {"the chat template and reasoning_content of earlier assistant messages"}
    assert "only writes this in the last turn" in "".join(notices().values())


def test_the_thoughts_of_one_template_are_tried_again_for_another_text(structure):
    lost = ChatTemplate(structure("qwen3-thinking-2507")).lost([USER, THOUGHT])
    assert not lost and ChatTemplate(structure("chatml")).lost([USER, THOUGHT])


def test_thoughts_of_earlier_turns_that_are_taken_as_produced_are_no_loss(structure):
    tokenizer = structure("lfm2")
    ids, mask = TurnFinder(ChatTemplate(tokenizer), keep_produced=True).encode([USER, SAID, USER, SAID])
    said = tokenizer.decode([i for i, there in zip(ids, mask) if there])
    assert said.count("it has whiskers") == 2 and not notices()


def test_the_switch_of_a_template_for_earlier_thoughts_is_named(tmp_path):
    template = (
        "{% for m in messages %}{{ m.role }}: {% if m.reasoning_content and (loop.last or preserve_thinking) %}"
        "{{ m.reasoning_content }} {% endif %}{{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    rl(tmp_path, structure_tokenizer(template), [USER, THOUGHT, USER])
    assert "Set preserve_thinking in data.apply_chat_template_kwargs" in "".join(notices().values())


@pytest.mark.parametrize("name", ["idefics3", "llava"])
def test_a_template_for_parts_gets_texts_as_parts(tmp_path, structure, name):
    tokenizer = structure(name)
    row = sft(tmp_path, tokenizer, [USER, ANSWER])[0]
    parts = [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in (USER, ANSWER)]
    assert row["input_ids"].tolist() == tokenizer.apply_chat_template(parts)["input_ids"]
    assert "list" in notices()["the chat template's contents"]


def test_an_argument_that_the_template_does_not_read_is_named(tmp_path):
    sft(tmp_path, tiny_tokenizer(), [USER, ANSWER], enable_thinking_default=False)
    assert "does not read" in notices()["the chat template and enable_thinking"]


def test_a_template_is_tried_once_for_conversations_of_one_shape(monkeypatch):
    template = ChatTemplate(structure_tokenizer(STRUCTURES["hermes-3"] + "{# only here #}"))
    rendered = []
    write = template._write
    monkeypatch.setattr(template, "_write", lambda *given: rendered.append(given) or write(*given))
    for number in range(5):
        call = {"function": {"name": f"tool{number}", "arguments": {f"x{number}": number + 1}}}
        said = [{**USER, "content": f"question {number}"}, {**CALLS, "content": str(number), "tool_calls": [call]}]
        assert template.lost(said) == ()
        rendered.append(None)
    assert rendered[-4:] == [None] * 4


def test_a_template_that_does_not_bear_marks_is_named():
    strict = "{% for m in messages %}{% if m.content | length > 44 %}{{ raise_exception('too long') }}{% endif %}"
    strict += "{{ m.content }}{% endfor %}"
    template = ChatTemplate(structure_tokenizer(strict))
    for _ in range(2):
        reset_notices()
        template.check_written([USER, ANSWER], learns=True)
    assert "too long" in notices()["the chat template and marks"]


def test_a_well_behaved_template_says_nothing(family):
    for name in ("qwen2.5", "qwen3", "llama-3", "gemma", "mistral", "kimi-k2"):
        system = [{"role": "system", "content": "be brief"}]
        TurnFinder(ChatTemplate(family(name))).encode([*system, USER, ANSWER, USER, ANSWER])
    assert not notices()


def test_thoughts_with_any_tags_in_them_have_one_notice(structure):
    template = ChatTemplate(structure("deepseek-v3"))
    for number in range(3):
        said = f"<think>it<tag{number}>has</tag{number}>whiskers</think>a cat"
        template.check_written([USER, {**ANSWER, "content": said}])
    assert len(notices()) == 1
