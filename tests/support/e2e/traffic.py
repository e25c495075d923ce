"""Closed-loop load: streams of chat requests, one after the other, for as long as a block runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

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
    """Background chat requests, used as ``with Traffic(url, model, concurrency=2) as traffic: ...``."""

    def __init__(
        self,
        url: str,
        model: str,
        *,
        concurrency: int,
        max_tokens: int = 64,
        prompts: Sequence[str] = PROMPTS,
        pause_seconds: float = 0,
        timeout_s: float = 60,
        temperature: float = 0,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(concurrency, join_seconds=max(60, timeout_s), pause_seconds=pause_seconds)
        self.prompts = prompts
        """They may be replaced at any time."""
        self._model, self._max_tokens = model, max_tokens
        self._url, self._timeout_s = f"{url}/v1/chat/completions", timeout_s
        self._temperature, self._headers = temperature, headers

    def _ask(self, number: int) -> str:
        """Ask over a new connection, as many users would, so that the Service chooses a pod for every request."""
        prompts = self.prompts
        body = chat_body(self._model, prompts[number % len(prompts)], self._max_tokens)
        body |= {"temperature": self._temperature, "seed": number}
        answer = httpx.post(self._url, json=body, headers=self._headers, timeout=self._timeout_s, trust_env=False)
        return "" if answer.status_code == 200 else f"{answer.status_code} {answer.text[:200]}"
