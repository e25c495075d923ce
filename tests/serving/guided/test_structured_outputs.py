"""Answers that follow a grammar, from a real worker on a small random Llama with a random draft, by OpenAI's client.

Random weights choose any token that a grammar allows, so an answer that fits its grammar owes it to the masks alone.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from statistics import median
from typing import Any

import jsonschema
import openai
import pytest

from specdecode_worker.contract import Plan, TreeShape
from support import small_model
from support.worker_process import WorkerProcess, ready, real

MESSAGES: Any = [{"role": "user", "content": "hi"}]
SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["cat", "dog", "bird"]},
        "legs": {"type": "integer", "minimum": 0, "maximum": 9},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["kind", "legs", "tags"],
    "additionalProperties": False,
}
WEATHER = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"],
           "additionalProperties": False}  # fmt: skip
TOOLS: Any = [
    {"type": "function", "function": {"name": "weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "stop"}},
]


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerProcess]:
    folder = tmp_path_factory.mktemp("models")
    flags = small_model.flags(*small_model.write_pair(folder, {"max_position_embeddings": 1024}))
    with ready(real(flags, folder / "log")) as started:
        started.put_plan(Plan(version=1, initial=TreeShape.parse("tree:4,2,1"), max_depth=6, top_k=4, guard=False))
        yield started
        report = started.report()
        assert (report.running, report.waiting, report.kv_tokens_used) == (0, 0, 0)


@pytest.fixture
def client(worker: WorkerProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{worker.public}/v1", api_key="none", max_retries=0)


def schema_format(schema: dict[str, Any], *, strict: bool = True) -> Any:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": strict}}


def ask(client: openai.OpenAI, **fields: Any) -> Any:
    return client.chat.completions.create(
        **{"model": "small", "messages": MESSAGES, "max_tokens": 400, "seed": 5, **fields}
    ).choices[0]


def structured(client: openai.OpenAI, grammar: dict[str, Any], **fields: Any) -> Any:
    return ask(client, extra_body={"structured_outputs": grammar}, **fields)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_json_schema(client: openai.OpenAI, temperature: float) -> None:
    for seed in range(5):
        choice = ask(client, response_format=schema_format(SCHEMA), temperature=temperature, seed=seed)
        assert choice.finish_reason == "stop"
        jsonschema.validate(json.loads(choice.message.content), SCHEMA)


def test_streamed_answers_and_several_choices(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(
        model="small", messages=MESSAGES, max_tokens=400, seed=5, n=3, response_format=schema_format(SCHEMA)
    )
    for choice in whole.choices:
        jsonschema.validate(json.loads(choice.message.content or ""), SCHEMA)
    stream = client.chat.completions.create(
        model="small", messages=MESSAGES, max_tokens=400, seed=5, stream=True, response_format=schema_format(SCHEMA)
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert text == whole.choices[0].message.content


def test_regex_choice_and_grammar(client: openai.OpenAI) -> None:
    pattern = r"[a-f]{2,5}-[0-9]{3}"
    assert re.fullmatch(pattern, structured(client, {"regex": pattern}).message.content)
    assert structured(client, {"choice": ["left", "right"]}).message.content in ("left", "right")
    lark = 'start: "(" inner ")"\ninner: start | /[0-9]/'
    gbnf = 'root ::= "(" inner ")"\ninner ::= root | [0-9]'
    for grammar in (lark, gbnf):
        content = structured(client, {"grammar": grammar}).message.content
        assert re.fullmatch(r"\(+[0-9]?\)*", content)
    schema = {"json": json.dumps(SCHEMA), "disable_any_whitespace": True}
    content = structured(client, schema).message.content
    jsonschema.validate(json.loads(content), SCHEMA)
    assert not re.search(r"\s", content)


def test_completions_follow_grammars_too(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="small", prompt=["a", "b"], max_tokens=50, extra_body={"structured_outputs": {"choice": ["yes", "no"]}}
    )
    assert all(choice.text in ("yes", "no") for choice in answer.choices)


def test_json_object_is_json_even_if_it_is_cut(client: openai.OpenAI) -> None:
    choice = ask(client, response_format={"type": "json_object"}, max_tokens=60)
    assert choice.message.content.startswith("{")


def test_required_and_named_tool_choice(client: openai.OpenAI) -> None:
    for seed in range(4):
        choice = ask(client, tools=TOOLS, tool_choice="required", parallel_tool_calls=False, seed=seed)
        assert choice.finish_reason == "tool_calls"
        (call,) = choice.message.tool_calls
        schema = WEATHER if call.function.name == "weather" else {"type": "object", "maxProperties": 0}
        jsonschema.validate(json.loads(call.function.arguments), schema)
    named = {"type": "function", "function": {"name": "weather"}}
    choice = ask(client, tools=TOOLS, tool_choice=named, parallel_tool_calls=False)
    assert [call.function.name for call in choice.message.tool_calls] == ["weather"]
    assert choice.finish_reason == "stop"
    jsonschema.validate(json.loads(choice.message.tool_calls[0].function.arguments), WEATHER)


def test_strict_functions_leave_text_free(client: openai.OpenAI) -> None:
    """Random weights write no tag of a call, so the answer is text up to its limit."""
    strict: Any = [{"type": "function", "function": {"name": "weather", "parameters": WEATHER, "strict": True}}]
    free = ask(client, tools=strict, max_tokens=40)
    assert free.finish_reason in ("length", "stop")
    assert not free.message.tool_calls


BAD: list[tuple[dict[str, Any], str]] = [
    ({"properties": {"a": {"type": "objec"}}}, "Invalid type: objec"),
    ({"properties": {"a": {"items": [{"anyOf": [{"type": "string"}, {"pattern": "("}]}]}}}, "unclosed group"),
    ({"$defs": {"x": {"uniqueItems": True}}, "properties": {"a": {"$ref": "#/$defs/x"}}}, "uniqueItems"),
    ({"properties": {"a": {"$ref": "#/$defs/none"}}}, "Pointer '/$defs/none' does not exist"),
    ({"type": "integer", "minimum": 3, "maximum": 2}, r"minimum (3) is greater than maximum (2)"),
]


@pytest.mark.parametrize(("schema", "reason"), BAD)
def test_a_bad_schema_is_refused_with_field_and_reason(
    client: openai.OpenAI, schema: dict[str, Any], reason: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=re.escape(reason)) as refused:
        ask(client, response_format=schema_format(schema))
    assert refused.value.param == "response_format.json_schema.schema"
    with pytest.raises(openai.BadRequestError, match=re.escape(reason)) as refused:
        structured(client, {"json": schema})
    assert refused.value.param == "structured_outputs.json"


def test_unsupported_keywords_are_ignored_without_strict(client: openai.OpenAI) -> None:
    schema = {"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True, "minItems": 1, "maxItems": 2}
    content = ask(client, response_format=schema_format(schema, strict=False)).message.content
    jsonschema.validate(json.loads(content), {**schema, "uniqueItems": False})
    with pytest.raises(openai.BadRequestError, match="uniqueItems"):
        ask(client, response_format=schema_format(schema))


def test_white_space_is_bounded(client: openai.OpenAI) -> None:
    """A bias towards white space would otherwise fill the answer with it."""
    bias = {str(small_model.byte_tokenizer().encode(text).ids[0]): 100 for text in (" ", "\n", "\t")}
    choice = ask(client, response_format=schema_format(SCHEMA), logit_bias=bias, max_tokens=900)
    assert choice.finish_reason == "stop"
    jsonschema.validate(json.loads(choice.message.content), SCHEMA)
    assert re.search("[:,] ", choice.message.content), "the bias must matter"


def test_the_end_of_the_grammar_ends_the_answer(client: openai.OpenAI) -> None:
    """Neither min_tokens, nor ignore_eos, nor a bias against the end token can continue a complete answer."""
    fields: dict[str, Any] = {"structured_outputs": {"choice": ["yes", "no"]}, "ignore_eos": True, "min_tokens": 30}
    choice = ask(client, logit_bias={str(small_model.END_ID): -100}, extra_body=fields)
    assert (choice.finish_reason, choice.message.content in ("yes", "no")) == ("stop", True)
    wanted = {"structured_outputs": {"regex": "(ab)*"}, "min_tokens": 30}
    choice = ask(client, extra_body=wanted, logit_bias={str(small_model.END_ID): 100})
    assert len(choice.message.content) >= 30, "the end is allowed from min_tokens on"


def test_stop_strings_and_logprobs(client: openai.OpenAI) -> None:
    choice = structured(client, {"regex": "[ab]{20}X[ab]{20}"}, stop="X", logprobs=True, top_logprobs=3)
    assert re.fullmatch("[ab]{20}", choice.message.content)
    assert len(choice.logprobs.content) >= 20
    assert all(len(token.top_logprobs) == 3 for token in choice.logprobs.content)


def test_other_requests_do_not_wait_for_a_compilation(client: openai.OpenAI) -> None:
    """Two large schemas at a time compile; a plain request that waited for one would take at least half as long."""
    properties = {f"property_{i}": {"enum": [f"value_{i}_{j}" for j in range(40)]} for i in range(150)}
    stop = threading.Event()
    compiled: list[float] = []

    def compile_schemas(first: int) -> None:
        count = first
        while not stop.is_set() and count < first + 400:
            count += 1
            extended = {**properties, f"extra_{count}": {}}
            schema = {"type": "object", "properties": extended, "additionalProperties": False}
            compiled.append(seconds(response_format=schema_format(schema)))

    def seconds(**fields: Any) -> float:
        began = time.monotonic()
        ask(client, max_tokens=1, **fields)
        return time.monotonic() - began

    seconds()
    with ThreadPoolExecutor(2) as pool:
        for first in (0, 1000):
            pool.submit(compile_schemas, first)
        time.sleep(0.5)
        times = [seconds() for _ in range(20)]
        stop.set()
    assert median(times) < median(compiled) / 2, f"{median(times):.2f} s beside {median(compiled):.2f} s"
