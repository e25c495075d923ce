"""LiteLLM as a library, with the provider names under which people write a server of OpenAI's or vLLM's API."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import litellm
from pydantic import BaseModel

litellm.suppress_debug_info = True
NAME = "smollm2-135m-instruct"
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"]},
    },
}


class Answer(BaseModel):
    """Answer with a grade."""

    correct: bool
    grade: int


def main(base_url: str, provider: str) -> None:
    def ask(text: str, **fields: Any) -> Any:
        messages = [{"role": "user", "content": text}]
        return litellm.completion(
            **{"model": f"{provider}/{NAME}", "api_base": base_url, "api_key": "none", "num_retries": 0,
               "messages": messages, "temperature": 0, "max_tokens": 60, "seed": 1} | fields
        )  # fmt: skip

    whole = ask("Name three colors.")
    assert whole.choices[0].message.content
    assert whole.usage.completion_tokens > 0
    chunks = list(ask("Name three colors.", stream=True, stream_options={"include_usage": True}))
    assert (
        "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        == whole.choices[0].message.content
    )
    rebuilt = litellm.stream_chunk_builder(chunks)
    assert rebuilt.choices[0].message.content == whole.choices[0].message.content
    assert rebuilt.usage.completion_tokens == whole.usage.completion_tokens

    structured = ask("Is 2 + 2 = 4?", response_format=Answer, max_tokens=100)
    Answer.model_validate_json(structured.choices[0].message.content)

    history: list[Any] = [{"role": "user", "content": "How is the weather in Oslo?"}]
    called = ask("", messages=history, tools=[TOOL], tool_choice="required").choices[0].message
    assert called.tool_calls
    history.append(called.model_dump())
    for call in called.tool_calls:
        assert json.loads(call.function.arguments)["city"] in ("Oslo", "Rome")
        history.append({"role": "tool", "tool_call_id": call.id, "name": call.function.name, "content": "clear"})
    assert ask("", messages=history, tools=[TOOL]).choices[0].message is not None
    parts = list(ask("How is Rome?", tools=[TOOL], tool_choice="required", stream=True))
    assert litellm.stream_chunk_builder(parts).choices[0].message.tool_calls

    # What LiteLLM adds by itself for other providers is dropped or named, and not an error.
    assert ask("Hi", top_k=5, min_p=0.1, user="somebody", metadata={"tags": ["a"]}).choices

    for kind, fields in (
        (litellm.NotFoundError, {"model": f"{provider}/unknown"}),
        (litellm.BadRequestError, {"temperature": 5}),
        (litellm.ContextWindowExceededError, {"messages": [{"role": "user", "content": "Hi " * 9000}]}),
    ):
        try:
            ask("Hi", **fields)
        except kind:
            continue
        raise AssertionError(f"no {kind.__name__}")

    text = litellm.text_completion(
        model=f"text-completion-openai/{NAME}", api_base=base_url, api_key="none", prompt="One, two,", max_tokens=8
    )
    assert text.choices[0].text
    again = asyncio.run(
        litellm.acompletion(
            model=f"{provider}/{NAME}", api_base=base_url, api_key="none", temperature=0, max_tokens=60, seed=1,
            messages=[{"role": "user", "content": "Name three colors."}],
        )
    )  # fmt: skip
    assert again.choices[0].message.content == whole.choices[0].message.content


if __name__ == "__main__":
    main(*sys.argv[1:])
