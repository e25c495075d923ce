"""LangChain's ChatOpenAI: chat, three turns of tools, structured output, streaming and errors."""

from __future__ import annotations

import asyncio
import sys
from typing import Any, Literal

import openai
from langchain_core.messages import AIMessageChunk, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

NAME = "smollm2-135m-instruct"


class Rating(BaseModel):
    """Rating of a film."""

    stars: Literal[1, 2, 3, 4, 5]
    genre: Literal["drama", "comedy"]


@tool
def get_weather(city: Literal["Oslo", "Rome"]) -> str:
    """Look up the weather."""
    return f"clear in {city}"


def main(base_url: str) -> None:
    def model(**fields: Any) -> ChatOpenAI:
        given = {"model": NAME, "base_url": base_url, "api_key": "none", "max_retries": 0, "temperature": 0, "seed": 1}
        return ChatOpenAI(**given | {"max_tokens": 80} | fields)

    chat = model()
    said = chat.invoke([SystemMessage("Be brief."), HumanMessage([{"type": "text", "text": "Name three colors."}])])
    assert said.content
    assert said.usage_metadata["output_tokens"] > 0

    chunks = list(model(stream_usage=True).stream("Name three colors."))
    joined = chunks[0]
    for chunk in chunks[1:]:
        joined = joined + chunk
    assert isinstance(joined, AIMessageChunk)
    assert joined.content == chat.invoke("Name three colors.").content
    assert joined.usage_metadata is not None
    assert len([chunk for chunk in chunks if chunk.content]) > 3, "it must stream"

    history: list[Any] = [HumanMessage("How is the weather?")]
    forced = chat.bind_tools([get_weather], tool_choice="required", parallel_tool_calls=False)
    for _ in range(3):
        called = forced.invoke(history)
        (call,) = called.tool_calls
        assert not called.invalid_tool_calls
        history += [called, ToolMessage(get_weather.invoke(call["args"]), tool_call_id=call["id"])]
    named = chat.bind_tools([get_weather], tool_choice="get_weather", strict=True)
    joined = None
    for chunk in named.stream(history):
        joined = chunk if joined is None else joined + chunk
    assert joined.tool_calls[0]["args"]["city"] in ("Oslo", "Rome")
    assert chat.bind_tools([get_weather], tool_choice="none").invoke(history).content

    for method in ("json_schema", "function_calling"):
        structured = chat.with_structured_output(Rating, method=method, include_raw=True)
        found = structured.invoke("Rate the film.")
        assert isinstance(found["parsed"], Rating), (method, found)
    last = list(chat.with_structured_output(Rating, method="json_schema").stream("Rate the film."))[-1]
    assert isinstance(last, Rating)

    assert asyncio.run(chat.ainvoke("Name three colors.")).content == chat.invoke("Name three colors.").content
    assert len(chat.batch(["Hi", "Ho"], config={"max_concurrency": 2})) == 2
    for kind, failing in (
        (openai.NotFoundError, model(model="unknown")),
        (openai.BadRequestError, model(temperature=5)),
    ):
        try:
            failing.invoke("Hi")
        except kind:
            continue
        raise AssertionError(f"no {kind.__name__}")
    scored = chat.bind(logprobs=True, top_logprobs=2, stop=["\n"]).invoke("Hi")
    assert scored.response_metadata["logprobs"]["content"]


if __name__ == "__main__":
    main(sys.argv[1])
