"""OpenAI's client: chats, structured output by `parse`, helpers for streams, tools, completions and errors."""

from __future__ import annotations

import json
import sys
from typing import Any, Literal

import openai
from pydantic import BaseModel

MODEL = "smollm2-135m-instruct"


class Step(BaseModel):
    """Step of a plan."""

    title: Literal["wash", "cut", "cook"]
    minutes: Literal[1, 2, 3]


class Plan(BaseModel):
    """Plan that the model writes."""

    steps: tuple[Step, Step]
    vegetarian: bool


class GetWeather(BaseModel):
    """Look up the weather."""

    city: Literal["Oslo", "Rome"]


def ask(text: str) -> Any:
    return {"model": MODEL, "messages": [{"role": "user", "content": text}], "temperature": 0, "max_tokens": 150}


def main(base_url: str) -> None:
    client = openai.OpenAI(base_url=base_url, api_key="none", max_retries=0)
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL

    said = client.chat.completions.create(**ask("Name three colors."))
    assert said.choices[0].message.content
    raw = client.chat.completions.with_raw_response.create(**ask("Name three colors."), user="somebody")
    assert raw.parse().choices[0].message.content == said.choices[0].message.content

    parsed = client.chat.completions.parse(**ask("Plan a soup."), response_format=Plan)
    assert isinstance(parsed.choices[0].message.parsed, Plan), parsed

    tool = openai.pydantic_function_tool(GetWeather)
    with client.chat.completions.stream(**ask("Plan a soup."), response_format=Plan) as stream:
        kinds = [event.type for event in stream]
        streamed = stream.get_final_completion()
    assert {"content.delta", "content.done"} <= set(kinds), kinds
    assert streamed.choices[0].message.parsed == parsed.choices[0].message.parsed

    called = client.chat.completions.parse(**ask("How is the weather in Oslo?"), tools=[tool], tool_choice="required")
    (call, *_) = called.choices[0].message.tool_calls or []
    assert isinstance(call.function.parsed_arguments, GetWeather), called
    with client.chat.completions.stream(
        **ask("How is the weather in Oslo?"),
        tools=[tool],
        tool_choice="required",
        stream_options={"include_usage": True},
    ) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()
    assert "tool_calls.function.arguments.done" in kinds, kinds
    assert final.usage is not None
    message = final.choices[0].message
    assert message.tool_calls
    # The message as it came goes back, with the result of each call.
    history = [
        *ask("How is the weather in Oslo?")["messages"],
        message,
        *(
            {"role": "tool", "tool_call_id": one.id, "content": json.dumps({"sky": "clear"})}
            for one in message.tool_calls
        ),
    ]
    answer = client.chat.completions.create(**ask("") | {"messages": history}, tools=[tool], tool_choice="none")
    assert answer.choices[0].message.content

    scored = client.completions.create(model=MODEL, prompt="One, two,", max_tokens=0, echo=True, logprobs=1)
    assert scored.choices[0].text == "One, two,"
    likely = client.chat.completions.create(**ask("Hi") | {"max_tokens": 3}, logprobs=True, top_logprobs=2)
    assert len(likely.choices[0].logprobs.content) == 3  # type: ignore[union-attr, arg-type]
    pieces = [
        chunk.choices[0].text for chunk in client.completions.create(model=MODEL, prompt="One, two,", stream=True)
    ]
    assert "".join(pieces)

    many = ask("Hi " * 9000)
    expect("model_not_found", 404, lambda: client.chat.completions.create(**ask("Hi") | {"model": "x"}))
    expect("invalid_value", 400, lambda: client.chat.completions.create(**ask("Hi") | {"top_p": 7}))
    expect("context_length_exceeded", 400, lambda: client.chat.completions.create(**many))
    expect("not_implemented", 501, lambda: client.responses.create(model=MODEL, input="Hi"))


def expect(code: str, status: int, call: Any) -> None:
    caught = None
    try:
        call()
    except openai.APIStatusError as error:
        caught = error
    assert caught is not None, f"no error {code}"
    assert (caught.code, caught.status_code) == (code, status), caught


if __name__ == "__main__":
    main(sys.argv[1])
