"""Tests of request bodies in the forms that clients send."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from pydantic import ValidationError

from specdecode_worker.server.errors import BadRequest
from specdecode_worker.server.requests import (
    MAX_MESSAGES,
    MAX_PROMPTS,
    MAX_STOP_CHARACTERS,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    JsonObjectFormat,
    StreamOptions,
    StructuredOutputs,
    ignored_header,
    parse,
)


def chat(**fields: Any) -> ChatRequest:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], **fields}
    return parse(ChatRequest, json.dumps(body).encode())


def completion(**fields: Any) -> CompletionRequest:
    return parse(CompletionRequest, json.dumps({"model": "m", "prompt": "hi", **fields}).encode())


def test_defaults_match_openai() -> None:
    assert (completion().token_limit, completion().temperature, completion().top_p) == (16, 1.0, 1.0)
    assert chat().token_limit is None
    assert completion(max_tokens=None, stop=None, seed=None).token_limit == 16


def test_max_completion_tokens_takes_precedence() -> None:
    assert chat(max_tokens=5, max_completion_tokens=7).token_limit == 7
    with pytest.raises(BadRequest, match="max_completion_tokens"):
        completion(max_completion_tokens=7)


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a", ["a"]),
        ([1, 2], [[1, 2]]),
        (["a", "b"], ["a", "b"]),
        ([[1], [2, 3]], [[1], [2, 3]]),
        ([1.0, 2], [[1, 2]]),
        ([[1.0, 2], "a"], [[1, 2], "a"]),
    ],
)
def test_prompt_accepts_four_forms(prompt: Any, expected: Any) -> None:
    assert completion(prompt=prompt).prompt == expected


@pytest.mark.parametrize("prompt", [[], {}, 3, [1.5], ["a", 1], [[1, "a"]], [True], [[1.5]], ["a"] * (MAX_PROMPTS + 1)])
def test_invalid_prompt_forms_are_refused(prompt: Any) -> None:
    with pytest.raises(BadRequest) as refused:
        completion(prompt=prompt)
    assert (refused.value.param or "").startswith("prompt")


def test_message_content_may_be_a_list_of_parts() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert chat(messages=[{"role": "user", "content": parts}]).messages[0].text == "a\nb"
    with pytest.raises(BadRequest, match="only parts of type 'text' are supported, got 'xxx") as refused:
        chat(messages=[{"role": "user", "content": ["x" * 10_000]}])
    assert len(str(refused.value)) < 200, "the text is not sent back"


def test_echoed_assistant_message_is_accepted() -> None:
    echoed = {"role": "assistant", "content": None, "refusal": None, "tool_calls": None, "annotations": []}
    assert chat(messages=[echoed]).messages[0].content == ""
    with pytest.raises(BadRequest, match=r"messages\[0\]\.tool_calls\[0\]\.function"):
        chat(messages=[{**echoed, "tool_calls": [{"id": "1"}]}])
    with pytest.raises(BadRequest, match=r"messages\[0\]\.name"):
        chat(messages=[{**echoed, "name": []}])


def test_unknown_fields_of_messages_tools_and_functions_are_ignored() -> None:
    called = {"name": "f", "arguments": "{}", "output": None}
    history = [
        {"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": {"type": "x"}}], "id": "1"},
        {
            "role": "assistant", "content": None, "refusal": "no", "reasoning_content": "so", "annotations": [{"a": 1}],
            "provider_specific_fields": {},
            "tool_calls": [{"id": "c", "index": 0, "type": "function", "function": called}],
        },
        {"role": "tool", "tool_call_id": "c", "content": "4", "status": "success"},
    ]  # fmt: skip
    function = {"name": "f", "parameters": {}, "additionalProperties": False, "returns": {}}
    tools = [{"type": "function", "function": function, "cache_control": {}}]
    choice = {"type": "function", "function": {"name": "f", "id": 1}, "id": 2}
    body = chat(messages=history, tools=tools, tool_choice=choice)
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {}}}
    assert [message.rendered() for message in body.messages] == [
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        {"role": "assistant", "content": "", "reasoning_content": "so", "thinking": "so", "tool_calls": [call]},
        {"role": "tool", "content": "4", "tool_call_id": "c"},
    ]
    assert body.shown_tools == [{"type": "function", "function": {"name": "f", "parameters": {}}}]


PATHS: list[tuple[dict[str, Any], str]] = [
    ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.name"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "", "schema": {}}}},
     "response_format.json_schema.name"),
    ({"response_format": {"type": "text", "json_schema": {}}}, "response_format.json_schema"),
    ({"tool_choice": 5}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {}}}, "tool_choice.function.name"),
    ({"tool_choice": {"type": "x", "function": {"name": "f"}}}, "tool_choice.type"),
    ({"structured_outputs": {"json": 5}}, "structured_outputs.json"),
    ({"structured_outputs": {"choice": ["a", ""]}}, "structured_outputs.choice[1]"),
    ({"stop": ["a", 5]}, "stop[1]"),
    ({"stop": ["a", "b" * (MAX_STOP_CHARACTERS + 1)]}, "stop[1]"),
    ({"stop": "b" * (MAX_STOP_CHARACTERS + 1)}, "stop"),
    ({"messages": [{"role": "user", "content": "a"}, {"role": "x", "content": "b"}]}, "messages[1].role"),
    ({"repetition_penalty": 1e-39}, "repetition_penalty"),
    ({"temperature": "1", "tool_choice": {"type": "function", "function": {}}}, "temperature"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "path"), PATHS)
def test_errors_name_the_field_as_the_client_wrote_it(fields: dict[str, Any], path: str) -> None:
    with pytest.raises(BadRequest, match=re.escape(path)) as refused:
        chat(**fields)
    assert refused.value.param == path


def test_unknown_fields_of_a_body_are_ignored_and_named() -> None:
    assert chat(**{"foo": 1, "grüße, all": {}, "check": 1}).ignored_fields == ("foo", "grüße, all", "check")
    assert completion(foo=1, store=True, tools=[], user="me").ignored_fields == ("foo",)
    assert completion(foo=None).ignored_fields == ()
    assert ignored_header(("foo", "grüße, all")) == {"X-Specdecode-Ignored": "foo, gr%C3%BC%C3%9Fe%2C%20all"}
    assert ignored_header(()) == {}
    assert len(ignored_header(["é" * 1000] * 1000)["X-Specdecode-Ignored"]) < 8000


UNSUPPORTED = [
    ("guided_json", {}), ("chat_template", "x"), ("return_token_ids", True), ("logits_processors", ["a"]),
    ("documents", [{"text": "a"}]), ("include_reasoning", False), ("functions", [{"name": "f"}]), ("prompt_embeds", ""),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), UNSUPPORTED)
def test_fields_that_would_change_the_answer_are_refused_by_name(name: str, value: Any) -> None:
    for body in (chat, completion):
        with pytest.raises(BadRequest, match=f"^{name} is not supported") as refused:
            body(**{name: value})
        assert (refused.value.param, refused.value.error_code) == (name, "unsupported_parameter")
    with pytest.raises(BadRequest, match="send structured_outputs"):
        chat(guided_regex="a")


REGEX = {"structured_outputs": {"regex": "a"}}
TOOL = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"bad_words": ["a"], **REGEX}, "bad_words"),
        ({"bad_words": [""]}, "bad_words[0]"),
        ({"bad_words": ["a"], "tools": [TOOL], "tool_choice": "required"}, "bad_words"),
        ({"allowed_token_ids": [1], "bad_words": ["a"]}, "allowed_token_ids"),
        ({"allowed_token_ids": [1], "response_format": {"type": "json_object"}}, "allowed_token_ids"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"continue_final_message": True, "add_generation_prompt": False,
          "messages": [{"role": "assistant", "content": ""}]}, "continue_final_message"),
    ],
)  # fmt: skip
def test_rules_about_tokens_exclude_others(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as refused:
        chat(**fields)
    assert refused.value.param == param


def test_calls_in_the_form_before_tools_are_not_ignored() -> None:
    old = {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}}
    with pytest.raises(BadRequest, match="function_call is not supported; send tool_calls") as refused:
        chat(messages=[old])
    assert refused.value.param == "messages[0]"
    chat(messages=[{**old, "content": "x", "function_call": None}])


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_object", "schema": {}}},
        {"structured_outputs": {"regex": "a", "structural_tag": "b"}},
        {"stream": True, "stream_options": {"include_everything": True}},
    ],
)
def test_unknown_fields_of_formats_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(BadRequest, match="unrecognized field"):
        chat(**fields)


VLLM_OUTPUTS = {
    "json": None, "regex": "a", "choice": None, "grammar": None, "json_object": None, "structural_tag": None,
    "disable_fallback": False, "disable_any_whitespace": False, "disable_additional_properties": False,
    "whitespace_pattern": None,
}  # fmt: skip


def test_unset_fields_of_formats_are_left_out() -> None:
    streamed = chat(stream=True, stream_options={"include_usage": None, "include_everything": False})
    assert streamed.stream_options == StreamOptions()
    formatted = chat(response_format={"type": "json_object", "json_schema": None})
    assert formatted.response_format == JsonObjectFormat(type="json_object")
    assert chat(structured_outputs=VLLM_OUTPUTS).structured_outputs == StructuredOutputs(regex="a")


def test_best_of_may_equal_n() -> None:
    assert completion(n=2, best_of=2).n == 2
    for fields in ({"n": 2, "best_of": 3}, {"best_of": 2}, {"n": 2, "best_of": True}):
        with pytest.raises(BadRequest, match="best_of"):
            completion(**fields)


@pytest.mark.parametrize(("field", "value"), [("presence_penalty", False), ("n", True), ("echo", 0), ("n", "1")])
def test_a_value_of_another_type_is_not_neutral(field: str, value: Any) -> None:
    with pytest.raises(BadRequest, match=field):
        completion(**{field: value})


@pytest.mark.parametrize("salt", ["", "x" * 257, 5, ["x"]])
def test_invalid_cache_salt_is_refused(salt: Any) -> None:
    for body in (chat, completion):
        with pytest.raises(BadRequest) as refused:
            body(cache_salt=salt)
        assert refused.value.param == "cache_salt"
        assert body(cache_salt="x" * 256).cache_salt == "x" * 256
        assert body(cache_salt=None).cache_salt is None


def test_seeds_span_64_bits() -> None:
    assert chat(seed=-(2**63)).seed == -(2**63)
    with pytest.raises(BadRequest, match="seed"):
        chat(seed=2**63)


def test_messages_with_their_parts_and_calls_are_bounded() -> None:
    """A body has room for 140,000. They are checked on the event loop, and held while their request waits."""
    turn, part = {"role": "user", "content": ""}, {"type": "text", "text": ""}
    call = {"id": "1", "function": {"name": "f", "arguments": ""}}
    assert len(chat(messages=[turn] * MAX_MESSAGES).messages) == MAX_MESSAGES
    for messages in (
        [turn] * (MAX_MESSAGES + 1),
        [turn, {"role": "user", "content": [part] * MAX_MESSAGES}],
        [turn, {"role": "assistant", "content": "", "tool_calls": [call] * MAX_MESSAGES}],
    ):
        with pytest.raises(BadRequest, match=f"at most {MAX_MESSAGES} messages") as refused:
            chat(messages=messages)
        assert refused.value.param == "messages"


CALLS = {"role": "assistant", "tool_calls": [0] * 1000}
MANY = {str(-number): 0 for number in range(5000)}


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (ChatRequest, {"messages": [0] * 1000}),
        (ChatRequest, {"messages": [CALLS]}),
        (ChatRequest, {"logit_bias": MANY}),
        (ChatRequest, {"stream_options": dict.fromkeys(MANY, 1)}),
        (DetokenizeRequest, {"tokens": [-1] * 1000}),
    ],
    ids=["messages", "calls", "biases", "options", "tokens"],
)
def test_not_all_wrong_entries_are_collected(kind: Any, fields: dict[str, Any]) -> None:
    """A body has room for two million of them, and they are checked on the event loop."""
    with pytest.raises(ValidationError) as refused:
        kind.model_validate({"model": "m", "messages": [{"role": "user", "content": "hi"}], **fields})
    assert refused.value.error_count() <= 64
