"""Reference client of internal streams: opens streams, journals their frames and builds continuations."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import msgspec

from specdecode_worker.contract.internal_stream import (
    INTERNAL_STREAMS,
    Alive,
    ChoiceCounters,
    ChoiceProgress,
    End,
    Error,
    Frame,
    FrameReader,
    Moved,
    Open,
    OpenStream,
    Resume,
    Step,
    encode_document,
)

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def opened(route: str = COMPLETIONS, *, request_id: str = "r-1", **body: Any) -> OpenStream:
    """Return a request; ``body`` are fields that differ from the usual ones."""
    asked: dict[str, Any] = {"model": "small", "max_tokens": 24, "seed": 5, **body}
    asked.setdefault(*(("messages", [{"role": "user", "content": "hi"}]) if route == CHAT else ("prompt", "hello")))
    return OpenStream(route=route, body=json.dumps(asked).encode(), request_id=request_id)


async def frames(client: httpx.AsyncClient, request: OpenStream) -> AsyncIterator[Frame]:
    """Open a stream and yield its frames as they arrive. The client has the URL and the token of the admin port."""
    reader = FrameReader()
    async with client.stream("POST", INTERNAL_STREAMS, content=encode_document(request)) as answer:
        if answer.status_code != 200:
            await answer.aread()
            raise AssertionError(f"{answer.status_code}: {answer.text}")
        async for data in answer.aiter_raw():
            for frame in reader.push(data):
                yield frame


@dataclass
class Journal:
    """Frames of one request over all attempts. ``body`` is what a client has received."""

    request: OpenStream
    start: Open | None = None
    steps: list[Step] = field(default_factory=list)
    last: Moved | Error | End | None = None
    alive: int = 0

    async def follow(self, client: httpx.AsyncClient, *, resume: bool = False) -> Journal:
        """Run an attempt to its last frame, and add what is new to the journal."""
        request = msgspec.structs.replace(self.request, resume=self.resume() if resume else None)
        async for frame in frames(client, request):
            self.add(frame)
        return self

    def add(self, frame: Frame) -> None:
        """Add a frame. A step begins where the journal of its choice ends."""
        match frame:
            case Open():
                self.start = self.start or frame
            case Step():
                have = self.length(frame.choice)
                assert frame.index == have, f"choice {frame.choice} has {have} tokens; the step begins at {frame.index}"
                self.steps.append(frame)
            case Alive():
                self.alive += 1
            case _:
                self.last = frame

    def length(self, choice: int) -> int:
        """Return the number of output tokens of a choice."""
        return sum(len(step.ids) for step in self.steps if step.choice == choice)

    def cut(self, steps: int) -> Journal:
        """Return the journal as it was after some steps."""
        return Journal(self.request, self.start, self.steps[:steps])

    def resume(self) -> Resume:
        progress = tuple(self._progress(choice) for choice in range(len(self.start.choices)))
        return Resume(open=self.start, choices=progress)

    @property
    def end(self) -> End:
        assert isinstance(self.last, End), self.last
        return self.last

    @property
    def body(self) -> bytes:
        """Bytes that the client has received."""
        return self.start.opening + b"".join(step.events for step in self.steps) + self.end.body

    def ids(self, choice: int = 0) -> list[int]:
        return [token for step in self.steps if step.choice == choice for token in step.ids]

    def _progress(self, choice: int) -> ChoiceProgress:
        steps = [step for step in self.steps if step.choice == choice]
        return ChoiceProgress(
            ids=tuple(token for step in steps for token in step.ids),
            logprobs=tuple(one for step in steps for one in step.logprobs),
            prompt_logprobs=tuple(one for step in steps for one in step.prompt_logprobs),
            counters=steps[-1].counters if steps else ChoiceCounters(),
        )


async def all_of(works: Iterable[Awaitable[None]]) -> None:
    """Wait for all works, also after a failure, and raise the first error."""
    results = await asyncio.gather(*works, return_exceptions=True)
    for error in filter(None, results):
        raise error


def answer_of(body: bytes, *, stream: bool) -> dict[str, Any]:
    """Return what a client reads from a response: the body, or the joined events of a stream.

    Speculation statistics are left out, because they depend on the shapes of drafts.
    """
    if not stream:
        whole: dict[str, Any] = json.loads(body)
        whole.pop("metrics")
        return whole
    lines = [line.removeprefix("data: ") for line in body.decode().split("\n\n") if line]
    assert lines[-1] == "[DONE]", lines[-1]
    return _joined([json.loads(line) for line in lines[:-1]])


def _joined(chunks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for part in chunk["choices"]:
            _join(choices.setdefault(part["index"], {"text": "", "calls": {}, "logprobs": [], "ends": []}), part)
    usage = [chunk["usage"] for chunk in chunks if chunk.get("usage") is not None]
    return {
        "heads": sorted({(one["id"], one["object"], one["created"], one["model"]) for one in chunks}),
        "choices": choices,
        "usage": usage,
    }


def _join(choice: dict[str, Any], part: dict[str, Any]) -> None:
    delta = part.get("delta", {"content": part.get("text")})
    choice["text"] += delta.get("content") or ""
    if "reasoning_content" in delta:
        choice["thought"] = choice.get("thought", "") + delta["reasoning_content"]
    if "role" in delta:
        choice.setdefault("roles", []).append(delta["role"])
    for call in delta.get("tool_calls", ()):
        joined = choice["calls"].setdefault(call["index"], {"ids": [], "name": "", "arguments": ""})
        joined["ids"] += [call["id"]] if "id" in call else []
        joined["name"] += call["function"].get("name", "")
        joined["arguments"] += call["function"].get("arguments", "")
    if part.get("logprobs"):
        columns = part["logprobs"]
        choice["logprobs"] += (
            columns["content"]
            if "content" in columns
            else [list(row) for row in zip(*(columns[name] for name in sorted(columns)), strict=True)]
        )
    if part["finish_reason"] is not None:
        choice["ends"].append(part["finish_reason"])
