"""Choices, log-probabilities, echo and tools as OpenAI's client receives them. All tests share one engine."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
import pytest_asyncio

from specdecode_worker.core.messages import Submit
from specdecode_worker.sampling.params import Sampling
from specdecode_worker.server.routes.public import public_app
from specdecode_worker.server.service import Service
from support import small_model
from support.worker.fake_engine import logprob
from support.worker.services import client_of

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.core]

WEATHER: Any = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>'
IDS = small_model.byte_tokenizer()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(lasting_service: Service) -> AsyncIterator[openai.AsyncOpenAI]:
    async with client_of(public_app(lasting_service)) as http:
        yield openai.AsyncOpenAI(base_url="http://worker/v1", api_key="none", http_client=http, max_retries=0)


@pytest.fixture
def submitted(lasting_service: Service, monkeypatch: pytest.MonkeyPatch) -> list[Sampling]:
    """Return the sampling parameters that the engine receives."""
    seen: list[Sampling] = []
    submit = lasting_service.engine.submit

    def spy(request: Submit) -> Any:
        seen.append(request.sampling)
        return submit(request)

    monkeypatch.setattr(lasting_service.engine, "submit", spy)
    return seen


def say_prompt(text: str) -> Any:
    return [{"role": "user", "content": f"SAY:{text}"}]


async def test_choices_have_distinct_seeds_starting_with_the_requests(
    client: openai.AsyncOpenAI, submitted: list[Sampling]
) -> None:
    answer = await client.completions.create(model="small", prompt=["a", "bb"], n=3, seed=5, max_tokens=4)
    assert [choice.index for choice in answer.choices] == list(range(6))
    first, *others = [sampling.seed for sampling in submitted]
    assert first == 5
    assert [first, *others][:3] == [first, *others][3:], "two prompts, the same seeds"
    assert len({first, *others}) == 3
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 24)
    submitted.clear()
    await client.completions.create(model="small", prompt="a", n=3, seed=5, max_tokens=4)
    assert [sampling.seed for sampling in submitted] == [first, *others[:2]], "the same again"


async def test_choices_stream_concurrently(client: openai.AsyncOpenAI) -> None:
    texts = {0: "", 1: ""}
    reasons = {}
    stream = await client.chat.completions.create(model="small", messages=say_prompt("hello"), n=2, stream=True)
    async for chunk in stream:
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
        reasons[chunk.choices[0].index] = chunk.choices[0].finish_reason
    assert (texts, reasons) == ({0: "hello", 1: "hello"}, {0: "stop", 1: "stop"})


async def test_sampling_fields_reach_the_engine(client: openai.AsyncOpenAI, submitted: list[Sampling]) -> None:
    await client.chat.completions.create(
        model="small",
        messages=say_prompt("x"),
        max_completion_tokens=9,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        logit_bias={"7": -100},
        extra_body={"min_p": 0.1, "repetition_penalty": 1.1, "min_tokens": 3, "top_k": 300, "stop_token_ids": [4]},
    )
    (sampling,) = submitted
    assert sampling == Sampling(
        max_tokens=9, seed=sampling.seed, presence_penalty=0.5, frequency_penalty=-0.5, logit_bias=((7, -100),),
        min_p=0.1, repetition_penalty=1.1, min_tokens=3, top_k=0, stop_token_ids=(4,),
    )  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
async def test_chat_logprobs_cover_the_returned_text(client: openai.AsyncOpenAI, stream: bool) -> None:
    asked: Any = {"model": "small", "messages": say_prompt("éa STOP b"), "logprobs": True, "top_logprobs": 2, "seed": 0}
    if stream:
        chunks = [c async for c in await client.chat.completions.create(**asked, stop="STOP", stream=True)]
        entries = [one for c in chunks if c.choices[0].logprobs for one in c.choices[0].logprobs.content or ()]
    else:
        whole = await client.chat.completions.create(**asked, stop="STOP")
        entries = list(whole.choices[0].logprobs.content or ())
    assert b"".join(bytes(one.bytes or ()) for one in entries).decode() == "éa "
    assert [one.logprob for one in entries] == pytest.approx([logprob(token) for token in IDS.encode("éa ").ids])
    assert all([top.logprob for top in one.top_logprobs] == [logprob(0), logprob(1)] for one in entries)


async def test_echo_returns_the_prompt_with_logprobs(client: openai.AsyncOpenAI) -> None:
    answer = await client.completions.create(
        model="small", prompt="é SAY:xy", echo=True, logprobs=1, max_tokens=9, seed=0
    )
    (choice,) = answer.choices
    assert (choice.text, choice.finish_reason) == ("é SAY:xyxy", "stop")
    assert choice.logprobs.tokens == ["bytes:\\xc3", "bytes:\\xa9", *" SAY:xyxy"]
    assert choice.logprobs.text_offset == [0, 0, *range(1, 10)]
    assert (choice.logprobs.token_logprobs or [0])[0] is None
    ids = IDS.encode("é SAY:xyxy").ids
    assert (choice.logprobs.token_logprobs or [])[1:] == pytest.approx([logprob(token) for token in ids[1:]])
    assert (choice.logprobs.top_logprobs or [])[0] is None


async def test_echo_with_max_tokens_zero_scores_the_prompt(client: openai.AsyncOpenAI) -> None:
    for prompt in ("abc", IDS.encode("abc").ids):
        answer = await client.completions.create(model="small", prompt=prompt, echo=True, logprobs=0, max_tokens=0)
        assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("abc", "length")
        assert answer.choices[0].logprobs.tokens == ["a", "b", "c"]
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 0)


@pytest.mark.parametrize("logprobs", [None, 0])
async def test_the_output_completes_a_character_of_the_prompt(client: openai.AsyncOpenAI, logprobs: int | None) -> None:
    first, rest = IDS.encode("🙂").ids[:3], IDS.encode("🙂").ids[3:]
    prompt = [*IDS.encode("SAY:").ids, *rest, *first]
    body: Any = {"model": "small", "prompt": prompt, "logprobs": logprobs, "max_tokens": 1}
    (choice,) = (await client.completions.create(**body)).choices
    assert choice.text == "🙂"
    (choice,) = (await client.completions.create(**body, echo=True)).choices
    assert choice.text == "SAY:\ufffd🙂"
    if logprobs is not None:
        assert (choice.logprobs.text_offset or [])[-1] == len("SAY:\ufffd")
    stream = await client.completions.create(**body, stream=True, stop="🙂")
    assert "".join([chunk.choices[0].text async for chunk in stream]) == ""
    (scored,) = (await client.completions.create(**{**body, "max_tokens": 0}, echo=True)).choices
    assert scored.text == "SAY:\ufffd\ufffd"


async def test_echo_streams(client: openai.AsyncOpenAI) -> None:
    stream = await client.completions.create(model="small", prompt="SAY:b", echo=True, stream=True)
    assert "".join([chunk.choices[0].text async for chunk in stream]) == "SAY:bb"


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"stop": "o w"}, "hell"),
        ({"stop": "o w", "include_stop_str_in_output": True}, "hello w"),
        ({"stop": "l", "min_tokens": 3}, "hel"),
        ({"stop": "lo w", "min_tokens": 4}, "hel"),
        ({"stop": "lo w", "min_tokens": 7}, "hello world"),
        ({"stop": "l"}, "he"),
        ({"stop": ["nothing", "world"]}, "hello "),
        ({"stop": ["world", "or"]}, "hello w"),
        ({"skip_special_tokens": False, "include_stop_str_in_output": True}, "hello world<|end|>"),
        ({"include_stop_str_in_output": True}, "hello world"),
        ({"skip_special_tokens": False}, "hello world"),
    ],
)
async def test_stop_strings_and_special_tokens_in_the_text(
    client: openai.AsyncOpenAI, lasting_service: Service, more: dict[str, Any], text: str
) -> None:
    """The stop string that is complete first ends the text."""
    body: Any = {"model": "small", "prompt": "SAY:hello world", "max_tokens": 40, "extra_body": more}
    whole = await client.completions.create(**body)
    assert (whole.choices[0].text, whole.choices[0].finish_reason) == (text, "stop")
    streamed = await client.completions.create(**body, stream=True)
    assert "".join([chunk.choices[0].text async for chunk in streamed]) == text
    assert lasting_service.engine.in_flight == 0
    assert (await lasting_service.report()).running == 0, "the engine was not told to stop"


async def test_a_tool_call_streams_as_deltas(client: openai.AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(
        model="small", messages=say_prompt(CALL + CALL), tools=[WEATHER], stream=True, logprobs=True
    )
    ids, names, arguments, scored = {}, {}, {0: "", 1: ""}, 0
    async for chunk in stream:
        scored += len((chunk.choices[0].logprobs and chunk.choices[0].logprobs.content) or ())
        for delta in chunk.choices[0].delta.tool_calls or ():
            if delta.id:
                ids[delta.index], names[delta.index] = delta.id, delta.function.name
            arguments[delta.index] += delta.function.arguments or ""
        reason = chunk.choices[0].finish_reason
    assert (names, reason) == ({0: "weather", 1: "weather"}, "tool_calls")
    assert len(set(ids.values())) == 2
    assert {json.loads(text)["city"] for text in arguments.values()} == {"Oslo"}
    assert scored == len((CALL + CALL).encode())


@pytest.mark.parametrize(
    ("tool_choice", "reason"),
    [("required", "tool_calls"), ({"type": "function", "function": {"name": "weather"}}, "stop")],
)
async def test_a_call_of_a_named_function_ends_as_text_does(
    client: openai.AsyncOpenAI, tool_choice: Any, reason: str
) -> None:
    body: Any = {"model": "small", "messages": say_prompt(CALL), "tools": [WEATHER], "tool_choice": tool_choice}
    (choice,) = (await client.chat.completions.create(**body)).choices
    assert (choice.finish_reason, len(choice.message.tool_calls or ())) == (reason, 1)
    chunks = [chunk async for chunk in await client.chat.completions.create(**body, stream=True)]
    assert chunks[-1].choices[0].finish_reason == reason


async def test_parallel_tool_calls_false_keeps_the_first_call(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(
        model="small", messages=say_prompt(CALL + CALL), tools=[WEATHER], parallel_tool_calls=False
    )
    assert len(answer.choices[0].message.tool_calls or ()) == 1


async def test_tool_choice_none_disables_tool_calls(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(
        model="small", messages=say_prompt(CALL), tools=[WEATHER], tool_choice="none"
    )
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (CALL, "stop")
    assert answer.usage.prompt_tokens == len(f"user\nSAY:{CALL}\nassistant\n") + 3, "tools were rendered"


async def test_tool_calls_and_results_are_rendered(client: openai.AsyncOpenAI, lasting_service: Service) -> None:
    called = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    messages: Any = [
        {"role": "assistant", "content": None, "tool_calls": [called]},
        {"role": "tool", "tool_call_id": "call_1", "content": "cold"},
    ]
    http = client_of(public_app(lasting_service))
    tokenized = (await http.post("/tokenize", json={"messages": messages})).json()
    text = (await http.post("/detokenize", json={"tokens": tokenized["tokens"]})).json()["prompt"]
    expected = '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>'
    assert text == f"<|start|>assistant\n{expected}<|end|>\n<|start|>tool\ncold<|end|>\n<|start|>assistant\n"
    assert tokenized["count"] == len(tokenized["tokens"])
    answer = await client.chat.completions.create(model="small", messages=messages, max_tokens=3)
    assert answer.usage.prompt_tokens == tokenized["count"]
    called["function"] = {"name": "weather", "arguments": "Oslo"}
    as_text = await client.chat.completions.create(model="small", messages=messages, max_tokens=3)
    assert as_text.usage.prompt_tokens != answer.usage.prompt_tokens


async def test_continuous_usage_stats(client: openai.AsyncOpenAI) -> None:
    stream = await client.completions.create(
        model="small",
        prompt="SAY:abcdefgh",
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    )
    counts = [chunk.usage.completion_tokens async for chunk in stream if chunk.usage]
    assert counts == sorted(counts)
    assert counts[0] < counts[-1] == 9
