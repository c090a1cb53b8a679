"""Anthropic's messages and OpenAI's responses by their stock clients: rows equal those of chat completions."""

from __future__ import annotations

import json
from types import SimpleNamespace

import anthropic
import openai
import pytest

from tests.agent_loop.server.scripted import END, Scripted, ids, rollout
from tests.agent_loop.server.test_bad_requests import ask, visit
from tests.agent_loop.server.test_images import RED, url
from verl.agent_loop.parsers import ToolParser

USER = {"role": "user", "content": "hi"}
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}}}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"


def claude(base_url, api_key) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=base_url, api_key=api_key, max_retries=0)


def stock(base_url, api_key) -> openai.OpenAI:
    return openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0)


def by_chat(base_url, api_key, row, model):
    """A system prompt, a text and a call, the tool's answer, and a last answer."""
    create = stock(base_url, api_key).chat.completions.create
    tool = {"type": "function", "function": {"name": "add", "description": "adds", "parameters": PARAMETERS}}
    messages = [{"role": "system", "content": "be brief"}, USER]
    first = create(model=model, messages=messages, tools=[tool]).choices[0].message
    answer = {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "2"}
    return create(model=model, messages=[*messages, first, answer], tools=[tool]).choices[0].message.content


def by_messages(base_url, api_key, row, model):
    create = claude(base_url, api_key).messages.create
    tool = {"name": "add", "description": "adds", "input_schema": PARAMETERS}
    known = {"model": model, "max_tokens": 90, "system": [{"type": "text", "text": "be brief"}], "tools": [tool]}
    first = create(messages=[USER], **known)
    *_, call = first.content
    assert (first.stop_reason, call.type, call.name, call.input) == ("tool_use", "tool_use", "add", {"a": 1})
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "2"}]}
    messages = [USER, {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    last = create(messages=messages, **known)
    assert last.stop_reason == "end_turn" and last.usage.output_tokens == 2
    return last.content[0].text


def by_streamed_messages(base_url, api_key, row, model):
    create = claude(base_url, api_key).messages.stream
    tool = {"name": "add", "description": "adds", "input_schema": PARAMETERS}
    known = {"model": model, "max_tokens": 90, "system": "be brief", "tools": [tool]}
    with create(messages=[USER], **known) as stream:
        first = stream.get_final_message()
    *_, call = first.content
    assert (first.stop_reason, call.input) == ("tool_use", {"a": 1})
    messages = [USER, {"role": "assistant", "content": first.content}]
    messages.append({"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "2"}]})
    with create(messages=messages, **known) as stream:
        return "".join(stream.text_stream)


def by_responses(base_url, api_key, row, model):
    create = stock(base_url, api_key).responses.create
    tool = {"type": "function", "name": "add", "description": "adds", "parameters": PARAMETERS}
    known = {"model": model, "instructions": "be brief", "tools": [tool]}
    first = create(input="hi", **known)
    call = next(item for item in first.output if item.type == "function_call")
    assert (call.name, json.loads(call.arguments), first.status) == ("add", {"a": 1}, "completed")
    answer = {"type": "function_call_output", "call_id": call.call_id, "output": "2"}
    return create(input=[USER, *first.output, answer], **known).output_text


def by_responses_of_before(base_url, api_key, row, model):
    create = stock(base_url, api_key).responses.create
    tool = {"type": "function", "name": "add", "description": "adds", "parameters": PARAMETERS}
    known = {"model": model, "instructions": "be brief", "tools": [tool]}
    first = create(input="hi", **known)
    answer = {"type": "function_call_output", "call_id": first.output[-1].call_id, "output": "2"}
    return create(input=[answer], previous_response_id=first.id, **known).output_text


def by_streamed_responses(base_url, api_key, row, model):
    client = stock(base_url, api_key)
    tool = {"type": "function", "name": "add", "description": "adds", "parameters": PARAMETERS}
    known = {"model": model, "instructions": "be brief", "tools": [tool]}
    with client.responses.stream(input="hi", **known) as stream:
        first = stream.get_final_response()
    answer = {"type": "function_call_output", "call_id": first.output[-1].call_id, "output": "2"}
    items = [USER, *(item.model_dump(exclude={"parsed_arguments", "parsed"}) for item in first.output), answer]
    with client.responses.stream(input=items, **known) as stream:
        return "".join(event.delta for event in stream if event.type == "response.output_text.delta")


CLIENTS = [by_messages, by_streamed_messages, by_responses, by_responses_of_before, by_streamed_responses]


@pytest.mark.parametrize("script", [f"I add. {CALL}", CALL], ids=["text-and-call", "call"])
@pytest.mark.parametrize("agent", CLIENTS)
def test_every_form_makes_the_row_of_chat_completions(agent, script):
    answers = []

    def recorded(inner):
        def agent(**arguments):
            answers.append(inner(**arguments))
            return 0.5

        return agent

    expected = rollout(Scripted(script, "2"), recorded(by_chat), on_error="raise").batch
    batch = rollout(Scripted(script, "2"), recorded(agent), on_error="raise").batch
    assert answers == ["2", "2"]
    for name in ("prompts", "responses", "response_mask", "rollout_log_probs", "rm_scores"):
        assert batch[name].tolist() == expected[name].tolist(), name
    assert batch["response_mask"].sum() == len(ids(script)) + 1 + 2, "two answers with their ends are one row"


@pytest.mark.parametrize(
    ("script", "options", "reason", "text"),
    [
        ("one", {"max_tokens": 50}, "end_turn", "one"),
        ("one", {"max_tokens": 2}, "max_tokens", "on"),
        ("one", {"max_tokens": 4096}, "end_turn", "one"),
        ("abSTOPcd", {"max_tokens": 50, "stop_sequences": ["never", "STOP"]}, "stop_sequence", "ab"),
        ("xxSTOP", {"max_tokens": 50, "stop_sequences": ["OP", "STOP"]}, "stop_sequence", "xx"),
        ("", {"max_tokens": 50}, "end_turn", ""),
    ],
    ids=["end", "length", "more-than-a-rollout-has", "stop", "overlapping-stops", "empty"],
)
def test_a_message_says_why_it_ended(script, options, reason, text):
    def agent(base_url, api_key, row, model):
        answer = claude(base_url, api_key).messages.create(model=model, messages=[USER], **options)
        assert (answer.stop_reason, answer.content[0].text) == (reason, text)
        assert answer.stop_sequence == ("STOP" if reason == "stop_sequence" else None)

    rollout(Scripted(script), agent, on_error="raise")


def test_a_response_that_its_length_cuts_is_incomplete_and_has_log_probs():
    def agent(base_url, api_key, row, model):
        options = {"max_output_tokens": 2, "include": ["message.output_text.logprobs"]}
        answer = stock(base_url, api_key).responses.create(model=model, input=[USER], **options)
        assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        assert [entry.logprob for entry in answer.output[0].content[0].logprobs] == [-0.25, -0.5]
        assert (answer.usage.output_tokens, answer.output_text) == (2, "on")

    rollout(Scripted("one"), agent, on_error="raise")


def test_tokens_of_a_prompt_are_counted_without_a_sample():
    def agent(base_url, api_key, row, model):
        client = claude(base_url, api_key)
        count = client.messages.count_tokens(model=model, messages=[USER]).input_tokens
        first = client.messages.create(model=model, messages=[USER], max_tokens=9)
        assert first.usage.input_tokens == count == len(ids("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"))
        more = [USER, {"role": "assistant", "content": first.content}, USER]
        between = ids("\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
        assert client.messages.count_tokens(model=model, messages=more).input_tokens == count + 4 + len(between)

    sampler = Scripted("one")
    rollout(sampler, agent, on_error="raise")
    assert len(sampler.requests) == 1


@pytest.mark.parametrize("form", ["messages", "responses"])
def test_images_of_both_forms_reach_the_sampler(seeing_tokenizer, processor, form):
    def agent(base_url, api_key, row, model):
        if form == "messages":
            source = {"type": "base64", "media_type": "image/png", "data": url(RED).partition(",")[2]}
            parts = [{"type": "image", "source": source}, {"type": "text", "text": "What?"}]
            messages = [{"role": "user", "content": parts}]
            claude(base_url, api_key).messages.create(model=model, max_tokens=20, messages=messages)
        else:
            parts = [{"type": "input_image", "image_url": url(RED)}, {"type": "input_text", "text": "What?"}]
            stock(base_url, api_key).responses.create(model=model, input=[{"role": "user", "content": parts}])

    sampler = Scripted("red", tokenizer=seeing_tokenizer)
    rollout(sampler, agent, processor=processor, on_error="raise")
    (request,) = sampler.requests
    assert [image.getpixel((0, 0)) for image in request.images] == [(255, 0, 0)]
    assert request.token_ids.count(processor.placeholder_id) == 4


def test_a_key_may_come_in_the_header_of_anthropic():
    def check(base_url, key):
        body = {"model": "policy", "max_tokens": 9, "messages": [USER]}
        for named, status in ((key, 200), ("sk-other", 401)):
            headers = {"authorization": "", "x-api-key": named}
            assert ask(base_url, key, body, MESSAGES, headers=headers)[0] == status

    visit(check, Scripted("one", "fine"), branches="last")


def test_a_client_of_anthropic_lists_the_models():
    def agent(base_url, api_key, row, model):
        client = claude(base_url, api_key)
        assert [entry.id for entry in client.models.list()] == ["policy", "gpt-x"]
        assert client.models.retrieve("gpt-x").display_name == "gpt-x"
        client.messages.create(model=model, messages=[USER], max_tokens=9)

    rollout(Scripted("one"), agent, on_error="raise", models=["policy", "gpt-x"])


def test_a_client_with_one_kind_of_number_continues_its_conversation():
    """JavaScript reads 1.0 and writes 1."""
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1.0, "b": [2.0, {"c": 2.5}]}}\n</tool_call>'

    def agent(base_url, api_key, row, model):
        create = stock(base_url, api_key).chat.completions.create
        tool = {"type": "function", "function": {"name": "add", "parameters": PARAMETERS}}
        first = create(model=model, messages=[USER], tools=[tool]).choices[0].message.model_dump(exclude_none=True)
        first["tool_calls"][0]["function"]["arguments"] = '{"a": 1, "b": [2, {"c": 2.5}]}'
        answer = {"role": "tool", "tool_call_id": first["tool_calls"][0]["id"], "content": "2"}
        create(model=model, messages=[USER, first, answer], tools=[tool])

    batch = rollout(Scripted(call, "done"), agent, on_error="raise").batch
    assert len(batch["responses"]) == 1, "the second call continues the first one's trajectory"
    assert batch["responses"][0].tolist()[: len(ids(call))] == ids(call)


ANTHROPIC = {"model": "policy", "max_tokens": 9, "messages": [USER]}
RESPONSE = {"model": "policy", "input": "hi"}


def content(*blocks, role="user"):
    return ANTHROPIC | {"messages": [{"role": role, "content": list(blocks)}, USER]}


REFUSED = [
    (MESSAGES, [], "body"),
    (MESSAGES, ANTHROPIC | {"messages": "hi"}, "messages"),
    (MESSAGES, ANTHROPIC | {"messages": [5]}, "messages[0].role"),
    (MESSAGES, ANTHROPIC | {"messages": [USER, {"role": "assistant", "content": "The"}]}, "prefill"),
    (MESSAGES, ANTHROPIC | {"thinking": {"type": "enabled", "budget_tokens": 9}}, "thinking"),
    (MESSAGES, ANTHROPIC | {"temprature": 1}, "temprature"),
    (MESSAGES, ANTHROPIC | {"max_tokens": 0}, "max_tokens"),
    (MESSAGES, ANTHROPIC | {"stop_sequences": "x"}, "stop_sequences"),
    (MESSAGES, ANTHROPIC | {"tool_choice": {"type": "any"}}, "tool_choice"),
    (MESSAGES, ANTHROPIC | {"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0]"),
    (MESSAGES, ANTHROPIC | {"tools": [{"name": "add", "input_schema": 5}]}, "parameters"),
    (MESSAGES, content({"type": "document"}), "messages[0].content[0]"),
    (MESSAGES, content({"type": "thinking", "thinking": "x"}, role="assistant"), "thinking"),
    (MESSAGES, content({"type": "image", "source": {"type": "url", "url": "http://x"}}), "addresses"),
    (MESSAGES, content("text"), "messages[0].content"),
    (MESSAGES, content(), "messages[0].content"),
    (MESSAGES, content({"type": "tool_result", "content": "2"}), "messages[0].content[0].tool_use_id"),
    (MESSAGES, content({"type": "tool_use", "name": "add"}, role="assistant"), "messages[0].content[0].id"),
    (MESSAGES, {"model": "policy", "messages": [USER]}, "max_tokens"),
    (RESPONSES, [], "body"),
    (RESPONSES, {"model": "policy"}, "input"),
    (RESPONSES, RESPONSE | {"input": [5]}, "input[0]"),
    (RESPONSES, RESPONSE | {"input": [{"type": "reasoning", "id": "r"}]}, "input[0].type"),
    (RESPONSES, RESPONSE | {"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input[0].content[0]"),
    (RESPONSES, RESPONSE | {"instructions": 5}, "instructions"),
    (RESPONSES, RESPONSE | {"text": {"format": {"type": "json_object"}}}, "text"),
    (RESPONSES, RESPONSE | {"reasoning": {"effort": "high"}}, "reasoning"),
    (RESPONSES, RESPONSE | {"include": ["reasoning.encrypted_content"]}, "include"),
    (RESPONSES, RESPONSE | {"tools": [{"type": "web_search"}]}, "tools[0]"),
    (RESPONSES, RESPONSE | {"max_output_tokens": -1}, "max_output_tokens"),
    (RESPONSES, RESPONSE | {"previous_response_id": []}, "previous_response_id"),
    (RESPONSES, RESPONSE | {"input": [{"role": "king", "content": "x"}]}, "input"),
]


def test_what_cannot_be_followed_is_refused_by_name_in_its_form():
    def check(base_url, key):
        for path, body, name in REFUSED:
            status, answer = ask(base_url, key, body, path)
            error = answer["error"]
            assert status == 400 and error["type"] == "invalid_request_error", (path, body, answer)
            assert name in f"{error.get('param')} {error['message']}", (path, body, answer)
            assert answer.get("type") == ("error" if path == MESSAGES else None)
        missing = RESPONSE | {"previous_response_id": "resp_of_another"}
        status, answer = ask(base_url, key, missing, RESPONSES)
        assert status == 404 and answer["error"]["code"] == "previous_response_not_found"
        status, answer = ask(base_url, key, ANTHROPIC | {"model": "other"}, MESSAGES)
        assert (status, answer["error"]["type"]) == (404, "not_found_error")

    sampler = Scripted("fine")
    visit(check, sampler)
    assert len(sampler.requests) == 1, "nothing of it reached the sampler"


class Loose:
    """A user's parser that hands on what the model wrote."""

    stop_token_ids: tuple[int, ...] = ()

    def extract_tool_calls(self, tokens, tools):
        return "", [SimpleNamespace(name="add", arguments="{a: 1}")]


@pytest.mark.parametrize("is_loose", [False, True], ids=["cut", "a-loose-parser"])
def test_a_call_whose_arguments_are_no_object_stays_text(is_loose, monkeypatch):
    cut = '<tool_call>\n{"name": "add", "arguments": {"a"'
    if is_loose:
        monkeypatch.setattr(ToolParser, "get_tool_parser", lambda *arguments: Loose())

    def agent(base_url, api_key, row, model):
        tool = {"name": "add", "input_schema": PARAMETERS}
        answer = claude(base_url, api_key).messages.create(model=model, max_tokens=90, messages=[USER], tools=[tool])
        assert [(block.type, block.text) for block in answer.content] == [("text", cut)]

    batch = rollout(Scripted(cut), agent, on_error="raise").batch
    assert batch["responses"][0].tolist() == [*ids(cut), END]


def test_a_response_that_is_not_stored_cannot_be_named():
    def agent(base_url, api_key, row, model):
        create = stock(base_url, api_key).responses.create
        first = create(model=model, input="hi", store=False)
        with pytest.raises(openai.NotFoundError, match="no response"):
            create(model=model, input="on", previous_response_id=first.id)

    rollout(Scripted("one"), agent, on_error="raise")
