"""Constant load of streamed chat requests, each compared with its unbroken answer."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import httpx
import openai

from support.client_threads import ClientThreads
from support.e2e.endpoint import MODEL, Endpoint
from support.e2e.traffic import PROMPTS

MAX_TOKENS = 48
TEMPERATURE = 0.7


@dataclass(frozen=True, slots=True)
class StreamedAnswer:
    """Answer to one request, as its client received it."""

    prompt: str
    text: str
    longest_gap_seconds: float
    """Longest time between two chunks after the first one."""
    problem: str = ""
    """Error of the client; empty if the answer is complete."""


def stream_answer(client: openai.OpenAI, model: str, prompt: str) -> StreamedAnswer:
    """Ask for one streamed answer. Sampling has a seed of the prompt, so the text is always the same."""
    last = time.monotonic()
    parts: list[str] = []
    gap, problem, finish = 0.0, "", None
    try:
        chunks = client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": prompt}],
            max_tokens=MAX_TOKENS,
            temperature=TEMPERATURE,
            seed=PROMPTS.index(prompt),
            stream=True,
        )
        for chunk in chunks:
            now = time.monotonic()
            choice = chunk.choices[0]
            if choice.delta.content:
                gap = max(gap, now - last) if parts else 0.0
                parts.append(choice.delta.content)
                last = now
            finish = choice.finish_reason or finish
        problem = "" if finish else "the stream ended without a finish reason"
    except (openai.OpenAIError, httpx.HTTPError) as error:
        problem = f"{type(error).__name__}: {error}"[:300]
    return StreamedAnswer(prompt, "".join(parts), gap, problem)


def connect(url: str, api_key: str = "none") -> openai.OpenAI:
    """Return a client that repeats nothing by itself."""
    return openai.OpenAI(base_url=f"{url}/v1", api_key=api_key, max_retries=0, timeout=120, http_client=httpx.Client(
        trust_env=False, timeout=120))  # fmt: skip


def unbroken_answers(url: str, model: str, api_key: str = "none") -> dict[str, str]:
    """Return the answer to every prompt while nothing happens."""
    answers = [stream_answer(connect(url, api_key), model, prompt) for prompt in PROMPTS]
    assert not any(answer.problem for answer in answers), answers
    return {answer.prompt: answer.text for answer in answers}


class StreamTraffic(ClientThreads):
    """Clients that ask for streamed answers, one after the other, while a block runs.

    A change of ``api_key`` holds for the next requests.
    """

    def __init__(
        self, url: str, model: str, clients: int, api_key: str = "none", headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(clients, join_seconds=180)
        self.api_key = api_key
        self.answers: list[StreamedAnswer] = []
        self._headers, self._model, self._url = dict(headers or {}), model, url
        self._clients = threading.local()

    def _ask(self, number: int) -> str:
        if not hasattr(self._clients, "own"):
            self._clients.own = connect(self._url)
        options = self._clients.own.with_options(api_key=self.api_key, default_headers=self._headers)
        answer = stream_answer(options, self._model, PROMPTS[number % len(PROMPTS)])
        with self._lock:
            self.answers.append(answer)
        return answer.problem


def failures(answers: Sequence[StreamedAnswer], expected: Mapping[str, str]) -> list[str]:
    """Return what is wrong with the answers: errors, and texts that differ from the unbroken ones."""
    broken = [f"{answer.problem} after {len(answer.text)} characters" for answer in answers if answer.problem]
    differing = [
        f"text differs: {answer.text!r} is not {expected[answer.prompt]!r}"
        for answer in answers
        if not answer.problem and answer.text != expected[answer.prompt]
    ]
    return broken + differing


@contextmanager
def served_meanwhile(
    endpoint: Endpoint, *, clients: int = 1, replaced: bool = False, headers: Mapping[str, str] | None = None
) -> Iterator[str]:
    """Check that requests of some clients are answered as before while a block runs. Yield the URL.

    ``replaced`` says that workers may be added or replaced.
    """
    with endpoint.namespace.reach("service", endpoint.name, 80) as url:
        expected, before = unbroken_answers(url, MODEL), endpoint.identities()
        with StreamTraffic(url, MODEL, clients, headers=headers) as traffic:
            yield url
        print(f"\n{len(traffic.answers)} streamed answers compared")
        assert failures(traffic.answers, expected) == []
        assert replaced or endpoint.identities() == before, "no worker was replaced"
