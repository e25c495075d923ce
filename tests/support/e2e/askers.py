"""Clients that ask different questions with short answers and permit the capture of them."""

from __future__ import annotations

from collections.abc import Sequence

import httpx

from support.client_threads import ClientThreads
from support.e2e.endpoint import MODEL

ANSWER_TOKENS = 24


class Askers(ClientThreads):
    """Clients that ask different questions and permit the capture of them, while a block runs.

    They repeat the questions, with other answers, when all were asked.
    """

    def __init__(self, url: str, clients: int, questions: Sequence[str]) -> None:
        super().__init__(clients, join_seconds=120)
        self.questions = questions
        """They may be replaced at any time."""
        self._url = url

    def _ask(self, number: int) -> str:
        questions = self.questions
        body = {
            "model": MODEL,
            "messages": [{"role": "user", "content": questions[number % len(questions)]}],
            "max_tokens": ANSWER_TOKENS,
            "temperature": 0.8,
            "seed": number,
        }
        # A connection for each request, so that the Service spreads them over the workers.
        answer = httpx.post(
            f"{self._url}/v1/chat/completions",
            json=body,
            headers={"X-Specdecode-Capture": "on"},
            timeout=120,
            trust_env=False,
        )
        answer.raise_for_status()
        return ""
