"""Closed-loop load: streams of chat requests, one after the other, for as long as a block runs."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence

import httpx

from support.client_threads import ClientThreads

PROMPTS = (
    "Write a Python function that returns the factorial of n.",
    "What is the capital of France, and what is it known for?",
    "Tell a short story about a lighthouse keeper and a storm.",
    "List five reasons to plant a tree.",
    "Write a SQL query that counts the orders of each customer.",
    "Explain how a bicycle stays upright.",
    "Describe a morning at a fish market.",
    "What is the difference between a list and a tuple in Python?",
)


def chat_body(model: str, prompt: str, max_tokens: int) -> dict[str, object]:
    messages = [{"role": "user", "content": prompt}]
    return {"model": model, "messages": messages, "max_tokens": max_tokens, "temperature": 0}


class Traffic(ClientThreads):
    """Background chat requests, used as ``with Traffic(url, model, concurrency=2) as traffic: ...``.

    Failures are collected and raise nothing.
    """

    def __init__(
        self,
        url: str,
        model: str,
        *,
        concurrency: int,
        max_tokens: int = 64,
        prompts: Sequence[str] = PROMPTS,
    ) -> None:
        super().__init__(concurrency, join_seconds=60)
        self.failures: list[str] = []
        self.finished = 0
        self._bodies = itertools.cycle([chat_body(model, prompt, max_tokens) for prompt in prompts])
        self._url = f"{url}/v1/chat/completions"

    def _run(self) -> None:
        """Send requests over a new connection each, as many users would.

        The Service therefore chooses a pod for every request.
        """
        while not self._stop.is_set():
            with self._lock:
                body = next(self._bodies)
            try:
                answer = httpx.post(self._url, json=body, timeout=60, trust_env=False)
                problem = None if answer.status_code == 200 else f"{answer.status_code} {answer.text[:200]}"
            except httpx.HTTPError as error:
                problem = repr(error)
            with self._lock:
                self.finished += problem is None
                self.failures += [f"{time.strftime('%T')} {problem}"] if problem else []
            if problem:
                self._stop.wait(0.5)
