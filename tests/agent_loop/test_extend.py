"""Conversations of three turns in the real templates, token for token against pieces that were written by hand.

A piece is one stretch of text between two special tokens, or one answer. What the model samples is given as single
bytes: tokens that no tokenizer would choose for the text, so that anything that goes through text is found out.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.harness.conversations import Script, manager, rollout, rows, schema, tool_file, user_file
from tests.harness.families import FAMILIES, family_tokenizer
from verl.agent_loop.extend import Extender
from verl.errors import RolloutError

QUESTION = [{"role": "user", "content": "What is it?"}]
SAID = ["Five. Or six ", " It is\nsix.", "six"]
ASKED = ["Are you sure?", "  One word. "]
TRIMMED = [text.strip() for text in ASKED]

Piece = tuple[str, int]

USER_TURNS: dict[str, list[Piece]] = {
    "qwen2.5": [
        (SAID[0], 1), ("<|im_end|>", 1), ("\n<|im_start|>user\nAre you sure?<|im_end|>\n<|im_start|>assistant\n", 0),
        (SAID[1], 1), ("<|im_end|>", 1), ("\n<|im_start|>user\n  One word. <|im_end|>\n<|im_start|>assistant\n", 0),
        (SAID[2], 1), ("<|im_end|>", 1),
    ],
    "qwen3": [
        (SAID[0], 1), ("<|im_end|>", 1), ("\n<|im_start|>user\nAre you sure?<|im_end|>\n<|im_start|>assistant\n", 0),
        (SAID[1], 1), ("<|im_end|>", 1), ("\n<|im_start|>user\n  One word. <|im_end|>\n<|im_start|>assistant\n", 0),
        (SAID[2], 1), ("<|im_end|>", 1),
    ],
    "llama-3": [
        (SAID[0], 1), ("<|eot_id|>", 1),
        ("<|start_header_id|>user<|end_header_id|>\n\nAre you sure?<|eot_id|>"
         "<|start_header_id|>assistant<|end_header_id|>\n\n", 0),
        (SAID[1], 1), ("<|eot_id|>", 1),
        ("<|start_header_id|>user<|end_header_id|>\n\nOne word.<|eot_id|>"
         "<|start_header_id|>assistant<|end_header_id|>\n\n", 0),
        (SAID[2], 1), ("<|eot_id|>", 1),
    ],
    "gemma": [
        (SAID[0], 1), ("<end_of_turn>", 1),
        ("\n<start_of_turn>user\nAre you sure?<end_of_turn>\n<start_of_turn>model\n", 0),
        (SAID[1], 1), ("<end_of_turn>", 1),
        ("\n<start_of_turn>user\nOne word.<end_of_turn>\n<start_of_turn>model\n", 0),
        (SAID[2], 1), ("<end_of_turn>", 1),
    ],
    "mistral": [
        (SAID[0], 1), ("</s>", 1), ("[INST] Are you sure? [/INST]", 0),
        (SAID[1], 1), ("</s>", 1), ("[INST] One word. [/INST]", 0),
        (SAID[2], 1), ("</s>", 1),
    ],
    "kimi-k2": [
        (SAID[0], 1), ("<|im_end|>", 1),
        ("<|im_user|>user<|im_middle|>Are you sure?<|im_end|><|im_assistant|>assistant<|im_middle|>", 0),
        (SAID[1], 1), ("<|im_end|>", 1),
        ("<|im_user|>user<|im_middle|>  One word. <|im_end|><|im_assistant|>assistant<|im_middle|>", 0),
        (SAID[2], 1), ("<|im_end|>", 1),
    ],
}  # fmt: skip
PROMPTS = {
    "qwen2.5": "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n"
    "<|im_start|>user\nWhat is it?<|im_end|>\n<|im_start|>assistant\n",
    "qwen3": "<|im_start|>user\nWhat is it?<|im_end|>\n<|im_start|>assistant\n",
    "llama-3": "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nWhat is it?<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n",
    "gemma": "<start_of_turn>user\nWhat is it?<end_of_turn>\n<start_of_turn>model\n",
    "mistral": "<s>[INST] What is it? [/INST]",
    "kimi-k2": "<|im_system|>system<|im_middle|>You are a helpful assistant<|im_end|>"
    "<|im_user|>user<|im_middle|>What is it?<|im_end|><|im_assistant|>assistant<|im_middle|>",
}


def sampled_ids(tokenizer: Any, text: str) -> list[int]:
    """A text as single bytes, special tokens in it as themselves."""
    specials = "|".join(re.escape(token) for token in tokenizer.get_added_vocab())
    parts = [part for part in re.split(f"({specials})", text) if part]
    pieces = [[part] if part in tokenizer.get_added_vocab() else list(part) for part in parts]
    return [i for piece in pieces for text in piece for i in encode(tokenizer, text)]


def encode(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def expected(tokenizer: Any, pieces: list[Piece]) -> tuple[list[int], list[int]]:
    ids, mask = [], []
    for text, sampled in pieces:
        piece = sampled_ids(tokenizer, text) if sampled else encode(tokenizer, text)
        ids += piece
        mask += [sampled] * len(piece)
    return ids, mask


def answers(tokenizer: Any, pieces: list[Piece]) -> list[list[int]]:
    """What the sampler returns per turn: adjacent pieces of mask 1."""
    found: list[list[int]] = [[]]
    for text, sampled in pieces:
        if sampled:
            found[-1] += sampled_ids(tokenizer, text)
        elif found[-1]:
            found.append([])
    return [ids for ids in found if ids]


def run(shared: Path, tmp_path: Path, family: str, pieces: list[Piece], prompt: str, prompt_rows: Any, **settings: Any):
    tokenizer = family_tokenizer(shared, family)
    script = Script(answers(tokenizer, pieces))
    batch = manager(rollout(multi_turn__enable=True, **settings), script, tokenizer).generate_sequences(prompt_rows)
    ids, mask = expected(tokenizer, pieces)
    assert batch.batch["prompts"][0].tolist() == encode(tokenizer, prompt)
    assert batch.batch["responses"][0].tolist() == ids, tokenizer.decode(batch.batch["responses"][0])
    assert batch.batch["response_mask"][0].tolist() == mask
    for request, length in zip(script.requests, ends(mask)):
        assert list(request.token_ids) == encode(tokenizer, prompt) + ids[:length], "what was sampled is gone on from"
    return tokenizer, batch


def ends(mask: list[int]) -> list[int]:
    """Where each answer begins."""
    return [i for i in range(len(mask)) if mask[i] and (i == 0 or not mask[i - 1])]


def test_every_family_has_its_expectation():
    assert set(USER_TURNS) == set(PROMPTS) == set(FAMILIES)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_three_turns_with_a_user_are_extended_token_for_token(shared, tmp_path, family):
    users = user_file(tmp_path, "ScriptedUser", texts=ASKED)
    table = rows(QUESTION, interaction_kwargs=[{"name": "user"}])
    pieces = USER_TURNS[family]
    _, batch = run(shared, tmp_path, family, pieces, PROMPTS[family], table, multi_turn__interaction_config_path=users)
    assert batch.non_tensor_batch["__num_turns__"].tolist() == [6], "three answers, two user turns, one question"
    assert batch.non_tensor_batch["turn_scores"][0] == [0.5, 0.5, 1.0]
    assert batch.non_tensor_batch["reward_scores"][0] == {"user": 2.0}
    log_probs, mask = batch.batch["rollout_log_probs"][0], batch.batch["response_mask"][0].bool()
    assert bool((log_probs[mask] < 0).all()) and bool((log_probs[~mask] == 0).all())
    versions = batch.batch["token_versions"][0]
    assert versions[mask].eq(7).all() and versions[~mask].eq(-1).all()


CALL = '<tool_call>\n{"name": "echo", "arguments": {"text": "six"}}\n</tool_call>'
THOUGHT = "<think>\nLet me ask.\n</think>\n\n"
TOOL_TURNS: dict[str, list[Piece]] = {
    "qwen2.5": [
        (CALL, 1), ("<|im_end|>", 1),
        ("\n<|im_start|>user\n<tool_response>\nsix\n</tool_response><|im_end|>\n<|im_start|>assistant\n", 0),
        ("Again. " + CALL, 1), ("<|im_end|>", 1),
        ("\n<|im_start|>user\n<tool_response>\nsix\n</tool_response><|im_end|>\n<|im_start|>assistant\n", 0),
        ("It is six.", 1), ("<|im_end|>", 1),
    ],
    "qwen3": [
        (THOUGHT + CALL, 1), ("<|im_end|>", 1),
        ("\n<|im_start|>user\n<tool_response>\nsix\n</tool_response><|im_end|>\n<|im_start|>assistant\n", 0),
        ("<think>\n\n</think>\n\n" + CALL, 1), ("<|im_end|>", 1),
        ("\n<|im_start|>user\n<tool_response>\nsix\n</tool_response><|im_end|>\n<|im_start|>assistant\n", 0),
        ("It is six.", 1), ("<|im_end|>", 1),
    ],
    "kimi-k2": [
        (CALL, 1), ("<|im_end|>", 1),
        ("<|im_system|>tool<|im_middle|>six<|im_end|><|im_assistant|>assistant<|im_middle|>", 0),
        (CALL, 1), ("<|im_end|>", 1),
        ("<|im_system|>tool<|im_middle|>six<|im_end|><|im_assistant|>assistant<|im_middle|>", 0),
        ("It is six.", 1), ("<|im_end|>", 1),
    ],
    "llama-3": [
        (CALL, 1), ("<|eot_id|>", 1),
        ("<|start_header_id|>user<|end_header_id|>\n\nsix<|eot_id|>"
         "<|start_header_id|>assistant<|end_header_id|>\n\n", 0),
        ("It is six.", 1), ("<|eot_id|>", 1),
    ],
    "gemma": [
        (CALL, 1), ("<end_of_turn>", 1), ("\n<start_of_turn>user\nsix<end_of_turn>\n<start_of_turn>model\n", 0),
        ("It is six.", 1), ("<end_of_turn>", 1),
    ],
    "mistral": [
        (CALL, 1), ("</s>", 1), ("[INST] six [/INST]", 0), ("It is six.", 1), ("</s>", 1),
    ],
}  # fmt: skip


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_turns_with_a_tool_are_extended_token_for_token(shared, tmp_path, family):
    """Templates without tool turns get the answer as a user's turn; those with tools show the schema in the prompt."""
    echo = schema("echo", text={"type": "string"})
    table = rows(QUESTION)
    pieces = TOOL_TURNS[family]
    tokenizer = family_tokenizer(shared, family)
    prompt = tokenizer.apply_chat_template(QUESTION, tools=[echo], add_generation_prompt=True, tokenize=False)
    assert ('"name": "echo"' in prompt) == (family in ("qwen2.5", "qwen3", "kimi-k2"))
    tools = tool_file(tmp_path, ("Echo", echo))
    _, batch = run(shared, tmp_path, family, pieces, prompt, table, multi_turn__tool_config_path=tools)
    count = len(ends(batch.batch["response_mask"][0].tolist())) - 1
    assert batch.non_tensor_batch["tool_call_counts"].tolist() == [count]


def test_a_template_that_forgets_earlier_thinking_is_reported_with_the_tokens_of_both_sides(shared, tmp_path):
    tokenizer = family_tokenizer(shared, "qwen3")
    first = THOUGHT + "Five."
    pieces = [
        (first, 1), ("<|im_end|>", 1),
        ("\n<|im_start|>user\nAre you sure?<|im_end|>\n<|im_start|>assistant\n", 0), ("Yes.", 1), ("<|im_end|>", 1),
    ]  # fmt: skip
    users = user_file(tmp_path, "ScriptedUser", texts=ASKED[:1])
    table = rows(QUESTION, interaction_kwargs=[{"name": "user"}])
    settings = {"multi_turn__interaction_config_path": users}
    _, batch = run(shared, tmp_path, "qwen3", pieces, PROMPTS["qwen3"], table, **settings)
    assert batch.meta_info["metrics"]["agent_loop/rendered_differently"].value == 1.0
    found = Extender(tokenizer).difference(
        encode(tokenizer, PROMPTS["qwen3"]) + expected(tokenizer, pieces)[0],
        [*QUESTION, {"role": "assistant", "content": first}, {"role": "user", "content": "Are you sure?"},
         {"role": "assistant", "content": "Yes."}],
    )  # fmt: skip
    assert found is not None and found.position == len(encode(tokenizer, PROMPTS["qwen3"]))
    assert found.recorded[0] == tokenizer.convert_tokens_to_ids("<think>")
    assert found.rendered[:2] == tuple(encode(tokenizer, "Five."))[:2]
    assert "<think>" in str(found) and str(list(found.rendered)) in str(found)


def test_a_conversation_that_renders_to_its_own_tokens_is_not_reported(shared):
    tokenizer = family_tokenizer(shared, "qwen2.5")
    extender = Extender(tokenizer)
    messages = [*QUESTION, {"role": "assistant", "content": "Five."}]
    recorded = extender.prompt(QUESTION) + encode(tokenizer, "Five.<|im_end|>")
    assert extender.difference(recorded, messages) is None
    spaced = extender.prompt(QUESTION) + encode(tokenizer, "Five. \n<|im_end|>")
    found = extender.difference(spaced, messages)
    assert found is not None and found.only_space


def test_an_answer_that_ended_with_another_token_keeps_it_and_gets_the_templates_end_too(shared):
    tokenizer = family_tokenizer(shared, "qwen2.5")
    sampled = encode(tokenizer, "Five.<|endoftext|>")
    found = Extender(tokenizer).after(
        sampled, QUESTION, {"role": "assistant", "content": "Five."}, [{"role": "user", "content": "x"}]
    )
    assert found == encode(tokenizer, "<|im_end|>\n<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n")


def test_a_template_that_needs_the_calls_of_an_answer_is_given_them(shared):
    """As GPT-OSS's does: a tool turn is named after the call before it, and refused without one."""
    tokenizer = family_tokenizer(shared, "qwen2.5")
    tokenizer.chat_template = (
        "{%- for m in messages %}{%- if m.role == 'tool' %}"
        "{%- if not messages[loop.index0 - 1].tool_calls %}{{ raise_exception('no call before') }}{%- endif %}"
        "<|im_start|>{{ messages[loop.index0 - 1].tool_calls[-1].function.name }}\n{{ m.content }}<|im_end|>"
        "{%- else %}<|im_start|>{{ m.role }}\n{{ m.content }}"
        "{%- for c in m.tool_calls or [] %}[{{ c.function.name }} {{ c.function.arguments | tojson }}]{%- endfor %}"
        "<|im_end|>{%- endif %}{%- endfor %}{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    from verl.agent_loop.extend import assistant_message

    call = {"id": "call00000", "type": "function", "function": {"name": "echo", "arguments": {"text": "six"}}}
    found = Extender(tokenizer).after(
        encode(tokenizer, "whatever<|im_end|>"),
        QUESTION,
        assistant_message("whatever", "", [call]),
        [{"role": "tool", "content": "six", "name": "echo"}],
    )
    assert found == encode(tokenizer, "<|im_start|>echo\nsix<|im_end|><|im_start|>assistant\n")


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages[0].content }}<|im_end|>",
        "{% for m in messages %}{% if m.role != 'assistant' %}{{ m.content }}{% endif %}{% endfor %}",
    ],
    ids=["only the first message", "answers left out"],
)
def test_a_template_that_cannot_be_gone_on_with_is_an_error_that_says_so(shared, template):
    tokenizer = family_tokenizer(shared, "qwen2.5")
    tokenizer.chat_template = template
    for new in ({"role": "tool", "content": "six"}, {"role": "user", "content": "six"}):
        with pytest.raises(RolloutError, match="cannot be gone on with"):
            Extender(tokenizer).after([5], QUESTION, {"role": "assistant", "content": "a"}, [new])


def inside(answer):
    """A template that writes what tools answer into the answer that called them."""
    replies = "{% for t in messages if t.role == 'tool' %}({{ t.content }}){% endfor %}"
    calls = "{% for c in m.tool_calls or [] %}[{{ c.function.arguments | tojson }}]" + replies + "{% endfor %}"
    return (
        "{% for m in messages if m.role != 'tool' %}<|im_start|>{{ m.role }}\n" + answer.replace("CALLS", calls) +
        "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )  # fmt: skip


def calling(*names):
    from verl.agent_loop.extend import assistant_message

    calls = [{"type": "function", "function": {"name": name, "arguments": '{"text": "six"}'}} for name in names]
    return assistant_message("whatever", "", calls)


@pytest.mark.parametrize("template", [inside("CALLS{{ m.content }}"), inside("{{ m.content }}CALLS")])
def test_an_answer_of_a_tool_inside_the_models_turn_is_not_lost(shared, template):
    tokenizer = family_tokenizer(shared, "qwen2.5")
    tokenizer.chat_template = template
    new = [{"role": "tool", "content": "sixty", "name": "echo"}]
    after = Extender(tokenizer).after(encode(tokenizer, "whatever<|im_end|>"), QUESTION, calling("echo"), new)
    assert after == encode(tokenizer, "\n<|im_start|>user\nsixty<|im_end|>\n<|im_start|>assistant\n")


def test_calls_that_a_template_cannot_answer_end_only_their_conversation(shared):
    """A template that writes one answer: a policy that calls twice ends its trajectory, not the run."""
    from verl.agent_loop.extend import TemplateContinuationError

    tokenizer = family_tokenizer(shared, "qwen2.5")
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'tool' and messages[loop.index0 - 1].role == 'tool' %}"
        "{% elif m.role == 'user' and loop.index0 > 1 %}{{ raise_exception('one question') }}"
        "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    extender, sampled = Extender(tokenizer), encode(tokenizer, "whatever<|im_end|>")
    reply = {"role": "tool", "content": "six", "name": "echo"}
    after = extender.after(sampled, QUESTION, calling("echo"), [reply])
    assert after == encode(tokenizer, "\n<|im_start|>tool\nsix<|im_end|>\n<|im_start|>assistant\n")
    with pytest.raises(TemplateContinuationError, match="leaves out what follows"):
        extender.after(sampled, QUESTION, calling("echo", "echo"), [reply, reply])


def test_the_form_that_ends_as_the_answer_did_goes_first(shared):
    """As FunctionGemma's does: a call ends with what opens the response, in the same turn."""
    tokenizer = family_tokenizer(shared, "qwen2.5")
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'tool' %}<tool_call>{{ m.content }}</tool_call>"
        "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}"
        "{% for c in m.tool_calls or [] %}[{{ c.function.arguments | tojson }}]{% endfor %}"
        "{% if not m.tool_calls %}<|im_end|>\n{% endif %}{% endif %}{% endfor %}"
    )
    sampled = encode(tokenizer, "whatever<tool_call>")
    after = Extender(tokenizer).after(sampled, QUESTION, calling("echo"), [{"role": "tool", "content": "six"}])
    assert after == encode(tokenizer, "six</tool_call>")


def test_what_a_template_leaves_out_of_a_prompt_is_named(shared):
    from verl.metrics import notices

    tokenizer = family_tokenizer(shared, "llama-3")
    Extender(tokenizer).prompt(QUESTION, [{"type": "function", "function": {"name": "echo", "parameters": {}}}])
    assert "system message" in notices()["the chat template and tools"]


def test_an_endpoint_passes_nulls_and_arguments_on_as_they_are():
    from verl.agent_loop.server.protocol import read_chat

    seat = {"type": ["string", "null"], "default": None, "enum": ["a", None]}
    parameters = {"type": "object", "properties": {"seat": seat}}
    tool = {"type": "function", "function": {"name": "book", "parameters": parameters}}
    call = {"id": "call00000", "type": "function", "function": {"name": "book", "arguments": '{"seat":  null}'}}
    said = [*QUESTION, {"role": "assistant", "content": None, "tool_calls": [call]}]
    ask = read_chat({"model": "policy", "messages": said, "tools": [tool]})
    assert ask.tools == (tool,) and ask.messages[1]["tool_calls"] == [call]
